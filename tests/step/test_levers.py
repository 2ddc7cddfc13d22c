"""Every exact lever leaves loss and gradients as they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.objective.batch import Forward
from finefit.spec.models import Tuning
from finefit.step.forward import bind
from finefit.step.levers import layers_of, pull
from tests.step.conftest import LORA, TUNINGS, Taken, assert_same_step, cut, take_gradients, tuned, unequal_examples

PLAIN = Levers(micro_batch=3)
PULLED = {
    "one layer recomputed": replace(PLAIN, recompute=1),
    "all layers recomputed": replace(PLAIN, recompute=2),
    "attention kept": replace(PLAIN, recompute=2, keep_attention=True),
    "loss in chunks": replace(PLAIN, loss_chunk=11),
    "inputs offloaded": replace(PLAIN, recompute=2, offload=True),
    "inputs offloaded, attention kept": replace(PLAIN, recompute=2, offload=True, keep_attention=True),
    "mlp in tiles": replace(PLAIN, mlp_tiles=3),
    "fused": replace(PLAIN, kernels="fused"),
    "fused, recomputed": replace(PLAIN, kernels="fused", recompute=2, loss_chunk=7),
    "fused, offloaded, attention kept, in tiles": replace(
        PLAIN, kernels="fused", recompute=2, offload=True, keep_attention=True, mlp_tiles=3
    ),
    "everything": replace(
        PLAIN, recompute=2, offload=True, keep_attention=True, mlp_tiles=4, loss_chunk=5, adapter_inputs="bf16"
    ),
}


class Elsewhere:
    """Memory that is not the device's: what is put there is copied, and copied back."""

    def put(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        held = tensor.to(torch.float64)
        return lambda: held.to(tensor.dtype)


def _forward(model: nn.Module, levers: Levers) -> Forward:
    return bind(model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused")


def _taken(model: nn.Module, levers: Levers) -> Taken:
    pull(model, levers, Elsewhere())
    return take_gradients(model, cut(unequal_examples(), levers.micro_batch), forward=_forward(model, levers))


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("levers", PULLED.values(), ids=PULLED)
def test_an_exact_lever_leaves_loss_and_gradients_equal(tuning: Tuning, levers: Levers) -> None:
    assert_same_step(_taken(tuned(tuning), levers), _taken(tuned(tuning), PLAIN))


@pytest.mark.parametrize(
    "levers", [PULLED["all layers recomputed"], PULLED["inputs offloaded"]], ids=["recomputed", "offloaded"]
)
def test_dropout_is_drawn_again_as_it_was(levers: Levers) -> None:
    def taken(levers: Levers) -> Taken:
        model = tuned(LORA, dropout=0.3)
        torch.manual_seed(5)
        return _taken(model, levers)

    assert_same_step(taken(levers), taken(PLAIN))


def test_the_first_layers_are_the_recomputed_ones() -> None:
    model = tuned(LORA)
    pull(model, PULLED["one layer recomputed"])
    assert [layer.gradient_checkpointing for layer in layers_of(model)] == [True, False]


def test_more_layers_than_there_are_cannot_be_recomputed() -> None:
    with pytest.raises(ModelError, match=r"levers.recompute is 3, but .* has 2 layers"):
        pull(tuned(LORA), replace(PLAIN, recompute=3))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_compiled_layers_leave_loss_and_gradients_equal() -> None:
    levers = replace(PLAIN, micro_batch=8, recompute=2)
    plain, compiled = _taken(tuned(LORA), levers), _taken(tuned(LORA), replace(levers, compile=True))
    torch.testing.assert_close(compiled.outcome.loss, plain.outcome.loss, rtol=1e-6, atol=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(compiled.gradients[name], gradient, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
