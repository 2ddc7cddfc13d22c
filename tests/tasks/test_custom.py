"""Files of a user's own tasks: what they may do, and how a run keeps them."""

import sys
from pathlib import Path

import pytest

from finefit.data.rows import BadRow, Message, Row
from finefit.errors import SpecError
from finefit.spec.load import parse_spec
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask, LmEval, Summary, TruthfulQa
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.custom import keep_task_files, kept_paths, row_builder, take_task_file, task_sha256
from finefit.tasks.make import make_task
from tests.conftest import SPEC
from tests.tasks.task_rows import make_likelihood, make_row, metrics_of

WHOLE = """
from dataclasses import dataclass

METRICS = {"near": "mean", "exact": "rate"}

@dataclass
class Found:
    number: "int"

def extract(answer):
    digits = "".join(c for c in answer if c.isdigit())
    if not digits:
        raise ValueError("there is no number in it")
    return Found(int(digits)).number

def score(found, reference):
    return {"near": 1 / (1 + abs(found - reference)), "exact": found == reference}

def build(prompt, answer):
    return f"How much is {prompt}?", f"It is {answer}."
"""


def _own(folder: Path, source: str) -> Task:
    (folder / "sums.py").write_text(source, encoding="utf-8")
    return make_task(Evaluation.model_validate({"task": {"kind": "python", "path": "sums.py"}}), base=folder)


def _built(folder: Path, row: Row, file: str = "sums.py") -> Row | BadRow:
    build = row_builder(CustomTask(kind="python", path=file), base=folder)
    assert build is not None
    return build(row)


def test_a_file_of_ones_own_is_a_task(tmp_path: Path) -> None:
    task = _own(tmp_path, WHOLE)
    rows = [make_row("4"), make_row("5"), make_row("6", "7")]
    assert metrics_of(task, rows, ["it is 4", "none at all", "8"]) == pytest.approx(
        {"near": (1 + 0 + 0.5) / 3, "exact": 1 / 3}
    )
    assert task.name == "sums"
    assert task.read(Reply(text="so 12"), rows[0]).extracted == 12
    with pytest.raises(NoResult, match="there is no number in it"):
        task.read(Reply(text="many"), rows[0])
    with pytest.raises(NoResult, match="the answer is empty"):
        task.read(Reply(text=" "), rows[0])


def test_nothing_is_left_beside_the_file_and_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = (
        _own(tmp_path, WHOLE),
        _own(tmp_path / "other", WHOLE.replace("1 / (1 + abs(found - reference))", "0.25")),
    )
    assert metrics_of(first, [make_row("4")], ["4"])["near"] == 1.0
    assert metrics_of(second, [make_row("4")], ["4"])["near"] == 0.25
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "sums.py"]
    assert "sums" not in sys.modules
    assert first.signature["sha256"] != second.signature["sha256"]


def test_build_makes_prompt_and_answer_of_rows(tmp_path: Path) -> None:
    _own(tmp_path, WHOLE)
    built = _built(tmp_path, make_row("4", "four", prompt="2+2"))
    assert isinstance(built, Row)
    assert (built.prompt[-1].content, built.answer, built.references) == (
        "How much is 2+2?",
        "It is 4.",
        ("It is 4.", "It is four."),
    )


def _pair(chosen: tuple[str, ...], rejected: tuple[str, ...]) -> Row:
    said = tuple(Message("assistant" if at % 2 == 0 else "user", text) for at, text in enumerate(chosen))
    return Row(
        source="p",
        number=1,
        messages=(Message("user", "2+2"), *said),
        num_given=1,
        rejected=tuple(Message("assistant", text) for text in rejected),
    )


def test_wrong_and_rejected_answers_are_built_as_the_right_one_is(tmp_path: Path) -> None:
    """Or what tells them apart would be the form."""
    _own(tmp_path, WHOLE)
    several, pair = _built(tmp_path, make_row("4", wrong=("5", "6"))), _built(tmp_path, _pair(("4",), ("5",)))
    assert isinstance(several, Row)
    assert several.wrong == ("It is 5.", "It is 6.")
    assert isinstance(pair, Row)
    assert (pair.prompt[-1].content, pair.answer, pair.rejected) == (
        "How much is 2+2?",
        "It is 4.",
        (Message("assistant", "It is 5."),),
    )
    assert (pair.kind, pair.num_given) == ("pair", 1)


def test_a_row_whose_answers_have_no_one_prompt_cannot_be_built(tmp_path: Path) -> None:
    _own(tmp_path, WHOLE.replace("How much is {prompt}?", "{prompt}, in {len(answer)} letters"))
    alike = _built(tmp_path, make_row("4", "5", prompt="2+2"))
    assert isinstance(alike, Row)
    assert alike.prompt[-1].content == "2+2, in 1 letters"
    for row, reason in (
        (make_row("4", wrong=("five",)), "sums.py builds another prompt for each"),
        (_pair(("4", "sure?", "yes"), ("5",)), "more than their last answer"),
        (_pair(("4",), ("5", "6")), "more than their last answer"),
        (Row(source="t", number=1, text="plain"), "no prompt that could be built"),
    ):
        refused = _built(tmp_path, row)
        assert isinstance(refused, BadRow)
        assert reason in refused.reason


def test_a_file_may_do_no_more_than_build(tmp_path: Path) -> None:
    (tmp_path / "form.py").write_text("def build(prompt, answer):\n    return prompt.upper(), answer\n")
    built = _built(tmp_path, make_row("4", prompt="two"), "form.py")
    assert isinstance(built, Row)
    assert built.prompt[-1].content == "TWO"


def test_a_task_may_weigh_given_answers_instead(tmp_path: Path) -> None:
    task = _own(
        tmp_path,
        "METRICS = {'prefers_right': 'rate'}\n"
        "def weigh(right, wrong):\n"
        "    return {'prefers_right': max(p for _, p, _ in right) > max(p for text, p, tokens in wrong)}\n",
    )
    row = make_row("y", wrong=("n",))
    assert not task.generates
    assert task.candidates(row) == (("y",), ("n",))
    assert task.read(Reply(right=(make_likelihood(-1.0),), wrong=(make_likelihood(-2.0),)), row).counts == {
        "prefers_right": 1.0
    }
    with pytest.raises(NoResult, match="probabilities are not finite"):
        task.read(Reply(right=(make_likelihood(-1.0),), wrong=(make_likelihood(float("-inf")),)), row)


def test_another_file_is_not_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(WHOLE)
    with pytest.raises(SpecError, match=r"there is no file sums\.py"):
        make_task(Evaluation.model_validate({"task": {"kind": "python", "path": "sums.py"}}), base=tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("METRICS = {", "METRICS = {{", r"sums.py:4 failed in import: SyntaxError"),
        (
            "from dataclasses",
            "import absent_package\nfrom dataclasses",
            r"sums.py:2 failed in import: ModuleNotFoundError: No module named 'absent_package'",
        ),
        ("def score", "def rate", "must have either extract"),
        ("def extract", "def weigh(right, wrong): pass\ndef extract", "must have either extract"),
        ('"mean"', '"median"', "METRICS with {'near': 'median'}"),
        ('METRICS = {"near"', 'NAMES = {"near"', "has METRICS = None"),
        ('{"near": "mean", "exact": "rate"}', '["near"]', r"has METRICS = \['near'\]"),
    ],
)
def test_a_file_that_is_no_task_is_told_with_its_place(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        _own(tmp_path, WHOLE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "1 / (1 + abs(found - reference))",
            "1 / (found - reference)",
            r"sums.py:17 failed in score: ZeroDivisionError",
        ),
        ("1 / (1 + abs(found - reference))", "2.5", r"score that returned near = 2.5; return a number from 0 to 1"),
        ("1 / (1 + abs(found - reference))", "float('nan')", "near = nan"),
        ("1 / (1 + abs(found - reference))", "'high'", "near = 'high'"),
        ("found == reference", "0.5", "exact = 0.5; return 0 or 1"),
        (', "exact": found == reference', "", "returned no exact, which METRICS names"),
        ('"exact": found', '"extra": 1, "exact": found', "returned extra, which METRICS does not name"),
        ('return {"near": 1', 'return [{"near": 1', "score that returned"),
        ("return Found(int(digits)).number", "return Found(int(digits))", "which no record can hold"),
        ("return Found(int(digits)).number", "return [].pop()", r"sums.py:14 failed in extract: IndexError"),
    ],
)
def test_what_is_wrong_with_a_file_shows_on_a_reference_before_any_model_has_answered(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    source = WHOLE.replace(old, new, 1)
    if old.startswith("return {"):
        source = source.replace("found == reference}", "found == reference}]")
    with pytest.raises(SpecError, match=problem):
        _own(tmp_path, source).require(make_row("4"))


def test_a_reference_that_extract_cannot_read_is_no_item(tmp_path: Path) -> None:
    with pytest.raises(NoResult, match="there is no number"):
        _own(tmp_path, WHOLE).require(make_row("four"))


def test_a_build_that_gives_no_two_texts_is_told(tmp_path: Path) -> None:
    _own(tmp_path, WHOLE.replace('return f"How much is {prompt}?", f"It is {answer}."', "return prompt"))
    with pytest.raises(SpecError, match="return a pair of texts"):
        _built(tmp_path, make_row("4"))


def test_a_form_without_build_and_a_file_that_is_not_there_are_told(tmp_path: Path) -> None:
    _own(tmp_path, WHOLE.replace("def build", "def built"))
    with pytest.raises(SpecError, match="has no build"):
        _built(tmp_path, make_row("4"))
    with pytest.raises(SpecError, match=r"there is no file absent\.py"):
        make_task(Evaluation.model_validate({"task": {"kind": "python", "path": "absent.py"}}), base=tmp_path)


def test_the_example_in_the_documents_is_a_task(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    task = _own(tmp_path, document.partition("```python\n")[2].partition("```")[0])
    row = make_row("12 km")
    task.require(row)
    assert metrics_of(task, [row, row, row, row], ["It is 12 km.", "13 km", "12 kg", "far"]) == {
        "right": 0.25,
        "near": 1.5 / 4,
    }
    built = _built(tmp_path, make_row("12 km", prompt="How far?"))
    assert isinstance(built, Row)
    assert built.prompt[-1].content == "How far?\nAnswer with a number and its unit."


def test_the_last_number_in_the_documents_scores_answers_like_those_of_gsm8k(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    task = _own(tmp_path, document.split("```python\n")[2].partition("```")[0])
    row = make_row("Natalia sold 48/2 = 24 clips in May, and 48+24 = 72 in all.\n#### 1,072")
    assert metrics_of(task, [row] * 3, ["So it is 1072.", "1,072 of 3", "many"]) == {"right": 1 / 3}


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
