import pytest

from finefit.pipeline.taskfiles import moved_task
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import Summary, TruthfulQa


def _moved(task: dict[str, object]) -> object:
    return moved_task(Evaluation.model_validate({"task": task}), lambda path: f"elsewhere/{path}").task


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
