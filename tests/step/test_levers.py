"""Every exact lever leaves loss and gradients as they are."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.objective.batch import Forward
from finefit.spec.models import Tuning
from finefit.step import levers
from finefit.step.forward import bind
from finefit.step.levers import PinnedMemory, apply_levers, layers_of
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
    apply_levers(model, levers, Elsewhere())
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
    apply_levers(model, PULLED["one layer recomputed"])
    assert [layer.gradient_checkpointing for layer in layers_of(model)] == [True, False]


def test_more_layers_than_there_are_cannot_be_recomputed() -> None:
    with pytest.raises(ModelError, match=r"levers.recompute is 3, but .* has 2 layers"):
        apply_levers(tuned(LORA), replace(PLAIN, recompute=3))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.slow
def test_compiled_layers_leave_loss_and_gradients_equal() -> None:
    levers = replace(PLAIN, micro_batch=8, recompute=2)
    plain, compiled = _taken(tuned(LORA), levers), _taken(tuned(LORA), replace(levers, compile=True))
    torch.testing.assert_close(compiled.outcome.loss, plain.outcome.loss, rtol=1e-6, atol=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(compiled.gradients[name], gradient, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


# What is put away comes back as it was, in any order, and what nobody asks for any more is given back.


def _tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 5).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)]


@pytest.mark.parametrize("seed", range(6))
def test_tensors_come_back_bit_for_bit_in_any_order(seed: int) -> None:
    store, tensors = PinnedMemory(), _tensors()
    order = list(range(len(tensors)))
    if seed:
        random.Random(seed).shuffle(order)
    else:
        order.reverse()  # as backward asks
    fetches = [store.put(tensor) for tensor in tensors]
    for at in order:
        found = fetches[at]()
        assert found.dtype == tensors[at].dtype
        assert torch.equal(found, tensors[at])


def test_the_next_step_uses_the_buffers_of_the_last_one() -> None:
    store = PinnedMemory()
    for _ in range(3):
        fetches = [store.put(torch.randn(4, 4)) for _ in range(5)]
        for fetch in reversed(fetches):
            fetch()
        del fetches, fetch
        gc.collect()
        assert len(store._free) == 5


def test_a_step_that_was_broken_off_leaves_nothing_behind() -> None:
    store = PinnedMemory()
    broken = [store.put(torch.full((2,), float(at))) for at in range(4)]
    broken[3]()
    del broken
    gc.collect()
    assert len(store._free) == 4
    fetches = [store.put(torch.full((2,), 10.0 + at)) for at in range(3)]
    assert [fetch().tolist() for fetch in reversed(fetches)] == [[12.0, 12.0], [11.0, 11.0], [10.0, 10.0]]


def test_the_real_store_leaves_gradients_equal() -> None:
    plain, offloaded = tuned(LORA), tuned(LORA)
    apply_levers(offloaded, Levers(micro_batch=3, recompute=2, offload=True))
    batches = cut(unequal_examples(), 3)
    for _ in range(2):
        assert_same_step(take_gradients(offloaded, batches, forward=bind(offloaded)), take_gradients(plain, batches))


def test_rows_of_many_lengths_need_no_more_host_memory_than_the_longest() -> None:
    store = PinnedMemory()
    for tokens in (*range(100, 110), 50, 105, 120, 119):
        fetches = [store.put(torch.randn(tokens)) for _ in range(4)]
        for fetch in reversed(fetches):
            fetch()
        del fetches, fetch
    assert len(store._free) == 4
    assert sum(held.numel() for held in store._free) <= 4 * 120 * 4


def test_a_tensor_of_the_device_stands_among_the_arguments_of_what_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By those torch knows whose random numbers to keep: without one, dropout on a card would be drawn anew."""
    devices: list[list[str]] = []

    def noted(function: Any, *given: Any, **named: Any) -> Any:
        devices.append([value.device.type for value in given if isinstance(value, torch.Tensor)])
        return checkpoint(function, *given, **named)

    monkeypatch.setattr(levers, "checkpoint", noted)
    model = tuned(LORA)
    apply_levers(model, Levers(micro_batch=3, recompute=2, offload=True))
    take_gradients(model, cut(unequal_examples(), 8), forward=bind(model))
    assert devices
    assert all(devices)
