"""What is put away comes back as it was, in any order, and what nobody asks for any more is given back."""

import gc
import random

import pytest
import torch

from finefit.artifacts.records import Levers
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
        assert sum(map(len, store._free.values())) == 5


def test_a_step_that_was_broken_off_leaves_nothing_behind() -> None:
    store = PinnedMemory()
    broken = [store.put(torch.full((2,), float(at))) for at in range(4)]
    broken[3]()
    del broken
    gc.collect()
    assert sum(map(len, store._free.values())) == 4
    fetches = [store.put(torch.full((2,), 10.0 + at)) for at in range(3)]
    assert [fetch().tolist() for fetch in reversed(fetches)] == [[12.0, 12.0], [11.0, 11.0], [10.0, 10.0]]


def test_the_real_store_leaves_gradients_equal() -> None:
    plain, offloaded = tuned(LORA), tuned(LORA)
    pull(offloaded, Levers(micro_batch=3, recompute=2, offload=True))
    batches = cut(unequal_examples(), 3)
    for _ in range(2):
        assert_same_step(take_gradients(offloaded, batches, forward=bind(offloaded)), take_gradients(plain, batches))
