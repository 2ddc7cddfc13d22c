"""Stacks from runs: the answers of one evaluation, or those of two, paired by what was asked."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from finefit.artifacts.evaluations import EvalItem, EvalRequest, EvalResult
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, open_run
from finefit.artifacts.stages import short_names
from finefit.errors import RunError
from finefit.facts.files import read_file
from finefit.review.exhibits import Exhibit
from finefit.review.stack import Said, Sheet, Stack

FINAL = "final"
_OR = "\n\nor\n\n"
"""Between references."""
_IMAGE = "<image>"
"""Stands in a message where an image belongs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A run and which of its checkpoints is meant."""

    run: RunDir
    checkpoint: str | None
    """As the user gave it; None: the final one."""

    @classmethod
    def parse(cls, target: str, checkpoint: str | None = None) -> "Named":
        """`runs/a-1` or `runs/a-1:checkpoint-40`; a folder whose own name has a colon is itself."""
        if Path(target).is_dir() or ":" not in target:
            return cls(run=open_run(Path(target)), checkpoint=checkpoint)
        path, _, named = target.rpartition(":")
        return cls(run=open_run(Path(path)), checkpoint=named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    where: StageDir
    paths: EvalPaths

    @property
    def task(self) -> str:
        return self.paths.folder.name


def stack_of_runs(named: Sequence[Named], *, task: str | None = None, name: str | None = None) -> Stack:
    """`task`: by default the first that all of them have a result for."""
    scored = [_with_results(one.run) for one in named]
    chosen = task or _first_common(named, scored)
    taken = [
        _taken(one, [s for s in found if s.task == chosen], chosen) for one, found in zip(named, scored, strict=True)
    ]
    models = _labels([(one.run.path.resolve(), s.paths.checkpoint) for one, s in zip(named, taken, strict=True)])
    _require_two(models)
    answered = [_items(s) for s in taken]
    common = [key for key in answered[0] if all(key in items for items in answered)]
    if not common:
        raise RunError(
            f"{' and '.join(models)} have no item of {chosen} in common",
            "review runs that were evaluated on the same rows",
        )
    rows = _rows(taken[0])
    sheets = tuple(_sheet(key, [items[key] for items in answered], rows) for key in common)
    if not any(chain.from_iterable(sheet.answers for sheet in sheets)):
        raise RunError(
            f"the task {chosen} asked for no answers, so there is nothing to judge", "name another with --task"
        )
    unpaired = sum(len(items) for items in answered) - len(answered) * len(common)
    return Stack(
        name=name or _slug(".vs.".join(models), chosen), task=chosen, models=models, sheets=sheets, unpaired=unpaired
    )


def _with_results(run: RunDir) -> list[_Scored]:
    """Of the last stage first, and all items before a sample of them."""
    found = [
        _Scored(where=where, paths=paths)
        for where in reversed(run.stages())
        for paths in where.evaluations()
        if paths.result.exists()
    ]
    return sorted(found, key=lambda scored: -(scored.paths.limit or float("inf")))


def _first_common(named: Sequence[Named], scored: Sequence[Sequence[_Scored]]) -> str:
    tasks = [
        dict.fromkeys(s.task for s in sorted(found, key=lambda s: s.paths.request.stat().st_mtime_ns))
        for found in scored
    ]
    for task in tasks[0]:
        if all(task in others for others in tasks):
            return task
    each = "; ".join(f"{one.run.path} has {', '.join(has) or 'none'}" for one, has in zip(named, tasks, strict=True))
    raise RunError(
        f"there is no task that was evaluated everywhere: {each}",
        f"answer held-out rows with `finefit eval {named[0].run.path}`",
    )


def _taken(named: Named, scored: Sequence[_Scored], task: str) -> _Scored:
    wanted = _checkpoint(named, scored)
    for one in scored:
        if one.paths.checkpoint == wanted:
            return one
    there = ", ".join(dict.fromkeys(s.paths.checkpoint for s in scored)) or "none"
    raise RunError(
        f"{named.run.path} has no result of {task} for {wanted}; there is {there}",
        f"make it with `finefit eval {named.run.path} --task {task} --checkpoint {named.checkpoint or FINAL}`, or name another",
    )


def _checkpoint(named: Named, scored: Sequence[_Scored]) -> str:
    """`final` and `best` become the checkpoint that they name; a model that was never trained has only one."""
    asked = named.checkpoint or FINAL
    for where in reversed(named.run.stages()):
        if (where.checkpoints / asked).is_dir():
            return (where.checkpoints / asked).resolve().name
    there = {s.paths.checkpoint for s in scored}
    if named.checkpoint is None and len(there) == 1:
        return there.pop()
    return f"checkpoint-{asked}" if asked.isdecimal() else asked


def _labels(places: Sequence[tuple[Path, str]]) -> tuple[str, ...]:
    """As short as they can be and still differ. The model of an evaluation's stage is called as its run is."""
    shown = short_names([path for path, _ in places])
    return tuple(
        shown[path] if path.name == checkpoint else f"{shown[path]}:{checkpoint}" for path, checkpoint in places
    )


def _require_two(models: Sequence[str]) -> None:
    if len(set(models)) < len(models):
        raise RunError(f"both sides are {models[0]}", "name two runs, or two checkpoints of one: RUN:base RUN:final")


def _slug(*parts: str) -> str:
    return re.sub(r"[^\w.-]+", "-", ".".join(reversed(parts))).strip(".-")[:120]


def _items(scored: _Scored) -> dict[str, EvalItem]:
    """By key; the same item once more in one file keeps its place among its equals."""
    seen: Counter[str] = Counter()
    found: dict[str, EvalItem] = {}
    for item in read_record(scored.paths.result, EvalResult).items:
        seen[item.key] += 1
        found[item.key if seen[item.key] == 1 else f"{item.key}-{seen[item.key]}"] = item
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """As it was before a template made text of it."""

    messages: list[dict[str, Any]]
    """Of the prompt."""
    answer: dict[str, Any]
    tools: str
    images: tuple[Exhibit, ...]


def _rows(scored: _Scored) -> dict[int, _Row]:
    """None where they are not there as they were."""
    subject = read_record(scored.paths.request, EvalRequest).subject
    path = scored.where.prepared(subject.items)
    if not path.exists() or read_file(path, scored.where.path).sha256 != subject.items_sha256:
        return {}
    with path.open(encoding="utf-8") as file:
        return {at: _row(json.loads(line), path.parent) for at, line in enumerate(file)}


def _row(item: dict[str, Any], folder: Path) -> _Row:
    """Of an image its path, its place in a zip and its digest come first; a path that is not absolute lies among the prepared files."""
    images = tuple(_exhibit(folder / path, member, sha256) for path, member, sha256, *_ in item.get("pictures", ()))
    *messages, answer = item["messages"] or [{}]
    return _Row(messages=messages, answer=answer, tools=item.get("tools", ""), images=images)


def _exhibit(path: Path, member: str, sha256: str) -> Exhibit:
    """One that came without a file is called by its digest."""
    return Exhibit(
        name=sha256[:12] if member == sha256 else Path(member or path).name, sha256=sha256, path=path, member=member
    )


def _images(item: EvalItem, row: _Row | None) -> tuple[Exhibit, ...]:
    """Those that were answered, even where nothing says any more where they lie."""
    if row is not None and [exhibit.sha256 for exhibit in row.images] == [image.sha256 for image in item.images]:
        return row.images
    return tuple(
        Exhibit(name=Path(image.name.partition(" in ")[0]).name, sha256=image.sha256, path=None)
        for image in item.images
    )


def _sheet(key: str, items: Sequence[EvalItem], rows: dict[int, _Row]) -> Sheet:
    first = items[0]
    row = rows.get(first.item)
    said = _said(first.prompt, [] if row is None else row.messages, has_images=bool(first.images))
    return Sheet(
        key=key,
        prompt=said or (Said(role="", text=first.prompt),),
        answers=tuple(item.answer for item in items),
        tools="" if row is None else row.tools,
        reference=_reference(items),
        is_reference_whole=row is None or not (row.answer.get("tool_calls") or row.answer.get("reasoning")),
        place=first.place,
        images=_images(first, row),
        is_rendered=not said,
    )


def _reference(items: Sequence[EvalItem]) -> str:
    """Each item has the one nearest to its answer: all of them, in an order that says nothing of whose they are."""
    return _OR.join(sorted({item.reference for item in items}))


def _said(asked: str, messages: Sequence[dict[str, Any]], *, has_images: bool) -> tuple[Said, ...]:
    """The messages where they are what was asked; none where only the text that the model was given is: it may have been cut. Of an image that has
    the model's own mark."""
    texts = [
        part
        for message in messages
        for part in (message["content"].split(_IMAGE) if has_images else [message["content"]])
    ]
    if messages and _are_in(asked, texts) and not any(_says_more(message, asked) for message in messages):
        return tuple(Said(role=message["role"], text=message["content"]) for message in messages)
    return ()


def _says_more(message: dict[str, Any], asked: str) -> bool:
    """Than its text: calls, or thoughts that the template has kept."""
    thought = message.get("reasoning", "").strip()
    return bool(message.get("tool_calls") or (thought and thought in asked))


def _are_in(text: str, parts: Iterable[str]) -> bool:
    """One behind the other."""
    at = 0
    for part in parts:
        at = text.find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True
