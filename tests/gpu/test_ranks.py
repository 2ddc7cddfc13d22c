"""A rank on a card: NCCL carries tensors, gloo what is agreed on. One card has room for one rank; several are tested on
a CPU."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from finefit.artifacts.processes import RankEnv
from finefit.run.launch import free_port
from finefit.train.ranks import joined, open_store

pytestmark = pytest.mark.gpu


def test_a_rank_on_a_card_agrees_on_the_host_and_sums_on_the_card() -> None:
    place = RankEnv(rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=free_port())
    with joined(place, open_store(place, timeout=timedelta(seconds=30)), device="cuda") as ranks:
        assert (ranks.any(True), ranks.any(False), list(ranks.gather({"a": 1}))) == (True, False, [{"a": 1}])
        ranks.barrier()
        on_card, on_host = torch.ones(4, device="cuda"), torch.ones(4)
        dist.all_reduce(on_card)
        dist.all_reduce(on_host)
        assert on_card.tolist() == on_host.tolist() == [1.0] * 4
