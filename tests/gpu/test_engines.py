"""Every engine on one card, as a company of one: NCCL, weights that come from the host part by part, one kernel for the
update."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from finefit.train.ranks import ONE_RANK
from tests.step.conftest import tuned
from tests.step.rank_group import KINDS, TUNINGS, Kind, Left, Training, free_port, train

pytestmark = pytest.mark.gpu


def _on_a_card(_: int, kind: Kind, folder: Path, port: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    for name, tuning in TUNINGS.items():
        alone = train(Training(None, ONE_RANK, tuned(tuning).cuda(), device="cuda"), steps=4)
        model = tuned(tuning) if kind in ("fsdp2", "zero3") else tuned(tuning).cuda()
        torch.save([alone, train(Training(kind, ONE_RANK, model, device="cuda"), steps=4)], folder / f"{name}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_the_numbers_of_a_single_process_on_a_card(kind: Kind, tmp_path: Path) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra finefit[deepspeed] is not installed")
    start_processes(_on_a_card, args=(kind, tmp_path, free_port()), nprocs=1)  # type: ignore[no-untyped-call]
    for name in TUNINGS:
        wanted, found = _read(tmp_path / f"{name}.pt")
        _assert_close(found.gradients, wanted.gradients, 1e-5)
        _assert_close(found.weights, wanted.weights, 1e-3)


def _read(path: Path) -> tuple[Left, Left]:
    wanted, found = torch.load(path, weights_only=False)
    return wanted, found


def _assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], most: float) -> None:
    assert found.keys() == wanted.keys()
    worst = max(((found[name].cpu() - wanted[name].cpu()).abs().max().item(), name) for name in wanted)
    assert worst[0] <= most, f"{worst[1]} differs by {worst[0]}"
