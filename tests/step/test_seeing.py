"""Every exact lever on models that see leaves loss and gradients as they are, in all towers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.artifacts.records import Levers
from finefit.spec.models import Lora, Subset
from finefit.step.forward import bind
from finefit.step.levers import layers_beside, layers_of, pull
from tests.seeing import GRIDS, gradients, shown, trained

FAMILIES = [*GRIDS]
PLAIN = Levers(micro_batch=2)


def _found(
    model: nn.Module, family: str, levers: Levers, rows: tuple[int, ...] = (2, 1), **how: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    pull(model, levers)
    loss = -bind(model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused")(
        shown(family, rows, **how)
    ).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), gradients(model)


def _same(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_levers_leave_the_gradients_of_all_towers_as_they_are(family: str) -> None:
    model = trained(family)
    wanted = _found(model, family, PLAIN)
    assert wanted[1].keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for levers in (
        Levers(micro_batch=2, recompute=1),
        Levers(micro_batch=2, recompute=2, keep_attention=True),
        Levers(micro_batch=2, recompute=2, offload=True),
        Levers(micro_batch=2, loss_chunk=3),
        Levers(micro_batch=2, mlp_tiles=3),
        Levers(micro_batch=2, recompute=2, mlp_tiles=2, loss_chunk=7, kernels="fused"),
    ):
        _same(_found(model, family, levers), wanted)
    _same(_found(model, family, PLAIN), wanted)  # and let go again


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_with_and_without_images_add_up_to_the_whole_batch(family: str) -> None:
    model, rows = trained(family), (2, 0, 1)
    wanted = _found(model, family, PLAIN, rows)
    pull(model, PLAIN)
    loss = torch.zeros(())
    for at in range(len(rows)):
        part = -bind(model)(shown(family, rows, only=(at,))).sum()
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    _same((loss, gradients(model)), wanted)


def test_vision_blocks_are_computed_again_with_the_layers_where_something_in_them_is_trained() -> None:
    model = trained("qwen2_5_vl")
    pull(model, Levers(micro_batch=1, recompute=1))
    assert [layer.gradient_checkpointing for layer in layers_of(model)] == [True, False]
    assert [layer.gradient_checkpointing for layer in layers_beside(model)] == [True, True]
    pull(model, PLAIN)
    assert not any(layer.gradient_checkpointing for layer in (*layers_of(model), *layers_beside(model)))
    language = trained("qwen2_5_vl", Lora(kind="lora", rank=4))
    pull(language, Levers(micro_batch=1, recompute=2))
    assert not any(layer.gradient_checkpointing for layer in layers_beside(language))


def test_rows_without_images_pass_where_only_the_projector_is_trained() -> None:
    model = trained("llava", Subset(kind="subset", trainable=("projector",)))
    loss, found = _found(model, "llava", PLAIN, rows=(0, 0))
    assert torch.isfinite(loss)
    assert not found
    _, found = _found(model, "llava", PLAIN)
    assert {name.rsplit(".", 2)[0] for name in found} == {"model.multi_modal_projector"}
