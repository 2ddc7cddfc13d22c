"""One step of a mixture of experts: the cut into micro-batches, the levers and a second rank change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from finefit.artifacts.records import Levers
from finefit.model.load import make_trainable
from finefit.step.forward import bind
from finefit.step.levers import pull
from finefit.train.ranks import ONE_RANK, ManyRanks
from tests.mixtures import FAMILIES, make_mixture
from tests.step.company import Left, Training, free_port, train
from tests.step.conftest import FULL, assert_same_step, cut, take_gradients, unequal_examples

PLAIN = Levers(micro_batch=1)
LEVERS = {
    "recomputed": replace(PLAIN, recompute=2),
    "attention kept": replace(PLAIN, recompute=2, keep_attention=True),
    "loss in chunks": replace(PLAIN, loss_chunk=16),
    "fused": replace(PLAIN, kernels="fused", recompute=1),
    "tiles": replace(PLAIN, mlp_tiles=4),
}


def _mixture(family: str = "qwen2") -> nn.Module:
    model: nn.Module = make_trainable(make_mixture(family), FULL, name="tiny")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_one_row_give_the_gradients_of_all_rows_at_once(family: str) -> None:
    model, examples = _mixture(family), unequal_examples()
    assert_same_step(take_gradients(model, cut(examples, 1)), take_gradients(model, cut(examples, 8)))


@pytest.mark.parametrize("levers", LEVERS.values(), ids=LEVERS)
def test_exact_levers_leave_gradients_as_they_are(levers: Levers) -> None:
    model, batches = _mixture(), cut(unequal_examples(), 3)
    wanted = take_gradients(model, batches)
    pull(model, levers)
    forward = bind(model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused")
    assert_same_step(take_gradients(model, batches, forward=forward), wanted)


# two ranks

Kind = Literal["ddp", "fsdp2"]


def _as_rank(rank: int, kind: Kind, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo")
    assert group is not None
    torch.save(train(Training(kind, ManyRanks(group), _mixture()), steps=3), folder / f"{kind}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone() -> Left:
    return train(Training(None, ONE_RANK, _mixture()), steps=3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_train_what_one_process_does(kind: Kind, alone: Left, tmp_path: Path) -> None:
    """Three experts divided over two ranks, one of which has no row in every second step."""
    start_processes(_as_rank, args=(kind, tmp_path, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        found: Left = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=False)
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)
        for name, gradient in alone.gradients.items():
            torch.testing.assert_close(
                found.gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=f"the gradients of {name} differ"
            )
        for name, weight in alone.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-5, msg=f"{name} differs")
