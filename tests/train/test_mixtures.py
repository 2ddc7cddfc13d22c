"""A mixture of experts from the spec to its last checkpoint: a killed run ends bit-identical, and what it leaves is read by plain transformers."""

import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finefit.artifacts.journal import read_lines
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import StageResult
from finefit.model.load import load_base
from tests.faults import TRAINING, Job, at_step, finish, make_job, outcome, send_self, start, words
from tests.mixtures import make_mixture_project

TUNINGS = {"full": "{kind: full}", "routers": "{kind: subset, trainable: [mlp.gate]}"}


def spec(tuning: str) -> str:
    """Six steps, the third of which is saved; levers are fixed, since nothing here is about planning."""
    levers = "{micro_batch: 2, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, adapter_inputs: fp32}"
    return re.sub(
        r"levers: .*\n", f"levers: {levers}\n", re.sub(r"tuning: .*\n", f"tuning: {tuning}\n", TRAINING)
    ).replace("epochs: 3", "epochs: 1")


@pytest.fixture(scope="module", params=TUNINGS)
def tuning(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(tuning: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp(tuning), spec=spec(TUNINGS[tuning]), project=make_mixture_project)


@pytest.fixture(scope="module")
def whole(job: Job) -> StageDir:
    where = job.fresh()
    assert finish(start(where)) == 0, words(where)
    return where


def test_every_tensor_is_reached_and_what_is_frozen_stays(tuning: str, whole: StageDir) -> None:
    """Trained whole it learns in six steps, by its routers alone a random one need not."""
    assert read_record(whole.result, StageResult).frozen_unchanged is True
    losses = [loss for _, loss, *_ in outcome(whole).steps]
    assert tuning == "routers" or losses[-1] < losses[0]
    first, second = (line for line in read_lines(whole.metrics) if line.get("event") == "audited")
    assert first["tensors"] == first["reached"]
    assert "zero" not in first.keys() | second.keys()


def test_a_killed_run_ends_bit_identical(job: Job, whole: StageDir) -> None:
    where = job.fresh()
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == outcome(whole)


def test_plain_transformers_reads_the_checkpoint_with_equal_logits(whole: StageDir) -> None:
    folder = whole.checkpoints / "final"
    ours, plain = (
        load_base(folder, device="cpu", dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    ids_BT = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids_BT).logits, plain(input_ids=ids_BT).logits, rtol=1e-5, atol=1e-5)


def test_the_trained_part_has_moved_and_no_other(tuning: str, whole: StageDir, job: Job) -> None:
    start_folder: Path = job.pristine.parent.parent / "model"
    before, after = (
        load_base(f, device="cpu", dtype=torch.float32).state_dict()
        for f in (start_folder, whole.checkpoints / "final")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    if tuning == "routers":
        assert moved == {name for name in before if name.endswith("mlp.gate.weight")}
    else:
        assert moved == {name for name in before if ".shared_expert" not in name}


def test_routers_that_are_trained_in_halves_leave_the_files_of_the_experts_as_they_were(tmp_path: Path) -> None:
    """The mixture is loaded rounded; what is saved is not."""
    job = make_job(tmp_path, spec=spec(TUNINGS["routers"]) + "precision: bf16\n", project=make_mixture_project)
    where = job.fresh()
    assert finish(start(where)) == 0, words(where)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", where.checkpoints / "final")
    )
    moved = {
        name for name in before if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name])
    }
    assert before.keys() == after.keys()
    assert moved == {name for name in before if name.endswith("mlp.gate.weight")}


def _halved(folder: Path, *, spec: str) -> Path:
    path = make_mixture_project(folder, spec=spec)
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(folder / "model")
    return path


def test_a_mixture_in_halves_that_is_trained_whole_is_saved_in_fp32_with_all_of_its_tensors(tmp_path: Path) -> None:
    """Also what stands in for a shared expert and is not trained; plain transformers then rounds nothing."""
    where = make_job(tmp_path, spec=spec(TUNINGS["full"]), project=_halved).fresh()
    assert finish(start(where)) == 0, words(where)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", where.checkpoints / "final")
    )
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(where.checkpoints / "final").dtype is torch.float32
