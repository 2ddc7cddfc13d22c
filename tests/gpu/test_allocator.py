"""The model of the allocator against the allocator. Run on a card with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True pytest -m gpu`."""

import random

import pytest
import torch

from finefit.rehearse.allocator import Event, replay
from tests.gpu.segments import expandable_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    expandable_alone,
]


def make_stream(seed: int) -> list[Event]:
    """Sizes from bytes to a hundred MiB; what lives longest was often made first, as in training."""
    chance = random.Random(seed)
    events: list[Event] = []
    alive: list[int] = []
    for ident in range(150):
        events.append((ident, int(2 ** chance.uniform(3, 27))))
        alive.append(ident)
        while alive and chance.random() < 0.45:
            events.append((alive.pop(chance.randrange(len(alive)) if chance.random() < 0.3 else -1), 0))
    return events


@pytest.mark.parametrize("seed", range(20))
def test_random_streams_reserve_what_the_model_says(seed: int) -> None:
    events = make_stream(seed)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    held: dict[int, torch.Tensor] = {}
    for ident, num_bytes in events:
        if num_bytes:
            held[ident] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        else:
            del held[ident]
    found = replay(events)
    assert before == 0, "something else holds memory of this process"
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == (
        found.allocated_bytes,
        found.reserved_bytes,
    )
