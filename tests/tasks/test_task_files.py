"""Task files of a user's own count by content, and a run keeps its own copy of each."""

from pathlib import Path

import pytest

from finefit.errors import SpecError
from finefit.spec.load import parse_spec
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask, LmEval, Summary, TruthfulQa
from finefit.tasks.task_files import keep_task_files, kept_paths, take_task_file, task_sha256
from tests.conftest import SPEC

OWN = Evaluation.model_validate({"task": {"kind": "python", "path": "mine.py"}})
HARNESS = Evaluation.model_validate_json('{"task": {"kind": "lm_eval", "tasks": ["x"], "folder": "own"}}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "mine.py").write_text("METRICS = {}\n")
    (tmp_path / "own" / "x.yaml").write_text("task: x\n")
    return tmp_path


def test_the_digest_is_of_the_content_wherever_the_file_lies(folder: Path) -> None:
    first = task_sha256(OWN, folder)
    (folder / "deeper").mkdir()
    (folder / "deeper" / "mine.py").write_text("METRICS = {}\n")
    assert task_sha256(OWN, folder / "deeper") == first
    (folder / "mine.py").write_text("METRICS = {'a': 'mean'}\n")
    assert task_sha256(OWN, folder) != first
    assert task_sha256(Evaluation.model_validate({"task": "rouge"}), folder) is None


def test_any_file_of_a_folder_counts(folder: Path) -> None:
    first = task_sha256(HARNESS, folder)
    (folder / "own" / "rows.jsonl").write_text("{}\n")
    assert task_sha256(HARNESS, folder) != first


def test_a_file_that_is_not_there_is_the_users_mistake(folder: Path) -> None:
    (folder / "mine.py").unlink()
    with pytest.raises(SpecError, match=r"evaluate mine: .*mine\.py does not exist"):
        task_sha256(OWN, folder)


def test_a_request_has_the_file_beside_it(folder: Path) -> None:
    taken = take_task_file(OWN, folder, folder / "evals" / "mine")
    assert isinstance(taken.task, CustomTask)
    assert (taken.task.path, taken.label) == ("task.py", "mine")
    assert (folder / "evals" / "mine" / "task.py").read_text() == "METRICS = {}\n"
    assert take_task_file(taken, folder / "evals" / "mine", folder / "evals" / "mine") == taken
    harness = take_task_file(HARNESS, folder, folder / "evals" / "lm_eval")
    assert isinstance(harness.task, LmEval)
    assert (folder / "evals" / "lm_eval" / str(harness.task.folder) / "x.yaml").exists()


def test_a_run_keeps_copies_and_goes_on_with_them_while_its_spec_names_the_same_files(folder: Path) -> None:
    own = "evaluate: [{task: {kind: python, path: mine.py}, max_new_tokens: 8}]"
    spec = parse_spec(SPEC.replace("evaluate: [{task: json_match, max_new_tokens: 8}]", own), where="spec.yaml")
    kept = keep_task_files(spec, folder, folder / "run")
    assert (folder / "run" / "tasks" / "mine.py").exists()
    (evaluation,) = kept.evaluate
    assert isinstance(evaluation.task, CustomTask)
    assert evaluation.task.path == "tasks/mine.py"
    assert kept_paths(spec.evaluate, kept.evaluate) == kept.evaluate
    (longer,) = kept_paths((spec.evaluate[0].model_copy(update={"max_new_tokens": 9}),), kept.evaluate)
    assert (longer.max_new_tokens, longer.task) == (9, evaluation.task)
    (other,) = kept_paths((Evaluation.model_validate({"task": "rouge", "name": "mine"}),), kept.evaluate)
    assert other.task.kind == "rouge"


@pytest.mark.parametrize("label", ["form", "data", "task"])
def test_what_rows_are_built_with_is_kept_apart_from_every_task(folder: Path, label: str) -> None:
    (folder / "prompts.py").write_text("def build(prompt, answer): return prompt, answer\n")
    own = f"evaluate: [{{task: {{kind: python, path: mine.py}}, name: {label}}}]"
    text = SPEC.replace("evaluate: [{task: json_match, max_new_tokens: 8}]", own)
    spec = parse_spec(text, where="spec.yaml", overrides=["data.task={kind: python, path: prompts.py}"])
    kept = keep_task_files(spec, folder, folder / "run")
    form, task = kept.data.task, kept.evaluate[0].task
    assert isinstance(form, CustomTask)
    assert isinstance(task, CustomTask)
    assert (folder / "run" / form.path).read_text() == (folder / "prompts.py").read_text()
    assert (folder / "run" / task.path).read_text() == (folder / "mine.py").read_text()


def _moved(task: dict[str, object]) -> object:
    return moved(Evaluation.model_validate({"task": task}), lambda path: f"elsewhere/{path}").task


def test_a_model_that_a_task_judges_with_is_found_from_the_run_directory() -> None:
    """As the folder of the trained model is: only its path changes."""
    moved = _moved({"kind": "summary", "nli": {"kind": "folder", "path": "nli"}})
    assert isinstance(moved, Summary)
    assert moved.nli == FolderModel(kind="folder", path="elsewhere/nli")
    bleurt = _moved({"kind": "truthfulqa", "scorer": "bleurt", "checkpoint": "large"})
    assert isinstance(bleurt, TruthfulQa)
    assert bleurt.checkpoint == "elsewhere/large"


@pytest.mark.parametrize(
    "task", [{"kind": "summary", "nli": {"kind": "hub", "id": "a/b"}}, {"kind": "truthfulqa"}, {"kind": "rouge"}]
)
def test_what_lies_in_no_folder_stays_as_it_is(task: dict[str, object]) -> None:
    assert _moved(task) == Evaluation.model_validate({"task": task}).task
