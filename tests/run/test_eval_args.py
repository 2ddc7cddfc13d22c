"""Tasks as a command line names them."""

from pathlib import Path

import pytest

from finefit.errors import SpecError
from finefit.run.eval_args import named_evaluations
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import CustomTask, LmEval, Rouge

DECLARED = Evaluation.model_validate({"task": "json_match", "max_new_tokens": 8})


def test_a_label_of_the_spec_means_what_the_spec_says_and_another_name_the_task_with_its_defaults() -> None:
    mine, other = named_evaluations(["json_match", "exact_match"], [DECLARED])
    assert (mine.max_new_tokens, other.label, other.max_new_tokens) == (8, "exact_match", 256)


def test_a_mapping_is_a_task_or_a_whole_evaluation() -> None:
    task, whole = named_evaluations(
        ["{kind: rouge, stemmer: false}", "{name: mine, task: {kind: lm_eval, tasks: [arc_easy]}, limit: 5}"]
    )
    assert isinstance(task.task, Rouge)
    assert not task.task.stemmer
    assert isinstance(whole.task, LmEval)
    assert (whole.label, whole.limit, whole.task.tasks) == ("mine", 5, ("arc_easy",))


def test_paths_in_a_file_start_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text("- {task: {kind: python, path: mine.py}}\n- exact_match\n")
    own, exact = named_evaluations([str(tmp_path / "tasks.yaml")])
    assert isinstance(own.task, CustomTask)
    assert (own.task.path, own.label, exact.label) == (str(tmp_path / "mine.py"), "mine", "exact_match")


def test_a_python_file_is_a_task_of_ones_own(tmp_path: Path) -> None:
    (own,) = named_evaluations([str(tmp_path / "judge.py")])
    assert isinstance(own.task, CustomTask)
    assert own.task.path == str(tmp_path / "judge.py")


@pytest.mark.parametrize(
    ("asked", "problem", "remedy"),
    [
        (["rogue"], "there is no task rogue", "exact_match, json_match, relaxed_accuracy"),
        (["{kind: rouge, stemer: false}"], "task.rouge.stemer", "docs/spec.md"),
        (["{kind: rouge"], "--task {kind: rouge", "quote it"),
        (["tasks/v1.2.py"], "'v1.2' is not a name; give name: with letters, digits, `_` and `-`", "docs/spec.md"),
        (["{name: v1.2, task: rouge}"], '"v1.2" is not a name; use letters, digits, `_` and `-`', "docs/spec.md"),
        (["nowhere.yaml"], "there is no such file", "json_match"),
        (["rouge", "{kind: rouge, stemmer: false}"], "two tasks are called rouge", "a name each"),
    ],
)
def test_what_is_no_task_is_refused_with_what_there_is(asked: list[str], problem: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        named_evaluations(asked)
    assert problem.replace("task.rouge.stemer", "stemer") in caught.value.problem
    assert remedy in caught.value.remedy
