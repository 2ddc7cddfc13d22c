"""Two gloo processes against one: the same numbers, and what is divided is divided."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from tests.slow_cases import slow_but
from tests.step.rank_group import KINDS, LEFT_OUT, STEPS, Kind, Left, alone, as_rank, free_port

QUICK = ("fsdp2",)
"""DeepSpeed is held by tests/train/test_saver.py in `make test`."""
TRAININGS = ("lora", "full", "lora-on", "full-on")


class RankGroup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ran: set[Kind] = set()
        alone(folder)

    def alone(self, training: str) -> Left:
        return self._load(f"alone-{training}")

    def ranks(self, kind: Kind, training: str) -> list[Left]:
        if kind.startswith("zero"):
            pytest.importorskip("deepspeed", reason="the extra finefit[deepspeed] is not installed")
        if kind not in self._ran:
            start_processes(as_rank, args=(2, kind, self.folder, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
            self._ran.add(kind)
        return [self._load(f"{kind}-{training}-{rank}") for rank in range(2)]

    def _load(self, name: str) -> Left:
        left: Left = torch.load(self.folder / f"{name}.pt", weights_only=False)
        return left


@pytest.fixture(scope="module")
def rank_group(tmp_path_factory: pytest.TempPathFactory) -> RankGroup:
    return RankGroup(tmp_path_factory.mktemp("rank_group"))


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_gradients_of_two_ranks_are_those_of_one_process(kind: Kind, training: str, rank_group: RankGroup) -> None:
    """Under recomputation, a loss in chunks and accumulation; one rank has four rows, the other three."""
    wanted = rank_group.alone(training).gradients
    assert min(gradient.abs().max() for gradient in wanted.values()) > 1e-3
    for found in rank_group.ranks(kind, training):
        _assert_close(found.gradients, wanted, 1e-6)


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_weights_and_state_after_ten_clipped_steps_are_those_of_one_process(
    kind: Kind, training: str, rank_group: RankGroup
) -> None:
    """Every second step has one row, so that the other rank has none; one step is not applied. `-on`: three steps more,
    from the single process's weights and state put into another training."""
    wanted = rank_group.alone(training)
    for found in rank_group.ranks(kind, training):
        _assert_close(found.weights, wanted.weights, 1e-5)
        _assert_close(found.slots, wanted.slots, 1e-5)
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
        torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-4)


def test_the_reference_clips_and_leaves_a_step_out(rank_group: RankGroup) -> None:
    """Else the tests above would show less than they say."""
    left = rank_group.alone("full")
    assert max(left.norms) > 0.5
    assert left.slots["model.norm.weight/step"].item() == STEPS - 1
    assert LEFT_OUT < STEPS


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_all_ranks_hold_the_same_numbers(kind: Kind, rank_group: RankGroup) -> None:
    first, second = rank_group.ranks(kind, "full")
    assert first.losses == second.losses
    assert first.norms == second.norms
    _assert_close(second.weights, first.weights, 0.0)


@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_a_base_in_bf16_takes_adapters_in_fp32(kind: Kind, rank_group: RankGroup) -> None:
    wanted = rank_group.alone("mixed")
    assert wanted.facts["dtypes"] == {"torch.bfloat16", "torch.float32"}
    for found in rank_group.ranks(kind, "mixed"):
        assert found.facts["dtypes"] == wanted.facts["dtypes"]
        if (
            kind == "zero3"
            # its hooks change the order in which gradients in bf16 are added; a hundredth of the largest is their
            # rounding
        ):
            _assert_close(found.gradients, wanted.gradients, 1e-3)
        else:
            _assert_close(found.gradients, wanted.gradients, 1e-6)
            _assert_close(found.weights, wanted.weights, 1e-5)


@pytest.mark.parametrize("kind", slow_but(QUICK, ["ddp", "fsdp2", "zero2"]))
def test_fused_kernels_find_the_weights_that_they_read(kind: Kind, rank_group: RankGroup) -> None:
    wanted = rank_group.alone("fused")
    for found in rank_group.ranks(kind, "fused"):
        _assert_close(found.gradients, wanted.gradients, 1e-6)


def test_fp32_weights_that_are_gathered_in_bf16_stay_fp32_and_learn_alike(rank_group: RankGroup) -> None:
    wanted = rank_group.alone("halves")
    for found in rank_group.ranks("fsdp2", "halves"):
        assert found.facts["dtypes"] == {"torch.float32"}
        for name, gradient in wanted.gradients.items():
            assert (found.gradients[name] - gradient).norm() < 0.03 * gradient.norm(), name


@pytest.mark.parametrize("training", ["lora", "full", "mixed"])
@pytest.mark.parametrize("kind", slow_but(QUICK, ["fsdp2", "zero3"]))
def test_each_rank_holds_its_part_of_weights_and_state(kind: Kind, training: str, rank_group: RankGroup) -> None:
    for found in rank_group.ranks(kind, training):
        held = found.facts
        assert held["divided"] == held["parameters"]
        assert held["values_here"] <= 0.51 * held["values"]
        assert held["state_here"] <= 0.51 * held["state"]


@pytest.mark.parametrize("training", ["lora", "full"])
@pytest.mark.slow
def test_zero2_divides_the_state_and_leaves_the_weights_whole(training: str, rank_group: RankGroup) -> None:
    for found in rank_group.ranks("zero2", training):
        assert found.facts["values_here"] == found.facts["values"]
        assert found.facts["state_here"] <= 0.51 * found.facts["state"]


@pytest.mark.slow
def test_ddp_holds_all_of_it(rank_group: RankGroup) -> None:
    for found in rank_group.ranks("ddp", "full"):
        assert found.facts["values_here"] == found.facts["values"]
        assert found.facts["state_here"] == found.facts["state"]


def _assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], most: float) -> None:
    assert found.keys() == wanted.keys()
    worst = max(((found[name].float() - wanted[name].float()).abs().max().item(), name) for name in wanted)
    assert worst[0] <= most, f"{worst[1]} differs by {worst[0]}"
