"""The sample of ChartQA as it was published, where it lies beside the repository: read, checked, trained on and scored,
end to end."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import process
from tests.vision_models import make_vlm

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "chartqa"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample of ChartQA is not here"),
]
SPEC = """\
name: charts
seed: 7
device: cpu
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 2, alpha: 4, targets: {language: all-linear, vision: all-linear, projector: all-linear}}
data:
  train: [{path: chartqa/val/val_augmented.json}]
  test: {path: chartqa/val/val_human.json}
  max_tokens: 512
  images: {max_pixels: 4096}
optimizer: {lr: 1e-3}
schedule: {steps: 3}
global_batch: 4
levers: {micro_batch: 2}
evaluate: [{task: relaxed_accuracy, max_new_tokens: 4}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    make_vlm("qwen2_5_vl", folder / "model")
    (folder / "chartqa").symlink_to(SAMPLE)
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    return folder


def questions(name: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((SAMPLE / "val" / name).read_text(encoding="utf-8"))
    return found


def test_check_counts_every_question_and_shows_a_row_with_its_image_tokens(folder: Path) -> None:
    told = process("check", "spec.yaml", "--show", "1", cwd=folder)
    assert told.code == 0, told.err
    shown = told.out + told.err
    assert f"{len(questions('val_augmented.json'))} used" in shown
    assert "<|image_pad|>" in shown


def test_charts_are_trained_on_and_scored_by_relaxed_accuracy(folder: Path) -> None:
    done = process("run", "spec.yaml", cwd=folder)
    assert done.code == 0, done.out + done.err
    stage = folder / "runs" / "charts-1" / "stages" / "1-sft"
    for checkpoint in ("base", "checkpoint-3"):
        record = json.loads((stage / "evals" / "relaxed_accuracy" / f"{checkpoint}.json").read_text(encoding="utf-8"))
        assert record["n"] == len(questions("val_human.json"))
        assert record["metrics"]["relaxed"]["value"] <= record["metrics"]["relaxed"]["high"] <= 1
        assert {item["reference"] for item in record["items"]} == {
            question["label"] for question in questions("val_human.json")
        }
