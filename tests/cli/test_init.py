"""`finefit init DATA` as a new user meets it: from rows to a spec that `finefit plan` accepts, a flag for every
question, and nothing written where rows, model or a flag cannot be used."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from finefit.spec.load import load_any
from finefit.spec.models import FolderModel, HubModel
from finefit.spec.schema import Spec
from tests.cli.conftest import COMMAND, Finefit, environment, files_with_times
from tests.conftest import make_model_folder, make_rows, write_jsonl

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NOT_DATA = ("SOURCE.txt", "dataset_info.json", "LongBench_dataset2prompt.json")
pytestmark = pytest.mark.usefixtures("rows")
TINY = ("--model", "tiny", "--card", "cpu", "--yes")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows and a model; the working directory."""
    folder = tmp_path / "new"
    folder.mkdir()
    make_model_folder(folder / "tiny")
    write_jsonl(folder / "train.jsonl", make_rows(60))
    write_jsonl(folder / "test.jsonl", make_rows(6, seed=9))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def _spec(path: str = "spec.yaml") -> Spec:
    found = load_any(Path(path))
    assert isinstance(found, Spec)
    return found


def test_a_spec_is_written_that_plan_accepts_and_that_means_what_init_says(finefit: Finefit) -> None:
    answer = finefit("init", "train.jsonl", *TINY, "--task", "exact_match", "--epochs", "2", "--json")
    assert answer.code == 0
    document, spec = answer.document, _spec()
    assert document["written"] == "spec.yaml"
    assert (document["fits"], document["data"]["rows"], document["data"]["test"]) == (True, 60, "test.jsonl")
    assert spec.model == FolderModel(kind="folder", path=document["chosen"]["model"])
    assert (spec.card, spec.schedule.epochs) == (document["chosen"]["card"], document["chosen"]["epochs"]) == ("cpu", 2)
    assert [one.label for one in spec.evaluate] == [document["chosen"]["task"]] == ["exact_match"]
    planned = finefit("plan", "spec.yaml", "--json").document
    assert planned["peak_bytes"] == document["plan"]["peak_bytes"]


def test_the_time_is_kept_with_fewer_epochs(finefit: Finefit) -> None:
    whole = finefit("init", "train.jsonl", *TINY, "--epochs", "900", "--json").document
    hours = str(whole["plan"]["total_seconds"] / 3600 / 4)
    short = finefit(
        "init", "train.jsonl", *TINY, "--epochs", "900", "--hours", f"{hours}", "--json", "--force"
    ).document
    assert short["chosen"]["epochs"] == pytest.approx(225, rel=0.1)
    assert _spec().schedule.epochs == short["chosen"]["epochs"]


def test_a_spec_that_is_there_is_not_replaced_without_force(finefit: Finefit) -> None:
    Path("spec.yaml").write_text("mine")
    answer = finefit("init", "train.jsonl", *TINY)
    assert (answer.code, Path("spec.yaml").read_text()) == (2, "mine")
    assert "--force" in answer.err
    assert finefit("init", "train.jsonl", *TINY, "--force").code == 0
    assert _spec().data.train[0].path == "train.jsonl"


def test_a_spec_in_another_folder_finds_rows_and_model(finefit: Finefit) -> None:
    Path("specs").mkdir()
    assert finefit("init", "train.jsonl", *TINY, "--out", "specs/mine.yaml").code == 0
    assert finefit("plan", "specs/mine.yaml", "--json").document["fits"]


@pytest.mark.slow  # changes that would make it fit are rehearsed
def test_a_model_that_does_not_fit_is_written_and_ends_with_one(finefit: Finefit) -> None:
    answer = finefit("init", "train.jsonl", "--model", "tiny", "--card", "500MiB", "--json")
    assert (answer.code, answer.document["fits"]) == (1, False)
    assert finefit("plan", "spec.yaml").code == 1


def test_without_the_hub_a_known_model_is_planned_by_its_shape(finefit: Finefit) -> None:
    answer = finefit("init", "train.jsonl", "--model", "Qwen/Qwen3-0.6B", "--card", "RTX 4090", "--json")
    assert (answer.code, answer.document["fits"]) == (0, True)
    assert answer.document["plan"]["peak_bytes"] > 2 * 600_000_000
    assert _spec().model == HubModel(kind="hub", id="Qwen/Qwen3-0.6B")
    assert "Qwen/Qwen3-0.6B" in answer.err


def test_without_the_hub_an_unknown_model_is_written_unplanned_with_what_to_do(finefit: Finefit) -> None:
    answer = finefit("init", "train.jsonl", "--model", "owner/unknown", "--card", "RTX 4090", "--json")
    assert (answer.code, answer.document["fits"], answer.document["plan"]) == (0, None, None)
    assert "owner/unknown" in answer.err
    assert "Qwen/Qwen3-4B" in answer.err  # what can be planned
    assert _spec().model == HubModel(kind="hub", id="owner/unknown")


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "rows that are not there": (("trian.jsonl", *TINY), "train.jsonl"),
    "no rows and no terminal": (TINY, "--help"),
    "a config of another tool": (("config.yaml", *TINY), "finefit init --from config.yaml"),
    "a model folder that is not there": (("train.jsonl", "--model", "./modle", "--card", "cpu"), "modle"),
    "a model without a name": (("train.jsonl", "--model", "", "--card", "cpu"), "smollm2-135m"),
    "a card that is unknown": (("train.jsonl", "--model", "tiny", "--card", "RTX 9"), "RTX 9"),
    "a task that is unknown": (("train.jsonl", *TINY, "--task", "rogue"), "rouge"),
    "fields that are misspelt": (("train.jsonl", *TINY, "--fields", "{promt: a}"), "prompt"),
    "a folder for the spec that is not there": (("train.jsonl", *TINY, "--out", "no/spec.yaml"), "--out"),
    "rows and a config": (("train.jsonl", "--from", "config.yaml"), "give one"),
    "a tool that is unknown": (("--from", "config.yaml", "--tool", "zzz"), "axolotl"),
    "no hours": (("train.jsonl", *TINY, "--hours", "0"), "--hours"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_writes_nothing_and_says_what_to_do(rows: Path, finefit: Finefit, mistake: str) -> None:
    Path("config.yaml").write_text("stage: sft\n")
    before = files_with_times(rows)
    arguments, remedy = REFUSED[mistake]
    answer = finefit("init", *arguments, "--json")
    assert answer.code == answer.document["error"]["exit_code"] == 2
    assert remedy in answer.err
    assert files_with_times(rows) == before


def test_images_for_a_model_of_text_are_refused_before_a_spec_is_written(rows: Path, finefit: Finefit) -> None:
    write_jsonl(rows / "images.jsonl", [{"question": f"what {n}?", "answer": "a", "image": "a.png"} for n in range(9)])
    answer = finefit("init", "images.jsonl", *TINY)
    assert answer.code == 2
    assert "images.jsonl holds images" in answer.err
    assert not Path("spec.yaml").exists()


def test_on_a_terminal_at_most_five_things_are_asked_and_a_wrong_name_again() -> None:
    asked = _on_a_terminal(["init"], ["trian.jsonl", "train.jsonl", "cpu", "tiny", "", ""])
    assert asked == ["data file", "data file", "card", "base model", "task", "hours at most"]
    assert _spec().model == FolderModel(kind="folder", path="tiny")


def _on_a_terminal(arguments: list[str], answers: list[str]) -> list[str]:
    """The questions that were asked."""
    ours, theirs = pty.openpty()
    place = environment() | {"COLUMNS": "80", "TERM": "dumb"}
    with subprocess.Popen([*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=place) as child:
        os.close(theirs)
        os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
        said = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # Linux's word for the end of a terminal
                break
            said += chunk
    os.close(ours)
    text = said.decode()
    assert child.returncode == 0, text
    return re.findall(r"data file(?=: )|card(?= \()|base model|task(?= that)|hours at most", text)


def _shared_files() -> list[Path]:
    found = (path for path in sorted(SHARED.rglob("*")) if path.suffix in (".txt", ".csv", ".json", ".jsonl"))
    return [path for path in found if path.name not in NOT_DATA and "configs" not in path.parts]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data is not beside this checkout")
@pytest.mark.parametrize("path", _shared_files(), ids=lambda path: path.name)
def test_real_data_becomes_a_spec_that_plans_or_is_explained(finefit: Finefit, path: Path) -> None:
    answer = finefit("init", path, *TINY, "--json")
    if answer.code:
        error: dict[str, Any] = answer.document["error"]
        assert error["exit_code"] == 2
        assert error["remedy"]
        assert not Path("spec.yaml").exists()
    else:
        assert finefit("plan", "spec.yaml", "--json").document["fits"]
        assert json.loads(answer.out)["data"]["rows"]
