"""A random model shaped as Qwen2.5-VL learns to read digits drawn into images, on a CPU, through the command line:
every tower is trained. Minutes (`make e2e`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import AutoModelForImageTextToText

from finefit.artifacts.atomic import read_lines, read_steps
from tests.cli.conftest import COMMAND
from tests.vision_models import make_vlm, vlm_inputs, vlm_processor, write_reading_task

pytestmark = [pytest.mark.twin, pytest.mark.timeout(1800)]
TRAIN, TEST, EPOCHS, BATCH = 1200, 100, 9, 24
STEPS = TRAIN // BATCH * EPOCHS
SPEC = f"""\
name: reading
seed: 7
device: cpu
model: {{kind: folder, path: model}}
tuning: {{kind: full}}
data:
  train: [{{path: train.jsonl}}]
  test: {{path: test.jsonl}}
  max_tokens: 128
optimizer: {{lr: 1.5e-3}}
schedule: {{epochs: {EPOCHS}, warmup: 0.05}}
global_batch: {BATCH}
levers: {{micro_batch: {BATCH}}}
save: {{every: 150 steps}}
evaluate: [{{task: exact_match, max_new_tokens: 3}}]
"""
WIDE = {"initializer_range": 0.2}
"""Drawn as wide as matrices of 64 columns need it: signals neither die nor grow, and a few hundred steps are enough."""


def finefit(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with its finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("reading")
    make_vlm("qwen2_5_vl", folder / "model", text_config=WIDE, vision_config=WIDE)
    write_reading_task(folder, rows=TRAIN, seed=1, name="train", size=(32, 32))
    write_reading_task(folder, rows=TEST, seed=2, name="test", size=(32, 32))
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    finefit(folder, "run", "spec.yaml")
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> Path:
    return folder / "runs" / "reading-1" / "stages" / "1-sft"


def evaluated(stage: Path, checkpoint: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(
        (stage / "evals" / "exact_match" / f"{checkpoint}.json").read_text(encoding="utf-8")
    )
    assert (record["n"], record["coverage"]) == (TEST, 1.0)
    return record


def test_digits_of_held_out_images_are_read_well_above_chance_and_not_by_the_base(stage: Path) -> None:
    assert evaluated(stage, "base")["metrics"]["exact"]["high"] < 0.15
    assert evaluated(stage, f"checkpoint-{STEPS}")["metrics"]["exact"]["low"] > 0.3


def test_every_tensor_of_every_tower_had_a_gradient(stage: Path) -> None:
    audits = [line for line in read_lines(stage / "metrics.jsonl") if line.get("event") == "audited"]
    assert [audit["step"] for audit in audits] == [1, 2]
    for audit in audits:
        assert {*audit["towers"]} == {"language", "vision", "projector"}
        assert all(found["tensors"] == found["reached"] > 0 for found in audit["towers"].values())
        assert audit["reached"] == audit["tensors"] == sum(found["tensors"] for found in audit["towers"].values())


def test_every_row_is_trained_on_once_an_epoch(stage: Path) -> None:
    steps = list(read_steps(stage / "metrics.jsonl"))
    assert len(steps) == STEPS
    assert {step["rows"] for step in steps} == {BATCH}


def test_transformers_reads_the_result_with_its_processor_and_answers_the_same(folder: Path, stage: Path) -> None:
    checkpoint = stage / "checkpoints" / "final"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    processor = vlm_processor(checkpoint)
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = {item["place"]: item["answer"] for item in evaluated(stage, f"checkpoint-{STEPS}")["items"]}
    found = {}
    for number, row in enumerate(rows[:30], start=1):
        inputs = vlm_inputs(processor, row["question"], [PIL.Image.open(folder / row["image"])])
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        found[f"test.jsonl:{number}"] = processor.tokenizer.decode(tokens, skip_special_tokens=True)
    assert found == {place: answers[place] for place in found}


def test_eval_scores_another_checkpoint_and_compare_finds_the_gain_sure(folder: Path, stage: Path) -> None:
    finefit(folder, "eval", "runs/reading-1", "--checkpoint", "150")
    assert evaluated(stage, "checkpoint-150")
    compared = json.loads(finefit(folder, "compare", "runs/reading-1", "--json"))
    (pairing,) = compared["tasks"][0]["pairings"]
    (change,) = pairing["changes"]
    assert (pairing["n"], change["metric"]) == (TEST, "exact")
    assert change["low"] > 0.3
