"""A model of the user's own on the command line: that its code runs is said and recorded, a changed copy is refused,
and rows that do not fit it are named before anything runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from finefit.artifacts.records import Facts, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.stage_records import Stage
from tests.cli.conftest import Finefit
from tests.conftest import write_jsonl
from tests.custom_models import CODE, CONFIG, SPEC, make_custom_project

NOTICE = f"runs code of yours: my_model.py (sha256 {hashlib.sha256(CODE.encode()).hexdigest()[:12]})"
SEEING = CODE.replace(
    "        self.layers = ", "        self.views, self.image_text = 2, '<view>'\n        self.layers = "
).replace(
    '        return {"ids": ids,',
    '        shown = torch.tensor([[float(image.size[0]) for image in row.images] for row in rows])\n        return {"shown": shown, "ids": ids,',  # noqa: E501
)
"""Takes two views of each row, by whose width it is told nothing that matters."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_says_whose_code_it_runs_keeps_a_copy_and_refuses_a_changed_one(here: Path, finefit: Finefit) -> None:
    make_custom_project(
        here,
        rows=8,
        schedule={"steps": 2},
        save={"every": "1 steps"},
        evaluate=[{"task": "exact_match", "max_new_tokens": 4}],
    )
    planned = finefit("plan", "spec.yaml")
    assert planned.code == 0, planned.err
    assert NOTICE in planned.out
    done = finefit("run", "spec.yaml")
    assert done.code == 0, done.err
    assert NOTICE in done.out
    assert "checkpoint-2" in done.out
    run = RunDir(here / "runs" / "own-1")
    copy = run.path / "model" / "my_model.py"
    assert copy.read_text(encoding="utf-8") == CODE
    assert read_record(run.facts, Facts).inputs.code_sha256 == hashlib.sha256(CODE.encode()).hexdigest()
    stage = read_record(run.stages()[0].stage, Stage)
    assert stage.model.kind == "custom"
    assert stage.model.file == "model/my_model.py"
    (here / "my_model.py").unlink()  # the run needs its copy alone
    scored = finefit("eval", "runs/own-1", "--checkpoint", "final")
    assert scored.code == 0, scored.err
    assert "runs code of yours: my_model.py (sha256 " in scored.out + scored.err
    copy.write_text(CODE + "\n# changed\n", encoding="utf-8")
    refused = finefit("run", "runs/own-1", "--set", "schedule.steps=3")
    assert refused.code == 2
    assert "model.file (model/my_model.py): " in refused.err


@pytest.mark.slow
def test_a_changed_file_is_another_run(here: Path, finefit: Finefit) -> None:
    spec = make_custom_project(
        here, rows=4, schedule={"steps": 1}, evaluate=None, data={"train": [{"path": "train.jsonl"}]}
    )
    assert finefit("run", "spec.yaml").code == 0
    assert "finished already" in finefit("run", "spec.yaml").out
    (here / "my_model.py").write_text(CODE + "\n# changed\n", encoding="utf-8")
    again = finefit("run", spec)
    assert again.code == 0, again.err
    assert (here / "runs" / "own-2").is_dir()


def image(folder: Path, name: str) -> str:
    PIL.Image.new("RGB", (12, 8)).save(folder / name)
    return name


@pytest.mark.slow
def test_a_row_with_another_number_of_views_is_named_before_anything_runs(here: Path, finefit: Finefit) -> None:
    make_custom_project(
        here,
        code=SEEING,
        evaluate=None,
        schedule={"steps": 1},
        global_batch=2,
        data={"train": [{"path": "seen.jsonl"}]},
    )
    two = [image(here, "a.png"), image(here, "b.png")]
    rows: list[dict[str, Any]] = [{"prompt": f"What is {at}?", "answer": str(at), "images": two} for at in range(4)]
    write_jsonl(here / "seen.jsonl", [*rows, {"prompt": "What is 9?", "answer": "9", "images": two[:1]}])
    refused = finefit("check", "spec.yaml")
    assert refused.code == 1, refused.err
    assert "seen.jsonl:5 has 1 images, and the model takes 2 with every row" in refused.out
    write_jsonl(here / "seen.jsonl", rows)
    shown = finefit("check", "spec.yaml", "--show", "1")
    assert shown.code == 0, shown.out
    assert "<view><view>What is 0?" in shown.out
    done = finefit("run", "spec.yaml")
    assert done.code == 0, done.err


def test_what_is_wrong_with_the_file_is_told_without_a_traceback(here: Path, finefit: Finefit) -> None:
    make_custom_project(here, code=CODE.replace("import torch\n", "import torch\nimport no_such_package\n", 1))
    refused = finefit("plan", "spec.yaml")
    assert refused.code == 2
    assert "my_model.py:2 failed in import: ModuleNotFoundError" in refused.err


def test_the_document_shows_the_spec_that_the_tests_use() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "custom.md").read_text(encoding="utf-8")
    assert "config: {vocab_size: 260, width: 32, depth: 2, dropped: 0.1}" in text
    assert (
        json.loads(json.dumps(SPEC["model"]["config"])).keys()
        == CONFIG.keys()
        == {"vocab_size", "width", "depth", "dropped"}
    )
