"""Each spec in examples/ is valid, reads all of its rows, and trains with a tiny random model in place of its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import finefit
from finefit.data.rows import BadRow
from finefit.data.sources import open_source
from finefit.spec.load import load_pipeline
from finefit.spec.stages import TrainStage
from tests.conftest import make_model_folder
from tests.vision_models import make_vlm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SPECS = sorted(EXAMPLES.glob("*/spec.yaml"))
ALL = {"chat", "classification", "dpo", "json-extraction", "long-context", "pipeline", "several-gpus", "vision"}
TINY = "{kind: folder, path: tiny}"
FLAT = (f"model={TINY}", "card=cpu", "device=cpu", "schedule={steps: 2}", "precision=fp32")
SCORED = ("evaluate.0.limit=1", "evaluate.0.max_new_tokens=2")
CHANGES: dict[str, tuple[str, ...]] = {
    "chat": (*FLAT, *SCORED),
    "classification": (*FLAT, *SCORED),
    "dpo": FLAT,
    "json-extraction": (*FLAT, *SCORED, "tuning.base_bits=null"),
    "long-context": (*FLAT, *SCORED),
    "pipeline": (
        *("card=cpu", "device=cpu", "precision=fp32", f"stages.sft.model={TINY}"),
        *("stages.sft.schedule={steps: 2}", "stages.dpo.schedule={steps: 1}"),
    ),
    "several-gpus": (*FLAT, "engine={kind: single}"),
    "vision": (*FLAT, *SCORED),
}
"""What a tiny model on a CPU needs otherwise; everything else is the example's own."""


def _copied(name: str, folder: Path) -> Path:
    shutil.copytree(EXAMPLES / name, folder)
    if name == "vision":
        make_vlm("qwen2_5_vl", folder / "tiny")
    else:
        make_model_folder(folder / "tiny")
    return folder / "spec.yaml"


def test_the_examples_are_these() -> None:
    assert {path.parent.name for path in SPECS} == ALL == CHANGES.keys()


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.parent.name)
def test_every_row_of_an_example_is_used(path: Path) -> None:
    stages = load_pipeline(path).stages.values()
    trainings: list[Any] = [stage for stage in stages if isinstance(stage, TrainStage)]
    assert trainings
    named = [(split, one) for stage in trainings for split, found in stage.data.sources().items() for one in found]
    here = [(split, source) for split, source in named if "://" not in source.path]
    assert here
    for split, source in here:
        rows = list(open_source(source, path.parent, split=split).rows())
        assert rows
        assert [row for row in rows if isinstance(row, BadRow)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL))
def test_an_example_trains_and_is_scored(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = finefit.load_spec(_copied(name, tmp_path / name), CHANGES[name])
    monkeypatch.chdir(tmp_path)
    run = finefit.run(spec)
    assert run.status == "finished"
    assert list(run.path.glob("**/checkpoints/final"))
    if name not in ("dpo", "several-gpus"):  # these name nothing to be scored
        assert list(run.path.glob("**/evals/*"))
