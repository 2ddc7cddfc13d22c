"""Answers that were made elsewhere: aligned with their items by content, and scored without a model.

An item is never named ambiguously: an answer beside the wrong question would be a wrong score that nobody notices.
Every item has exactly one answer; one that is missing, doubled or for another question is an error that names it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from finefit.artifacts.atomic import Journal
from finefit.artifacts.checkpoint import step_named
from finefit.artifacts.rundir import EvalPaths
from finefit.artifacts.stage_records import EvalItem, EvalRequest, Subject
from finefit.data.files import find_files
from finefit.data.records import Record, is_amr, read_records
from finefit.data.rows import BadRow, Row, key_of
from finefit.errors import DataError
from finefit.evaluate.score import score_item
from finefit.facts.files import sha256_of
from finefit.spec.models import Full, ShapeModel
from finefit.spec.tasks import AmrForm, Form
from finefit.tasks import Reply, Task
from finefit.tasks.amr import prompt_of, read_graphs

_ANSWERS = ("answer", "response", "output", "prediction", "completion", "generated_text")
_PROMPTS = ("prompt", "question", "instruction", "input")
_ITEM = TypeAdapter(EvalItem)
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAnswer:
    place: str
    text: str
    id: str = ""
    """An item's key, the place of its row (`test.jsonl:3`), or its number."""
    prompt: str = ""
    """All of it, or its last message."""


def read_answers(path: Path, form: Form | None) -> list[ExternalAnswer]:
    """From JSON lines, JSON, CSV or Parquet with an answer and its prompt or id; or from a file of AMR graphs, each
    below its sentence."""
    if not path.is_file():
        raise DataError(f"{path} is not there", "--answers names a file with one answer for every item")
    (file,) = find_files(path.name, path.parent, split="test")
    if is_amr(file):
        method = form.method if isinstance(form, AmrForm) else None

        def prompt(sentence: str) -> str:
            return prompt_of(sentence, method) if method else sentence

        return [ExternalAnswer(place=b.place, prompt=prompt(b.sentence), text=b.graph) for b in read_graphs(path)]
    return [_answer_in(record) for record in read_records(file)]


def _answer_in(record: Record | BadRow) -> ExternalAnswer:
    if isinstance(record, BadRow):
        raise DataError(f"{record.place} {record.reason}", "fix the file: every item needs its answer")
    place, value = f"{record.source}:{record.number}", dict(record.value)
    answer = next((value[name] for name in _ANSWERS if name in value), None)
    id_, prompt = (
        next((str(value[name]) for name in names if value.get(name) not in (None, "")), "")
        for names in (("id",), _PROMPTS)
    )
    if not isinstance(answer, str) or not (id_ or prompt):
        problem = f"{place} has {', '.join(value) or 'nothing'}: it needs an answer as text, and its prompt or id"
        raise DataError(problem, "name the columns answer, and prompt or id")
    return ExternalAnswer(place=place, id=id_, prompt=prompt, text=answer)


def align_answers(answers: Iterable[ExternalAnswer], rows: Sequence[Row]) -> list[str]:
    """The answer to each row. Rows of the same content are answered in their order."""
    names = _RowNames.of(rows)
    found: dict[int, ExternalAnswer] = {}
    for one in answers:
        asked = names.asked(one)
        at = next((at for at in asked if at not in found), asked[-1])
        if at in found:
            problem = f"{one.place} answers {rows[at].place}, which {found[at].place} answers already"
            raise DataError(problem, "keep one answer for every item")
        found[at] = one
    if missing := [row.place for at, row in enumerate(rows) if at not in found]:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        remedy = "an item that was not answered counts too: give it an empty answer"
        raise DataError(f"{missing[0]} has no answer{more}", remedy)
    return [found[at].text for at in range(len(rows))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowNames:
    """Rows by their names. An id is never taken for a prompt, nor a prompt for an id."""

    rows: Sequence[Row]
    keys: Sequence[str]
    by_id: Mapping[str, Sequence[int]]
    by_prompt: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_RowNames":
        keys = [key_of(row) for row in rows]
        ids = _named(keys, [row.place for row in rows], [str(row.number) for row in rows])
        whole = ["\n\n".join(message.content for message in row.prompt) for row in rows]
        prompts = _named(whole, [row.prompt[-1].content if row.prompt else "" for row in rows])
        return cls(rows=rows, keys=keys, by_id=ids, by_prompt=prompts)

    def asked(self, one: ExternalAnswer) -> Sequence[int]:
        """One row, or several of the same content. An id that is unknown here is ignored where there is a prompt."""
        by_id, by_prompt = self.by_id.get(_plain(one.id), ()), self.by_prompt.get(_plain(one.prompt), ())
        asked = [at for at in by_id if at in by_prompt] if by_id and by_prompt else by_id or by_prompt
        if not (by_id or by_prompt):
            problem = f"{one.place} answers `{_cut(one)}`, which is none of the {len(self.rows):,} items"
            raise DataError(problem, "give answers to these rows")
        if not asked:
            here, there = self.rows[by_id[0]].place, self.rows[by_prompt[0]].place
            raise DataError(
                f"{one.place} has the id {one.id} of {here} and the prompt of {there}",
                "name one item: fix the id, or leave it out",
            )
        if len({self.keys[at] for at in asked}) > 1:
            first, second, *_ = (self.rows[at].place for at in asked)
            problem = f"{one.place} answers `{_cut(one)}`, which names {first} and {second}, two different items"
            raise DataError(problem, f"name each by its place: id {first}")
        return asked


def _named(*kinds: Sequence[str]) -> dict[str, list[int]]:
    """Names by precedence: a name of an earlier kind hides the same name of a later one."""
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


def _cut(answer: ExternalAnswer) -> str:
    plain = _plain(answer.id or answer.prompt)
    return plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]} ..."


def answers_subject(path: Path, like: Subject) -> Subject:
    """Who made the answers is unknown: they are identified by their file."""
    sha256 = sha256_of(path)
    return replace(
        like,
        model=ShapeModel(kind="shape", config={}),
        model_name=f"answers of {path.name}",
        model_fingerprint=sha256,
        weights=None,
        manifest_sha256=None,
        tuning=Full(kind="full"),
    )


def answers_name(path: Path) -> str:
    """Their scores are filed under it. It depends on the content of the file."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in path.stem).strip("-")
    name = f"{kept[:40] or 'answers'}-{sha256_of(path)[:8]}"
    # a file checkpoint.jsonl, with a digest without letters, would look like a checkpoint
    return name if step_named(name) is None else f"answers-{name}"


def write_answers(
    task: Task, request: EvalRequest, paths: EvalPaths, answers: Sequence[str], rows: Sequence[Row]
) -> None:
    """As answered items: the process that scores them finds nothing left to ask."""
    if not task.generates or any(any(task.candidates(row)) for row in rows):
        problem = f"{request.evaluation.label} needs a model's likelihoods, which a file of answers does not have"
        raise DataError(problem, "leave --answers out and name a model")
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.items.unlink(missing_ok=True)
    with Journal(paths.items) as items:
        for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            prompt = "\n\n".join(message.content for message in row.prompt)
            item = score_item(task, at, row, prompt=prompt, reply=Reply(text=answer))
            items.write(**_ITEM.dump_python(item, mode="json"))
