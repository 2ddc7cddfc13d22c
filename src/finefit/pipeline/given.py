"""Answers that were made elsewhere: put beside the items that they answer, by content, and scored without any model.

What names an item names no other: an answer beside the wrong question would be a wrong score that nobody sees.
Every item has exactly one answer. One that is missing, doubled or for another question is an error that names it: answers left out would be
questions that nobody asked."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.evaluations import EvalItem, EvalRequest, Subject
from finefit.artifacts.journal import Journal
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
from finefit.spec.models import Full, ShapeModel
from finefit.spec.tasks import AmrForm, Form

_ANSWERS = ("answer", "response", "output", "prediction", "completion", "generated_text")
_PROMPTS = ("prompt", "question", "instruction", "input")
_ITEM = TypeAdapter(EvalItem)
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    place: str
    text: str
    id: str = ""
    """An item's key, the place of a row (`test.jsonl:3`), or its number."""
    prompt: str = ""
    """Whole, or its last message."""

    @property
    def answers_to(self) -> str:
        return self.id or self.prompt


def read_given(path: Path, form: Form | None) -> list[Given]:
    """From JSON lines, JSON, CSV or Parquet with an answer and what it answers; or from a file of AMR graphs, each below its sentence."""
    if not path.is_file():
        raise DataError(f"{path} is not there", "--answers names a file with one answer for every item")
    (file,) = find_files(path.name, path.parent, split="test")
    if is_amr(file):
        method = form.method if isinstance(form, AmrForm) else None
        blocks = read_graphs(path)
        return [
            Given(place=b.place, prompt=prompt_of(b.sentence, method) if method else b.sentence, text=b.graph)
            for b in blocks
        ]
    return [_given(record) for record in read_records(file)]


def _given(record: Record | BadRow) -> Given:
    if isinstance(record, BadRow):
        raise DataError(
            f"{record.place} {record.reason}", "mend the file: an answer left out is a question that nobody asked"
        )
    place, value = f"{record.source}:{record.number}", dict(record.value)
    answer = next((value[name] for name in _ANSWERS if name in value), None)
    names = [
        next((str(value[name]) for name in names if value.get(name) not in (None, "")), "")
        for names in (("id",), _PROMPTS)
    ]
    if not isinstance(answer, str) or not any(names):
        there = ", ".join(value) or "nothing"
        raise DataError(
            f"{place} has {there}: an answer as text and what it answers are needed",
            "name the columns answer, and prompt or id",
        )
    return Given(place=place, id=names[0], prompt=names[1], text=answer)


def aligned(given: Iterable[Given], rows: Sequence[Row]) -> list[str]:
    """The answer to each row. Rows of the same content are answered in their order."""
    names = _Names.of(rows)
    found: dict[int, Given] = {}
    for one in given:
        asked = names.asked(one)
        at = next((at for at in asked if at not in found), asked[-1])
        if at in found:
            raise DataError(
                f"{one.place} answers {rows[at].place} once more: {found[at].place} did",
                "keep one answer for every item",
            )
        found[at] = one
    if missing := [row.place for at, row in enumerate(rows) if at not in found]:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"{missing[0]} has no answer{more}", "an item that was not answered counts too: give it an empty answer"
        )
    return [found[at].text for at in range(len(rows))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Rows by what may name them. An id is never taken for a prompt, nor a prompt that is a figure for a number."""

    rows: Sequence[Row]
    keys: Sequence[str]
    by_id: Mapping[str, Sequence[int]]
    by_prompt: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Names":
        keys = [key_of(row) for row in rows]
        ids = _named(keys, [row.place for row in rows], [str(row.number) for row in rows])
        whole = ["\n\n".join(message.content for message in row.prompt) for row in rows]
        prompts = _named(whole, [row.prompt[-1].content if row.prompt else "" for row in rows])
        return cls(rows=rows, keys=keys, by_id=ids, by_prompt=prompts)

    def asked(self, one: Given) -> Sequence[int]:
        """One row, or several of the same content. An id of the giver's own, which names nothing here, leaves the prompt."""
        by_id, by_prompt = self.by_id.get(_plain(one.id), ()), self.by_prompt.get(_plain(one.prompt), ())
        asked = [at for at in by_id if at in by_prompt] if by_id and by_prompt else by_id or by_prompt
        if not (by_id or by_prompt):
            problem = f"{one.place} answers `{_cut(one.answers_to)}`, which is none of the {len(self.rows):,} items"
            raise DataError(problem, "take the answers to these rows")
        if not asked:
            here, there = self.rows[by_id[0]].place, self.rows[by_prompt[0]].place
            raise DataError(
                f"{one.place} has the id {one.id} of {here} and the prompt of {there}",
                "name one item: mend the id, or leave it out",
            )
        if len({self.keys[at] for at in asked}) > 1:
            first, second, *_ = (self.rows[at].place for at in asked)
            problem = (
                f"{one.place} answers `{_cut(one.answers_to)}`, which names {first} and {second}, two different items"
            )
            raise DataError(problem, f"name each by its place: id {first}")
        return asked


def _named(*kinds: Sequence[str]) -> dict[str, list[int]]:
    """Names in the order of trust: one that is taken is not given to rows of a later kind."""
    found: dict[str, list[int]] = {}
    for kind in kinds:
        here: defaultdict[str, list[int]] = defaultdict(list)
        for at, name in enumerate(map(_plain, kind)):
            if name:
                here[name].append(at)
        found = here | found
    return found


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
    name = f"{kept[:40] or 'answers'}-{read_file(path, path.parent).sha256[:8]}"
    return (
        name if step_named(name) is None else f"answers-{name}"
    )  # of `checkpoint.jsonl`, where the digest has no letter


def write_answers(
    task: Task, request: EvalRequest, paths: EvalPaths, answers: Sequence[str], rows: Sequence[Row]
) -> None:
    """As items that are answered already: the process that scores them finds nothing left to ask."""
    if not task.generates or any(any(task.candidates(row)) for row in rows):
        problem = f"{request.evaluation.label} asks how likely given answers are to a model, which a file of answers cannot say"
        raise DataError(problem, "leave --answers out and name a model")
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.items.unlink(missing_ok=True)
    with Journal(paths.items) as items:
        for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            prompt = "\n\n".join(message.content for message in row.prompt)
            items.write(
                **_ITEM.dump_python(score_item(task, at, row, prompt=prompt, reply=Reply(text=answer)), mode="json")
            )
