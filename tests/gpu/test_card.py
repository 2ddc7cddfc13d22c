"""What only a card can show. Run with `pytest -m gpu -s` on a machine that has one.

The command is started once, for the whole pipeline; what a worker alone can show is asked of a worker.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.processes import chosen_variables
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from tests.conftest import make_rows, write_jsonl
from tests.faults import TRAINING, digests, make_job
from tests.gpu.test_measure import finefit, make_middle_project

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GIB = 2**30
ON_CARD = TRAINING.replace("device: cpu", "device: cuda\ndeterministic: true").replace("epochs: 3", "epochs: 8")
STOPPED = 3
SPLITS = "data: {train: [{path: train.jsonl}], validation: {path: validation.jsonl}, test: {path: test.jsonl}}"
EVALUATED = "evaluate: [{task: json_match, max_new_tokens: 8}]"


def worker(where: StageDir) -> "subprocess.Popen[str]":
    """Started as the command starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "finefit.train.worker", str(where.path)],
        env=os.environ | chosen_variables(os.environ, deterministic=True),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(where: StageDir) -> StageDir:
    process = worker(where)
    words, _ = process.communicate()
    assert process.returncode == 0, words
    return where


def test_the_whole_pipeline_on_a_random_small_model_holds_what_was_predicted(tmp_path: Path) -> None:
    """Plan, check, training with validation, a checkpoint, an evaluation of it and of the base; in bf16, since the card
    has it."""
    path = make_middle_project(tmp_path / "project", "{kind: lora, rank: 32}", EVALUATED)
    path.write_text(path.read_text().replace("data: {train: [{path: train.jsonl}]}", SPLITS))
    write_jsonl(path.parent / "validation.jsonl", make_rows(4, seed=1))
    write_jsonl(path.parent / "test.jsonl", make_rows(4, seed=2))
    found = finefit("run", str(path), cwd=path.parent)
    assert (found["plan"]["sft"]["device"]["value"], found["plan"]["sft"]["precision"]["value"]) == ("cuda", "bf16")
    where = StageDir(path.parent / found["run"] / "stages/1-sft")
    told = {line["event"]: line for line in read_lines(where.metrics) if "event" in line}
    predicted, measured = told["measured"]["predicted_bytes"], told["measured"]["measured_bytes"]
    print(f"\npredicted {predicted / GIB:.3f} GiB, measured {measured / GIB:.3f} GiB")
    assert abs(predicted / measured - 1) < 0.03
    assert [line["step"] for line in read_steps(where.metrics)] == [1, 2, 3]
    assert told["validated"]["step"] == found["result"]["step"] == 3
    assert (where.checkpoints / "final" / "adapter_model.safetensors").exists()
    assert [(scored["checkpoint"], scored["n"]) for scored in found["evaluations"]] == [
        ("base", 4),
        ("checkpoint-3", 4),
    ]


def test_a_run_on_the_card_is_stopped_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    job = make_job(tmp_path, spec=ON_CARD)
    whole, cut = finished(job.fresh()), job.fresh()
    assert read_record(whole.stage, Stage).precision == "bf16"
    process = worker(cut)
    deadline = time.monotonic() + 120
    while process.poll() is None and not list(cut.checkpoints.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    words, _ = process.communicate()
    assert process.returncode == STOPPED, (
        f"the run was over before the signal came; the comparison says nothing\n{words}"
    )
    assert digests(finished(cut).checkpoints / "final") == digests(whole.checkpoints / "final")
    assert [line["loss"] for line in read_steps(cut.metrics)] == [line["loss"] for line in read_steps(whole.metrics)]


def test_full_tuning_on_the_card_lowers_the_loss_and_keeps_fp32_weights(tmp_path: Path) -> None:
    spec = ON_CARD.replace("{kind: lora, rank: 4, alpha: 8, dropout: 0.1}", "{kind: full}")
    where = finished(make_job(tmp_path, spec=spec).fresh())
    losses = [line["loss"] for line in read_steps(where.metrics)]
    assert losses[-1] < losses[0]
    assert {t.dtype for t in load_file(where.checkpoints / "final/model.safetensors").values()} == {torch.float32}
    memory = list(read_lines(where.path / "memory.jsonl"))
    assert all(line["reserved_bytes"] >= line["allocated_bytes"] > 0 for line in memory if line["instant"] == "step")
