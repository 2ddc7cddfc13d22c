"""The items of a review, each with a prompt, the answers of one or two models, and the images of the prompt.

They come from one or two evaluated runs, whose answers are paired by question, or from a file of answers that were made
elsewhere.
"""

import hashlib
import json
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from finefit import bounded
from finefit.artifacts.atomic import read_lines
from finefit.artifacts.reading import has_content, is_there
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, open_target, short_names
from finefit.artifacts.stage_records import EvalItem, EvalRequest, EvalResult
from finefit.errors import DataError, RunError

FINAL = "final"
_BETWEEN_REFERENCES = "\n\nor\n\n"
_IMAGE = "<image>"
_ONE_ANSWER = ("answer",)
_TWO_ANSWERS = ("answer_a", "answer_b")
_COLUMNS = "name the columns prompt and answer, or prompt, answer_a and answer_b; reference, source and id are optional"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewImage:
    """An image identified by its digest and read from where it was when its row was prepared."""

    name: str
    sha256: str
    path: Path | None
    """The file, or the zip that contains it; None if the run no longer knows."""
    member: str = ""


_MAX_IMAGE_BYTES = 256 << 20
"""No larger image is ever part of a row."""
_BROKEN = (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""What a zip raises that was replaced or damaged; a RuntimeError where it is encrypted or packed in an unknown way."""


class ImageUnavailable(Exception):
    """An image cannot be shown; the message is for the rater."""


def read_image(image: ReviewImage) -> bytes:
    """Never returns another image than the one that the model saw."""
    if image.path is None:
        raise ImageUnavailable(f"{image.name} cannot be shown: the run's rows have changed since they were answered")
    try:
        with bounded.open_binary(image.path) as file:
            if image.member:
                with zipfile.ZipFile(file) as archive, archive.open(image.member) as member:
                    content = member.read(_MAX_IMAGE_BYTES + 1)
            else:
                content = file.read(_MAX_IMAGE_BYTES + 1)
    except _BROKEN as error:  # its message would reveal a path
        reason = getattr(error, "strerror", None) or "no readable zip holds it"
        raise ImageUnavailable(f"{image.name} is no longer there ({reason})") from None
    if len(content) > _MAX_IMAGE_BYTES:
        raise ImageUnavailable(f"{image.name} has more than {_MAX_IMAGE_BYTES:,} bytes: the file is another image now")
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise ImageUnavailable(f"{image.name} has changed since it was answered: the file is another image now")
    return content


def copy_images(path: Path, images: Iterable[ReviewImage]) -> dict[str, str]:
    """Copies images into a folder next to an exported file. Returns digests with paths relative to that file."""
    folder = path.with_name(f"{path.stem}-images")
    names: dict[str, str] = {}
    for image in images:
        if image.sha256 in names:
            continue
        try:
            content = read_image(image)
        except ImageUnavailable as reason:
            raise RunError(f"the export would lack an image: {reason}", "put the image back where it was") from None
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{image.sha256}{Path(image.member or image.path or '').suffix.lower()}"
        target.write_bytes(content)
        names[image.sha256] = f"{folder.name}/{target.name}"
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMessage:
    role: str
    """Empty if the prompt is one plain text."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewItem:
    key: str
    """The same item has the same key in every run."""
    prompt: tuple[PromptMessage, ...]
    answers: tuple[str, ...]
    """The answers in the order of the review set's models."""
    tools: str = ""
    """The tools that the prompt offers, as a JSON list, or nothing."""
    reference: str | None = None
    is_reference_whole: bool = True
    """Whether the reference is the row's whole answer, without tool calls or reasoning besides it."""
    place: str = ""
    """Where the item comes from. It is shown, so it must not reveal a model."""
    images: tuple[ReviewImage, ...] = ()
    """The images in the order in which the prompt shows them."""
    is_rendered: bool = False
    """Whether the prompt is only known as rendered by a chat template; training would render it a second time."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the answers: a verdict on one text says nothing about another text in its place."""
        return tuple(digest(answer) for answer in self.answers)

    @property
    def handle(self) -> str:
        """The page's name for the item. The key may come from the user and name a model."""
        return digest(json.dumps([self.key, *self.digests]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewSet:
    name: str
    """The journal with its verdicts is `reviews/<name>.jsonl`."""
    task: str
    models: tuple[str, ...]
    items: tuple[ReviewItem, ...] = field(repr=False)
    unpaired: int = 0
    """Items that only one of two models answered."""


@lru_cache(maxsize=1 << 16)  # every turn needs the digests of all items
def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    run: RunDir
    checkpoint: str | None
    """The name that the user gave; None means the final checkpoint."""

    @classmethod
    def parse(cls, target: str, checkpoint: str | None = None) -> "RunTarget":
        run, named = open_target(target, checkpoint)
        return cls(run=run, checkpoint=named)


_RunEval = tuple[StageDir, EvalPaths]
"""An evaluation of a run, and the stage that it belongs to."""


def review_set_of_runs(targets: Sequence[RunTarget], *, task: str | None = None, name: str | None = None) -> ReviewSet:
    """`task` is by default the first one that all runs have a result for."""
    found = [_evaluations(target.run) for target in targets]
    chosen = task or _first_common(targets, found)
    evals = [_eval_of(target, all_of, chosen) for target, all_of in zip(targets, found, strict=True)]
    # labels as short as possible while they differ; a model of an evaluation stage has the name of its run
    places = [(target.run.path.resolve(), paths.checkpoint) for target, (_, paths) in zip(targets, evals, strict=True)]
    short = short_names([path for path, _ in places])
    models = tuple(short[path] if path.name == which else f"{short[path]}:{which}" for path, which in places)
    if len(set(models)) < len(models):
        raise RunError(f"both sides are {models[0]}", "name two runs, or two checkpoints of one: RUN:base RUN:final")
    answered = []
    for _, paths in evals:
        by_key: dict[str, EvalItem] = {}  # an item that occurs several times is numbered
        seen: Counter[str] = Counter()
        for item in read_record(paths.result, EvalResult).items:
            seen[item.key] += 1
            by_key[item.key if seen[item.key] == 1 else f"{item.key}-{seen[item.key]}"] = item
        answered.append(by_key)
    common = [key for key in answered[0] if all(key in by_key for by_key in answered)]
    if not common:
        problem = f"{' and '.join(models)} have no item of {chosen} in common"
        raise RunError(problem, "review runs that were evaluated on the same rows")
    rows = _rows(*evals[0])
    items = tuple(_item_of_run(key, [by_key[key] for by_key in answered], rows) for key in common)
    if not any(answer for item in items for answer in item.answers):
        problem = f"the task {chosen} does not ask for answers, so there is nothing to judge"
        raise RunError(problem, "name another task with --task")
    return ReviewSet(
        name=name or re.sub(r"[^\w.-]+", "-", f"{chosen}.{'.vs.'.join(models)}").strip(".-")[:120],
        task=chosen,
        models=models,
        items=items,
        unpaired=sum(map(len, answered)) - len(answered) * len(common),
    )


def _evaluations(run: RunDir) -> list[_RunEval]:
    """Evaluations with a result: the last stage first, all items before a sample of them."""
    places = ((where, paths) for where in reversed(run.stages()) for paths in where.evaluations())
    return sorted(
        ((where, paths) for where, paths in places if is_there(paths.result)),
        key=lambda found: -(found[1].limit or float("inf")),
    )


def _first_common(targets: Sequence[RunTarget], found: Sequence[Sequence[_RunEval]]) -> str:
    tasks = []
    for evals in found:
        by_age = sorted((paths for _, paths in evals), key=lambda paths: paths.request.lstat().st_mtime_ns)
        tasks.append(dict.fromkeys(paths.folder.name for paths in by_age))
    for task in tasks[0]:
        if all(task in others for others in tasks):
            return task
    each = "; ".join(f"{t.run.path} has {', '.join(has) or 'none'}" for t, has in zip(targets, tasks, strict=True))
    remedy = f"answer held-out rows with `finefit eval {targets[0].run.path}`"
    raise RunError(f"no task was evaluated for all of them: {each}", remedy)


def _eval_of(target: RunTarget, evals: Sequence[_RunEval], task: str) -> _RunEval:
    """Resolves `final` and `best`. A model that was never trained has only one checkpoint."""
    run, asked = target.run, target.checkpoint or FINAL
    of_task = [one for one in evals if one[1].folder.name == task]
    there = list(dict.fromkeys(paths.checkpoint for _, paths in of_task))
    links = [where.checkpoints / asked for where in reversed(run.stages()) if (where.checkpoints / asked).is_dir()]
    if links:
        wanted = links[0].resolve().name
    elif target.checkpoint is None and len(there) == 1:
        wanted = there[0]
    else:
        wanted = f"checkpoint-{asked}" if asked.isdecimal() else asked
    for one in of_task:
        if one[1].checkpoint == wanted:
            return one
    problem = f"{run.path} has no result of {task} for {wanted}; there are results for: {', '.join(there) or 'none'}"
    remedy = f"make one with `finefit eval {run.path} --task {task} --checkpoint {asked}`, or name another"
    raise RunError(problem, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedRow:
    """A test row before a chat template rendered it."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    tools: str
    images: tuple[ReviewImage, ...]


def _rows(where: StageDir, paths: EvalPaths) -> dict[int, _PreparedRow]:
    """Empty if the prepared rows are no longer those that were answered. An image is stored as path, member of a zip,
    digest, ...; a relative path is relative to the prepared files. An image that came without a file name is named by
    its digest."""
    subject = read_record(paths.request, EvalRequest).subject
    path = where.prepared(subject.items)
    if not has_content(path, subject.items_sha256):
        return {}
    rows = {}
    for at, row in enumerate(read_lines(path)):
        images = []
        for place, member, sha256, *_ in row.get("image_refs", ()):
            name = sha256[:12] if member == sha256 else Path(member or place).name
            images.append(ReviewImage(name=name, sha256=sha256, path=path.parent / place, member=member))
        *messages, answer = row["messages"] or [{}]
        rows[at] = _PreparedRow(messages=messages, answer=answer, tools=row.get("tools", ""), images=tuple(images))
    return rows


def _item_of_run(key: str, items: Sequence[EvalItem], rows: dict[int, _PreparedRow]) -> ReviewItem:
    """Each answer is scored on its nearest reference; all of these are shown, in an order that reveals nothing."""
    first = items[0]
    row = rows.get(first.item)
    messages = _messages(first.prompt, [] if row is None else row.messages, has_images=bool(first.images))
    if row is not None and [image.sha256 for image in row.images] == [image.sha256 for image in first.images]:
        images = row.images
    else:  # those that were answered, even if nothing says any more where they are
        names = ((Path(image.name.partition(" in ")[0]).name, image.sha256) for image in first.images)
        images = tuple(ReviewImage(name=name, sha256=sha256, path=None) for name, sha256 in names)
    return ReviewItem(
        key=key,
        prompt=messages or (PromptMessage(role="", text=first.prompt),),
        answers=tuple(item.answer for item in items),
        tools="" if row is None else row.tools,
        reference=_BETWEEN_REFERENCES.join(sorted({item.reference for item in items})),
        is_reference_whole=row is None or not (row.answer.get("tool_calls") or row.answer.get("reasoning")),
        place=first.place,
        images=images,
        is_rendered=not messages,
    )


def _messages(rendered: str, messages: Sequence[dict[str, Any]], *, has_images: bool) -> tuple[PromptMessage, ...]:
    """The messages if they are what the model was given. Empty if only the rendered text is, because it was cut or
    contains more than the messages' texts: tool calls, or reasoning that the template kept."""
    at = 0
    for message in messages:
        reasoning = message.get("reasoning", "").strip()
        if message.get("tool_calls") or (reasoning and reasoning in rendered):
            return ()
        for part in message["content"].split(_IMAGE) if has_images else [message["content"]]:
            at = rendered.find(part.strip(), at)
            if at < 0:
                return ()
            at += len(part.strip())
    return tuple(PromptMessage(role=message["role"], text=message["content"]) for message in messages)


def review_set_of_rows(rows: Iterable[tuple[str, Mapping[str, Any]]], *, file: str, name: str) -> ReviewSet:
    """A review of external answers in the columns `answer`, or `answer_a` and `answer_b`; models are named after file
    and column. `rows` are given with their places."""
    found = list(rows)
    if not found:
        raise DataError(f"{file} has no rows", _COLUMNS)
    there = found[0][1]
    columns = next((some for some in (_TWO_ANSWERS, _ONE_ANSWER) if all(column in there for column in some)), None)
    if columns is None:
        raise DataError(f"{file} has no column answer; its columns are {', '.join(map(str, there))}", _COLUMNS)
    items, first = dict[str, ReviewItem](), dict[str, str]()
    for place, row in found:
        item = _item_of_row(place, row, columns)
        if item.key in items:
            raise DataError(f"{place} is the same item as {first[item.key]}: {item.key}", "give each row its own id")
        items[item.key], first[item.key] = item, place
    models = tuple(f"{file}:{column}" for column in columns)
    return ReviewSet(name=name, task=file, models=models, items=tuple(items.values()))


def _item_of_row(place: str, row: Mapping[str, Any], columns: Sequence[str]) -> ReviewItem:
    match row.get("prompt"):
        case str() as text if text.strip():
            prompt: tuple[PromptMessage, ...] = (PromptMessage(role="", text=text),)
        case [*messages] if messages and all(map(_is_message, messages)):
            prompt = tuple(PromptMessage(role=message["role"], text=message["content"]) for message in messages)
        case None | str():
            raise DataError(f"{place} has no prompt: an answer cannot be judged without the question", _COLUMNS)
        case other:
            raise DataError(f"{place} has a prompt that is neither text nor messages: {str(other)[:60]}", _COLUMNS)
    answers = []
    for column in columns:
        if column not in row:
            problem = f"{place} has no {column}: all items count, so write a missing answer as an empty one"
            raise DataError(problem, _COLUMNS)
        answer = "" if row[column] is None else row[column]  # an empty answer counts too
        answers.append(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
    reference = row.get("reference")
    content = [[message.role, message.text] for message in prompt] + ["" if reference is None else str(reference)]
    return ReviewItem(
        key=digest(json.dumps(content)) if row.get("id") in (None, "") else str(row["id"]),
        prompt=prompt,
        answers=tuple(answers),
        reference=None if reference in (None, "") else str(reference),
        place="" if row.get("source") in (None, "") else str(row["source"]),
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
