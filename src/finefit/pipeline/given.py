"""Answers that were made elsewhere: put beside the items that they answer, by content, and scored without any model.

Every item has exactly one answer. One that is missing, doubled or for another question is an error that names it: answers left out would be
questions that nobody asked."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from finefit.artifacts.journal import Journal
from finefit.artifacts.records import EvalItem, EvalRequest, Subject
from finefit.artifacts.rundir import EvalPaths
from finefit.data.files import find_files
from finefit.data.items import key_of
from finefit.data.records import Record, is_amr, read_records
from finefit.data.rows import BadRow, Row
from finefit.data.tasks import Reply, Task
from finefit.data.tasks.amr.files import read_graphs
from finefit.data.tasks.amr.subtasks import prompt_of
from finefit.errors import DataError
from finefit.evaluate.score import score_item
from finefit.facts.files import read_file
from finefit.spec.schema import AmrForm, Form, Full, ShapeModel

_ANSWERS = ("answer", "response", "output", "prediction", "completion", "generated_text")
_PROMPTS = ("prompt", "question", "instruction", "input")
_ITEM = TypeAdapter(EvalItem)
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    place: str
    answers_to: str
    """A prompt, or an id: the place of a row (`test.jsonl:3`), its number, or an item's key."""
    text: str


def read_given(path: Path, form: Form | None) -> list[Given]:
    """From JSON lines, JSON, CSV or Parquet with an answer and what it answers; or from a file of AMR graphs, each below its sentence."""
    if not path.is_file():
        raise DataError(f"{path} is not there", "--answers names a file with one answer for every item")
    (file,) = find_files(path.name, path.parent, split="test")
    if is_amr(file):
        method = form.method if isinstance(form, AmrForm) else None
        blocks = read_graphs(path)
        return [Given(place=b.place, answers_to=prompt_of(b.sentence, method) if method else b.sentence, text=b.graph) for b in blocks]
    return [_given(record) for record in read_records(file)]


def _given(record: Record | BadRow) -> Given:
    if isinstance(record, BadRow):
        raise DataError(f"{record.place} {record.reason}", "mend the file: an answer left out is a question that nobody asked")
    place, value = f"{record.source}:{record.number}", dict(record.value)
    answer = next((value[name] for name in _ANSWERS if name in value), None)
    asked = next((value[name] for name in ("id", *_PROMPTS) if value.get(name) not in (None, "")), None)
    if not isinstance(answer, str) or asked is None:
        there = ", ".join(value) or "nothing"
        raise DataError(f"{place} has {there}: an answer as text and what it answers are needed", "name the columns answer, and prompt or id")
    return Given(place=place, answers_to=str(asked), text=answer)


def aligned(given: Iterable[Given], rows: Sequence[Row]) -> list[str]:
    """The answer to each row. Rows with the same prompt are answered in their order."""
    places = _places(rows)
    found: dict[int, Given] = {}
    for one in given:
        asked = places.get(_plain(one.answers_to))
        if not asked:
            problem = f"{one.place} answers `{_cut(one.answers_to)}`, which is none of the {len(rows):,} items"
            raise DataError(problem, "take the answers to these rows")
        at = next((at for at in asked if at not in found), asked[-1])
        if at in found:
            raise DataError(f"{one.place} answers {rows[at].place} once more: {found[at].place} did", "keep one answer for every item")
        found[at] = one
    if missing := [row.place for at, row in enumerate(rows) if at not in found]:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]} has no answer{more}", "an item that was not answered counts too: give it an empty answer")
    return [found[at].text for at in range(len(rows))]


def _places(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Rows by all that may name them; what is ambiguous for rows of different content names none."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        last = row.prompt[-1].content if row.prompt else ""
        whole = "\n\n".join(message.content for message in row.prompt)
        for name in dict.fromkeys(_plain(text) for text in (last, whole, row.place, str(row.number), key_of(row))):
            if name:
                found[name].append(at)
    return dict(found)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str) -> str:
    plain = _plain(text)
    return plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]} ..."


def given_subject(path: Path, like: Subject) -> Subject:
    """Whoever gave these answers is known by them alone."""
    sha256 = read_file(path, path.parent).sha256
    return replace(
        like,
        model=ShapeModel(kind="shape", config={}),
        model_name=f"answers of {path.name}",
        model_fingerprint=sha256,
        weights=None,
        manifest_sha256=None,
        tuning=Full(kind="full"),
    )


def name_of(path: Path) -> str:
    """By which their scores are filed: other answers of the same file name are others."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in path.stem).strip("-")
    return f"{kept[:40] or 'answers'}-{read_file(path, path.parent).sha256[:8]}"


def write_answers(task: Task, request: EvalRequest, paths: EvalPaths, answers: Sequence[str], rows: Sequence[Row]) -> None:
    """As items that are answered already: the process that scores them finds nothing left to ask."""
    if not task.generates or any(any(task.candidates(row)) for row in rows):
        problem = f"{request.evaluation.label} asks how likely given answers are to a model, which a file of answers cannot say"
        raise DataError(problem, "leave --answers out and name a model")
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.items.unlink(missing_ok=True)
    with Journal(paths.items) as items:
        for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            prompt = "\n\n".join(message.content for message in row.prompt)
            items.write(**_ITEM.dump_python(score_item(task, at, row, prompt=prompt, reply=Reply(text=answer)), mode="json"))
