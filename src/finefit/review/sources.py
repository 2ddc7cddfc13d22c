"""Where review sets come from: the answers of one or two evaluated runs, paired by what was asked, or a file of answers
that were made elsewhere."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, open_run, short_names
from finefit.artifacts.stage_records import EvalItem, EvalRequest, EvalResult
from finefit.errors import DataError, RunError
from finefit.facts.files import sha256_of
from finefit.review.items import PromptMessage, ReviewImage, ReviewItem, ReviewSet, digest

FINAL = "final"
_BETWEEN_REFERENCES = "\n\nor\n\n"
_IMAGE = "<image>"
"""Placeholder for an image in a message."""
_ONE_ANSWER = ("answer",)
_TWO_ANSWERS = ("answer_a", "answer_b")
_COLUMNS = "name the columns prompt and answer, or prompt, answer_a and answer_b; reference, source and id are optional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """A run and one of its checkpoints."""

    run: RunDir
    checkpoint: str | None
    """As the user gave it; None means the final one."""

    @classmethod
    def parse(cls, target: str, checkpoint: str | None = None) -> "RunTarget":
        """`runs/a-1` or `runs/a-1:checkpoint-40`. The name of a folder may itself contain a colon."""
        if Path(target).is_dir() or ":" not in target:
            return cls(run=open_run(Path(target)), checkpoint=checkpoint)
        path, _, named = target.rpartition(":")
        return cls(run=open_run(Path(path)), checkpoint=named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunEval:
    where: StageDir
    paths: EvalPaths

    @property
    def task(self) -> str:
        return self.paths.folder.name


def review_set_of_runs(targets: Sequence[RunTarget], *, task: str | None = None, name: str | None = None) -> ReviewSet:
    """`task`: by default the first one that all runs have a result for."""
    found = [_evaluations(target.run) for target in targets]
    chosen = task or _first_common(targets, found)
    evals = [
        _eval_of(target, [e for e in all_of if e.task == chosen], chosen)
        for target, all_of in zip(targets, found, strict=True)
    ]
    places = [(target.run.path.resolve(), e.paths.checkpoint) for target, e in zip(targets, evals, strict=True)]
    models = _labels(places)
    if len(set(models)) < len(models):
        raise RunError(f"both sides are {models[0]}", "name two runs, or two checkpoints of one: RUN:base RUN:final")
    answered = [_answered(e) for e in evals]
    common = [key for key in answered[0] if all(key in by_key for by_key in answered)]
    if not common:
        problem = f"{' and '.join(models)} have no item of {chosen} in common"
        raise RunError(problem, "review runs that were evaluated on the same rows")
    rows = _rows(evals[0])
    items = tuple(_item_of_run(key, [by_key[key] for by_key in answered], rows) for key in common)
    if not any(answer for item in items for answer in item.answers):
        problem = f"the task {chosen} does not ask for answers, so there is nothing to judge"
        raise RunError(problem, "name another task with --task")
    return ReviewSet(
        name=name or _slug(".vs.".join(models), chosen),
        task=chosen,
        models=models,
        items=items,
        unpaired=sum(map(len, answered)) - len(answered) * len(common),
    )


def _evaluations(run: RunDir) -> list[_RunEval]:
    """Those with a result: the last stage first, all items before a sample of them."""
    places = ((where, paths) for where in reversed(run.stages()) for paths in where.evaluations())
    found = [_RunEval(where=where, paths=paths) for where, paths in places if paths.result.exists()]
    return sorted(found, key=lambda one: -(one.paths.limit or float("inf")))


def _first_common(targets: Sequence[RunTarget], found: Sequence[Sequence[_RunEval]]) -> str:
    by_age = [sorted(evals, key=lambda e: e.paths.request.stat().st_mtime_ns) for evals in found]
    tasks = [dict.fromkeys(e.task for e in evals) for evals in by_age]
    for task in tasks[0]:
        if all(task in others for others in tasks):
            return task
    each = "; ".join(f"{t.run.path} has {', '.join(has) or 'none'}" for t, has in zip(targets, tasks, strict=True))
    raise RunError(
        f"no task was evaluated for all of them: {each}",
        f"answer held-out rows with `finefit eval {targets[0].run.path}`",
    )


def _eval_of(target: RunTarget, evals: Sequence[_RunEval], task: str) -> _RunEval:
    wanted = _checkpoint(target, evals)
    for one in evals:
        if one.paths.checkpoint == wanted:
            return one
    there = ", ".join(dict.fromkeys(e.paths.checkpoint for e in evals)) or "none"
    run = target.run.path
    raise RunError(
        f"{run} has no result of {task} for {wanted}; there are results for: {there}",
        f"make one with `finefit eval {run} --task {task} --checkpoint {target.checkpoint or FINAL}`, or name another",
    )


def _checkpoint(target: RunTarget, evals: Sequence[_RunEval]) -> str:
    """Resolves `final` and `best`. A model that was never trained has only one checkpoint."""
    wanted = target.checkpoint or FINAL
    for where in reversed(target.run.stages()):
        if (where.checkpoints / wanted).is_dir():
            return (where.checkpoints / wanted).resolve().name
    there = {e.paths.checkpoint for e in evals}
    if target.checkpoint is None and len(there) == 1:
        return there.pop()
    return f"checkpoint-{wanted}" if wanted.isdecimal() else wanted


def _labels(places: Sequence[tuple[Path, str]]) -> tuple[str, ...]:
    """As short as possible while they differ. A model of an evaluation stage has the name of its run."""
    shown = short_names([path for path, _ in places])
    return tuple(
        shown[path] if path.name == checkpoint else f"{shown[path]}:{checkpoint}" for path, checkpoint in places
    )


def _slug(*parts: str) -> str:
    return re.sub(r"[^\w.-]+", "-", ".".join(reversed(parts))).strip(".-")[:120]


def _answered(found: _RunEval) -> dict[str, EvalItem]:
    """By key; an item that occurs several times is numbered."""
    seen: Counter[str] = Counter()
    items: dict[str, EvalItem] = {}
    for item in read_record(found.paths.result, EvalResult).items:
        seen[item.key] += 1
        items[item.key if seen[item.key] == 1 else f"{item.key}-{seen[item.key]}"] = item
    return items


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedRow:
    """A test row before a chat template rendered it."""

    messages: list[dict[str, Any]]
    """The messages of the prompt."""
    answer: dict[str, Any]
    tools: str
    images: tuple[ReviewImage, ...]


def _rows(found: _RunEval) -> dict[int, _PreparedRow]:
    """Empty if the prepared rows are no longer those that were answered."""
    subject = read_record(found.paths.request, EvalRequest).subject
    path = found.where.prepared(subject.items)
    if not path.exists() or sha256_of(path) != subject.items_sha256:
        return {}
    with path.open(encoding="utf-8") as file:
        return {at: _prepared_row(json.loads(line), path.parent) for at, line in enumerate(file)}


def _prepared_row(row: dict[str, Any], folder: Path) -> _PreparedRow:
    """An image is stored as path, member of a zip, digest, ...; a relative path is relative to the prepared files. An
    image that came without a file name is named by its digest."""
    images = []
    for path, member, sha256, *_ in row.get("image_refs", ()):
        name = sha256[:12] if member == sha256 else Path(member or path).name
        images.append(ReviewImage(name=name, sha256=sha256, path=folder / path, member=member))
    *messages, answer = row["messages"] or [{}]
    return _PreparedRow(messages=messages, answer=answer, tools=row.get("tools", ""), images=tuple(images))


def _images(item: EvalItem, row: _PreparedRow | None) -> tuple[ReviewImage, ...]:
    """The images that were answered, even if nothing says any more where they are."""
    if row is not None and [image.sha256 for image in row.images] == [image.sha256 for image in item.images]:
        return row.images
    names = ((Path(image.name.partition(" in ")[0]).name, image.sha256) for image in item.images)
    return tuple(ReviewImage(name=name, sha256=sha256, path=None) for name, sha256 in names)


def _item_of_run(key: str, items: Sequence[EvalItem], rows: dict[int, _PreparedRow]) -> ReviewItem:
    """Each answer has the reference nearest to it: all of them are shown, in an order that reveals nothing."""
    first = items[0]
    row = rows.get(first.item)
    messages = _messages(first.prompt, [] if row is None else row.messages, has_images=bool(first.images))
    return ReviewItem(
        key=key,
        prompt=messages or (PromptMessage(role="", text=first.prompt),),
        answers=tuple(item.answer for item in items),
        tools="" if row is None else row.tools,
        reference=_BETWEEN_REFERENCES.join(sorted({item.reference for item in items})),
        is_reference_whole=row is None or not (row.answer.get("tool_calls") or row.answer.get("reasoning")),
        place=first.place,
        images=_images(first, row),
        is_rendered=not messages,
    )


def _messages(rendered: str, messages: Sequence[dict[str, Any]], *, has_images: bool) -> tuple[PromptMessage, ...]:
    """The messages if they are what the model was given; empty if only the rendered text is, because it was cut or
    contains more than the messages' texts."""
    split = [message["content"].split(_IMAGE) if has_images else [message["content"]] for message in messages]
    texts = [text for parts in split for text in parts]
    if messages and _occur_in_order(rendered, texts) and not any(_says_more(message, rendered) for message in messages):
        return tuple(PromptMessage(role=message["role"], text=message["content"]) for message in messages)
    return ()


def _says_more(message: dict[str, Any], rendered: str) -> bool:
    """Whether it has tool calls, or reasoning that the template kept."""
    reasoning = message.get("reasoning", "").strip()
    return bool(message.get("tool_calls") or (reasoning and reasoning in rendered))


def _occur_in_order(text: str, parts: Iterable[str]) -> bool:
    at = 0
    for part in parts:
        at = text.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def review_set_of_rows(rows: Iterable[tuple[str, Mapping[str, Any]]], *, file: str, name: str) -> ReviewSet:
    """External answers: rows with `prompt` and `answer`, or with `answer_a` and `answer_b`. `rows`: each with its
    place. `file`: the models are named after it and the column."""
    found = list(rows)
    if not found:
        raise DataError(f"{file} has no rows", _COLUMNS)
    columns = _answer_columns(found[0][1], file)
    items = tuple(_item_of_row(place, row, columns) for place, row in found)
    first: dict[str, str] = {}
    for (place, _), item in zip(found, items, strict=True):
        if item.key in first:
            raise DataError(f"{place} is the same item as {first[item.key]}: {item.key}", "give each row its own id")
        first[item.key] = place
    return ReviewSet(name=name, task=file, models=tuple(f"{file}:{column}" for column in columns), items=items)


def _answer_columns(row: Mapping[str, Any], file: str) -> tuple[str, ...]:
    for columns in (_TWO_ANSWERS, _ONE_ANSWER):
        if all(column in row for column in columns):
            return columns
    raise DataError(f"{file} has no column answer; its columns are {', '.join(map(str, row))}", _COLUMNS)


def _item_of_row(place: str, row: Mapping[str, Any], columns: Sequence[str]) -> ReviewItem:
    prompt = _prompt_of_row(row, place)
    reference = row.get("reference")
    content = [[message.role, message.text] for message in prompt] + ["" if reference is None else str(reference)]
    return ReviewItem(
        key=digest(json.dumps(content)) if row.get("id") in (None, "") else str(row["id"]),
        prompt=prompt,
        answers=tuple(_answer_of_row(row, column, place) for column in columns),
        reference=None if reference in (None, "") else str(reference),
        place="" if row.get("source") in (None, "") else str(row["source"]),
    )


def _prompt_of_row(row: Mapping[str, Any], place: str) -> tuple[PromptMessage, ...]:
    match row.get("prompt"):
        case str() as text if text.strip():
            return (PromptMessage(role="", text=text),)
        case [*messages] if messages and all(map(_is_message, messages)):
            return tuple(PromptMessage(role=message["role"], text=message["content"]) for message in messages)
        case None | str():
            raise DataError(f"{place} has no prompt: an answer cannot be judged without the question", _COLUMNS)
        case other:
            raise DataError(f"{place} has a prompt that is neither text nor messages: {str(other)[:60]}", _COLUMNS)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _answer_of_row(row: Mapping[str, Any], column: str, place: str) -> str:
    """An empty answer counts too."""
    match row.get(column):
        case str() as text:
            return text
        case None if column in row:
            return ""
        case None:
            problem = f"{place} has no {column}: all items count, so write a missing answer as an empty one"
            raise DataError(problem, _COLUMNS)
        case other:
            return json.dumps(other, ensure_ascii=False)
