"""Every exact lever on models that see leaves loss and gradients as they are, in all towers."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.artifacts.processes import RankEnv
from finefit.artifacts.records import Levers
from finefit.objective.losses import sft_loss
from finefit.spec.models import Lora, Subset
from finefit.spec.schema import AdamW
from finefit.step.engine import SINGLE_PROCESS, DdpEngine, TrainEngine
from finefit.step.forward import bind
from finefit.step.levers import apply_levers, layers_of, other_layers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from finefit.train.audit import Audit
from finefit.train.ranks import ONE_RANK, Ranks, joined, open_store
from tests.ranks import as_ranks
from tests.vision_batches import GRIDS, gradients, image_batch, trained

FAMILIES = [*GRIDS]
PLAIN = Levers(micro_batch=2)


def _found(
    model: nn.Module, family: str, levers: Levers, rows: tuple[int, ...] = (2, 1), **how: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    apply_levers(model, levers)
    loss = -bind(model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused")(
        image_batch(family, rows, **how)
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
    apply_levers(model, PLAIN)
    loss = torch.zeros(())
    for at in range(len(rows)):
        part = -bind(model)(image_batch(family, rows, only=(at,))).sum()
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    _same((loss, gradients(model)), wanted)


def test_vision_blocks_are_computed_again_with_the_layers_where_something_in_them_is_trained() -> None:
    model = trained("qwen2_5_vl")
    apply_levers(model, Levers(micro_batch=1, recompute=1))
    assert [layer.gradient_checkpointing for layer in layers_of(model)] == [True, False]
    assert [layer.gradient_checkpointing for layer in other_layers(model)] == [True, True]
    apply_levers(model, PLAIN)
    assert not any(layer.gradient_checkpointing for layer in (*layers_of(model), *other_layers(model)))
    language = trained("qwen2_5_vl", Lora(kind="lora", rank=4))
    apply_levers(language, Levers(micro_batch=1, recompute=2))
    assert not any(layer.gradient_checkpointing for layer in other_layers(language))


def test_rows_without_images_pass_where_only_the_projector_is_trained() -> None:
    model = trained("llava", Subset(kind="subset", trainable=("projector",)))
    loss, found = _found(model, "llava", PLAIN, rows=(0, 0))
    assert torch.isfinite(loss)
    assert not found
    _, found = _found(model, "llava", PLAIN)
    assert {name.rsplit(".", 2)[0] for name in found} == {"model.multi_modal_projector"}


# Two ranks that train a model that sees, one of which has no image: together they are one process, and each is told
# what its own rows reached.

FAMILY, ROWS = "llava", (1, 0)
COUNTS = {"language": 28, "vision": 12, "projector": 4}
Left = tuple[list[float], dict[str, Tensor], list[dict[str, Any]]]
"""Losses, weights, and what was told by the audit."""


def _train(ranks: Ranks, engine: TrainEngine, rows: tuple[int, ...]) -> Left:
    torch.set_num_threads(1)
    model, told = trained(FAMILY), list[dict[str, Any]]()
    optimizer = engine.prepare(model, partial(make_optimizer, spec=AdamW(lr=1e-2, eps=1e-4), device="cpu"))
    forward, audit = bind(model), Audit(model, engine, ranks, lambda **line: told.append(line))
    losses = []
    for step in range(3):
        batches = [image_batch(FAMILY, ROWS, only=(row,), seed=step) for row in rows]
        outcome = optimizer_step(
            batches,
            forward=forward,
            objective=audit.watched(sft_loss),
            optimizer=optimizer,
            clip=1.0,
            decide=partial(audit.decide, step + 1, lambda: None),
            count=20,
            engine=engine,
        )
        losses.append(float(outcome.loss))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, told


def _as_rank(place: RankEnv) -> Left:
    with joined(place, open_store(place, timeout=timedelta(seconds=120)), device="cpu") as ranks:
        return _train(ranks, DdpEngine(ranks), (place.rank,))


def test_ranks_with_and_without_images_train_as_one_process_does() -> None:
    losses, weights, told = _train(ONE_RANK, SINGLE_PROCESS, (0, 1))
    assert [line["ranks"] for line in told] == [[COUNTS]] * 2
    ended = as_ranks(2, _as_rank, deadline_seconds=300)
    assert [(end.error, end.trace) for end in ended] == [(None, "")] * 2
    for end in ended:
        found, own, lines = end.value
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        for name, tensor in weights.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
        assert [line["ranks"] for line in lines] == [[COUNTS, {"language": 28}]] * 2
        assert all(
            line["towers"] == {name: {"tensors": count, "reached": count} for name, count in COUNTS.items()}
            for line in lines
        )


def test_steps_that_show_nothing_leave_the_audit_waiting_for_one_that_does() -> None:
    model, told = trained(FAMILY), list[dict[str, Any]]()
    optimizer = make_optimizer(model, AdamW(lr=1e-2, eps=1e-4), device="cpu")
    forward, audit = bind(model), Audit(model, SINGLE_PROCESS, ONE_RANK, lambda **line: told.append(line))
    for step, row in enumerate((1, 1, 0, 1, 0, 0)):
        optimizer_step(
            [image_batch(FAMILY, ROWS, only=(row,))],
            forward=forward,
            objective=audit.watched(sft_loss),
            optimizer=optimizer,
            clip=None,
            decide=partial(audit.decide, step + 1, lambda: None),
        )
    assert [(line["step"], line["towers"]["vision"]["reached"], "no_image" in line) for line in told] == [
        (1, 0, True),
        (2, 0, True),
        (3, 12, False),
        (4, 0, True),
        (5, 12, False),
    ]
