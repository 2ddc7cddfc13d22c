"""A tiny model that sees, with adapters in all its towers, through the command line: killed and gone on with, and in
two processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.rundir import StageDir
from tests.e2e.test_several_ranks import FINEFIT, done, finish, started, wait_until
from tests.faults import outcome
from tests.vision_models import make_vlm, write_reading_task

ROWS, EPOCHS, BATCH = 24, 5, 4
STEPS = ROWS // BATCH * EPOCHS
SPEC = f"""\
name: sees
seed: 7
device: cpu
model: {{kind: folder, path: model}}
tuning: {{kind: lora, rank: 2, alpha: 4, targets: {{language: all-linear, vision: all-linear, projector: all-linear}}}}
data:
  train: [{{path: train.jsonl}}]
  max_tokens: 128
optimizer: {{lr: 5e-3}}
schedule: {{epochs: {EPOCHS}}}
global_batch: {BATCH}
levers: {{micro_batch: 2}}
save: {{every: 5 steps}}
"""
TOWERS = {"language", "vision", "projector"}
pytestmark = pytest.mark.timeout(900)


def project(folder: Path, more: str = "") -> StageDir:
    """Images of many sizes."""
    make_vlm("qwen2_5_vl", folder / "model")
    write_reading_task(folder, rows=ROWS, seed=1, name="train")
    (folder / "spec.yaml").write_text(SPEC + more, encoding="utf-8")
    return StageDir(folder / "runs" / "sees-1" / "stages" / "1-sft")


def run(folder: Path) -> str:
    with started(FINEFIT, folder) as process:
        text = finish(process)
    assert process.returncode == 0, text
    return text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StageDir:
    """One process, finished; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    where = project(folder)
    run(folder)
    return where


def test_a_run_that_was_killed_goes_on_bit_for_bit(whole: StageDir, tmp_path: Path) -> None:
    where = project(tmp_path)
    with started(FINEFIT, tmp_path) as process:
        wait_until(lambda: done(where) >= 7, process)
    assert done(where) < STEPS
    assert "resumed from checkpoint-" in run(tmp_path)
    assert outcome(where) == outcome(whole)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> StageDir:
    """The same in two processes."""
    folder = tmp_path_factory.mktemp("two")
    where = project(folder, "engine: {kind: ddp, devices: 2}\n")
    run(folder)
    return where


@pytest.mark.slow
def test_two_processes_come_to_the_losses_and_weights_of_one(whole: StageDir, two: StageDir) -> None:
    ones, twos = list(read_steps(whole.metrics)), list(read_steps(two.metrics))
    assert len(ones) == len(twos) == STEPS
    assert [line["loss"] for line in twos] == pytest.approx([line["loss"] for line in ones], rel=1e-4)
    one, other = (load_file(where.checkpoints / "final" / "adapter_model.safetensors") for where in (whole, two))
    assert {*one} == {*other}
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_step_of_two_processes_has_the_rows_of_the_global_batch_and_an_epoch_every_row_once(
    whole: StageDir, two: StageDir
) -> None:
    for where in (whole, two):
        steps = list(read_steps(where.metrics))
        assert {step["rows"] for step in steps} == {BATCH}
        assert sum(step["rows"] for step in steps if step["epoch"] <= 1) == ROWS
    tokens = [[step["tokens"] for step in read_steps(where.metrics)] for where in (whole, two)]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_every_tower_is_reached_on_both_ranks_and_the_journal_says_so(two: StageDir) -> None:
    audits = [line for line in read_lines(two.metrics) if line.get("event") == "audited"]
    assert [audit["step"] for audit in audits] == [1, 2]
    for audit in audits:
        assert {*audit["towers"]} == TOWERS
        assert all(found["tensors"] == found["reached"] > 0 for found in audit["towers"].values())
        wanted = {tower: found["tensors"] for tower, found in audit["towers"].items()}
        assert audit["ranks"] == [wanted, wanted]
