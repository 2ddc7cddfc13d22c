"""What is put away comes back as it was, in any order, and what nobody asks for any more is given back."""

import gc
import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.records import Levers
from finefit.step import levers
from finefit.step.forward import bind
from finefit.step.levers import pull
from finefit.step.offload import PinnedMemory
from tests.step.conftest import LORA, assert_same_step, cut, take_gradients, tuned, unequal_examples


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
    pull(offloaded, Levers(micro_batch=3, recompute=2, offload=True))
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
        gc.collect()
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
    pull(model, Levers(micro_batch=3, recompute=2, offload=True))
    take_gradients(model, cut(unequal_examples(), 8), forward=bind(model))
    assert devices
    assert all(devices)
