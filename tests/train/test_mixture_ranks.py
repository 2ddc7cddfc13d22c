"""A mixture of experts on two ranks is the mixture on one, whether its routers are trained or all of it, however its weights are divided."""

import re
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from finefit.artifacts.journal import read_steps
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import StageResult
from finefit.spec.schema import Single
from tests.faults import FULL, TRAINING, Job, finish, make_job, start, words
from tests.mixtures import make_mixture_project
from tests.train.test_ranks_checkpoints import ENGINES, assert_close, run_ranks, sure, tensors, under
from tests.train.test_router_run import GATES

SPECS = {
    "routers": sure(re.sub(r"tuning: .*\n", GATES, TRAINING)).replace("epochs: 3", "epochs: 1"),
    "full": sure(FULL).replace("epochs: 3", "epochs: 1"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, StageDir]]:
    """By tuning, as one process leaves it."""
    found = {}
    for tuning, spec in SPECS.items():
        job = make_job(
            tmp_path_factory.mktemp(tuning), spec=spec, project=partial(make_mixture_project, family="qwen2")
        )
        where = job.fresh()
        assert finish(start(where)) == 0, words(where)
        found[tuning] = (job, where)
    return found


def weights(where: StageDir) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(where.checkpoints / "final")
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("tuning", "kind"),
    [("routers", "ddp"), ("routers", "fsdp2"), ("routers", "zero2"), ("full", "fsdp2"), ("full", "zero3")],
)
def test_two_ranks_go_on_from_one_and_come_to_what_it_comes_to(
    tuning: str, kind: str, alone: dict[str, tuple[Job, StageDir]]
) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra finefit[deepspeed] is not installed")
    job, reference = alone[tuning]
    where = job.copy(reference.run)
    where.routing.unlink(missing_ok=True)
    under(where, ENGINES[kind], after=3)
    assert run_ranks(where) == 0, words(where)
    assert_close(tensors(where, 6), tensors(reference, 6))
    losses = [[line["loss"] for line in read_steps(found.metrics)] for found in (reference, where)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    if tuning == "routers":
        mine, base = (
            weights(where),
            dict(AutoModelForCausalLM.from_pretrained(reference.run.parents[1] / "model").named_parameters()),
        )
        assert {name for name in base if not torch.equal(mine[name], base[name])} == {
            f"model.layers.{at}.mlp.gate.weight" for at in range(2)
        }
        assert read_record(where.result, StageResult).frozen_unchanged is True
        assert where.routing.exists() == (kind != "fsdp2")
        assert ("routing is not measured: the model is divided" in words(where)) == (kind == "fsdp2")


def test_one_process_goes_on_from_two_ranks(alone: dict[str, tuple[Job, StageDir]]) -> None:
    """Of what they saved, the frozen part came from the base's files."""
    job, reference = alone["routers"]
    where = job.copy(reference.run)
    under(where, ENGINES["fsdp2"], after=0)
    assert run_ranks(where) == 0, words(where)
    under(where, Single(kind="single"), after=3)
    assert finish(start(where)) == 0, words(where)
    assert_close(tensors(where, 6), tensors(reference, 6))
