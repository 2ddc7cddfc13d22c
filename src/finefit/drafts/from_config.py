"""A spec from a config of another tool: the translation, the commented text, and where the data is at hand a comparison
of what the other tool would have trained on with what the spec will."""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from finefit.data.examples import Example, open_examples
from finefit.data.files import find_files
from finefit.data.records import DataRecord, read_records
from finefit.data.rows import Row
from finefit.data.sources import open_source
from finefit.errors import FinefitError, SpecError, first_line
from finefit.importers import TOOLS, tool_of, what_is
from finefit.importers.documents import read_document
from finefit.importers.keys import Config, SeenRow, ToolPacks
from finefit.importers.translate import Line, Translation, grouped, translate
from finefit.model.resolve_model import read_stub
from finefit.plan.prepared_data import missing, prepare_data
from finefit.spec.data import Fields, Source
from finefit.spec.draft import commented
from finefit.spec.load import parse_spec
from finefit.spec.schema import Dpo, Spec

_ANY_LENGTH = 1 << 24
"""More tokens than any row has."""
_CONVERSATIONS = ("chat messages", "ShareGPT conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCounts:
    """What a training trains on."""

    rows: int
    tokens: int
    supervised: int
    rows_per_step: float
    """The mean, where a step has packs."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCounts:
    theirs: TrainedCounts
    ours: TrainedCounts

    def lines(self) -> dict[str, tuple[int | float, int | float]]:
        """Returns the figures of both by name, as far as a difference is worth showing."""
        theirs, ours = self.theirs, self.ours
        return {
            "rows": (theirs.rows, ours.rows),
            "tokens": (theirs.tokens, ours.tokens),
            "supervised tokens": (theirs.supervised, ours.supervised),
            "rows per step": (round(theirs.rows_per_step, 1), round(ours.rows_per_step, 1)),
            "steps": (theirs.steps, ours.steps),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    translation: Translation
    spec: Spec
    text: str
    compared: ComparedCounts | None
    not_compared: str = ""
    """Why there is no comparison."""


def import_config(
    path: Path, target: Path, *, devices: int = 1, dataset_info: Path | None = None, tool: str | None = None
) -> Imported:
    """`target`: the spec file to be written; `tool`: its name, if its config does not show it."""
    document = read_document(path)
    named = next((one for one in TOOLS if tool in (one.slug, one.name)), None) if tool else tool_of(document)
    slugs = ", ".join(one.slug for one in TOOLS)
    if named is None and tool:
        raise SpecError(f"there is no tool {tool}", f"the tools are {slugs}")
    if named is None:
        known = ", ".join(dict.fromkeys(one.name for one in TOOLS))
        problem = f"{path} is {what_is(document) or f'no config of {known}'}"
        raise SpecError(problem, f"name the tool with --tool: {slugs}")
    config = Config(
        where=str(path),
        values={},
        defaults={},
        folder=path.parent,
        target=target.parent,
        devices=devices,
        dataset_info=dataset_info,
        count_rows=partial(_count_rows, base=target.parent),
    )
    found = translate(named, config, document)
    spec = _parsed(found, target)
    try:
        ours = rows_of(spec, target.parent, limited=True)
        theirs = _rows_of_tool(found, spec, target.parent)
    except FinefitError as error:
        return Imported(translation=found, spec=spec, text=_text(found), compared=None, not_compared=first_line(error))
    packed = _packed(theirs, found, spec)
    if packed is not None:
        found = translate(named, replace(config, packed=packed), document)
        spec = _parsed(found, target)
    compared = _compare(theirs, ours, found, spec)
    return Imported(translation=found, spec=spec, text=_text(found), compared=compared)


def _parsed(found: Translation, target: Path) -> Spec:
    return parse_spec(json.dumps(found.values), where=str(target))


def _count_rows(source: Mapping[str, Any], *, base: Path) -> int | None:
    try:
        reader = open_source(Source.model_validate(source, strict=False), base, split="train")
    except (FinefitError, ValueError):
        return None
    return sum(isinstance(row, Row) for row in reader.rows())


def rows_of(spec: Spec, base: Path, *, limited: bool) -> list[SeenRow]:
    """Returns the training rows, those held out included, as the spec uses them, or as they are without a limit of
    length. Raises an error if data or tokenizer are not here."""
    if isinstance(spec.objective, Dpo):
        raise SpecError("pairs are not compared: both tools train on both answers of every pair")
    lost = [*missing(spec.data, base), *(source.path for source in spec.data.train if "://" in source.path)]
    if lost:
        raise SpecError(f"its rows are not here: {', '.join(dict.fromkeys(lost))}")
    tokenizer = read_stub(spec.model, base).tokenizer
    if tokenizer is None:
        raise SpecError("the model has no tokenizer here")
    changes: dict[str, Any] = {"validation": None, "test": None, "bad_rows": "drop"}
    changes |= {} if limited else {"max_tokens": _ANY_LENGTH, "too_long": "drop"}
    data = spec.data.model_copy(update=changes)
    prepared = prepare_data(spec.model_copy(update={"data": data, "evaluate": ()}), base, tokenizer)
    if prepared.record.lengths is None:
        return []
    examples = open_examples(prepared.path("train.safetensors"))
    is_talk = all(ledger.shape in _CONVERSATIONS for ledger in prepared.record.sources)
    counts = zip(examples.lengths, examples.supervised_counts, strict=True)
    return [
        SeenRow(
            length=int(length),
            supervised=int(supervised),
            is_conversation=is_talk,
            turns=_turns(row.supervised)
            if is_talk and isinstance(row := examples[at], Example)
            else ((int(length - supervised), int(supervised)),),
        )
        for at, (length, supervised) in enumerate(counts)
    ]


def _turns(supervised: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Counts the tokens of every prompt and of the answer after it; what follows the last answer belongs to none."""
    runs = [(is_answer, sum(1 for _ in run)) for is_answer, run in groupby(supervised)]
    starts = runs if runs and not runs[0][0] else [(False, 0), *runs]
    return tuple((prompt, answer) for (_, prompt), (_, answer) in zip(starts[::2], starts[1::2], strict=False))


def _rows_of_tool(found: Translation, spec: Spec, base: Path) -> list[SeenRow]:
    """Returns the rows without a limit of length, as the tool words them where the spec cannot say it."""
    write = found.tool.wording(found.config)
    if write is None:
        return rows_of(spec, base, limited=False)
    with TemporaryDirectory() as folder:
        sources = []
        for at, source in enumerate(spec.data.train):
            files = find_files(source.path, base, split="train")
            records = (record for file in files for record in read_records(file) if isinstance(record, DataRecord))
            path = Path(folder) / f"{at}.jsonl"
            path.write_text("".join(json.dumps(write(one.value)) + "\n" for one in records), encoding="utf-8")
            sources.append(source.model_copy(update={"path": str(path), "fields": Fields()}))
        data = spec.data.model_copy(update={"train": tuple(sources)})
        return rows_of(spec.model_copy(update={"data": data}), base, limited=False)


def _packed(rows: Sequence[SeenRow], found: Translation, spec: Spec) -> ToolPacks | None:
    """Packs the rows as the tool does; None if a step has rows."""
    size = found.tool.packs(found.config)
    lengths = [seen for seen, _ in (found.tool.seen(row, found.config) for row in rows) if seen]
    if size is None or not lengths:
        return None
    return ToolPacks(rows_per_pack=len(lengths) / num_packs(lengths, size), num_rows=_num_trained(len(lengths), spec))


def _num_trained(rows: int, spec: Spec) -> int:
    """Leaves out the rows that are held out."""
    share = (spec.data.validation.share or 0) if spec.data.validation else 0
    return round(rows * (1 - share))


def num_packs(lengths: Sequence[int], size: int) -> int:
    """Fills one pack after another, always with the longest row that fits: the packs of first-fit-decreasing."""
    left, count = sorted(lengths), 0
    while left:
        room, count = size - left.pop(), count + 1
        while at := bisect_right(left, room):
            room -= left.pop(at - 1)
    return count


def _compare(rows: Sequence[SeenRow], ours: Sequence[SeenRow], found: Translation, spec: Spec) -> ComparedCounts:
    seen = [found.tool.seen(row, found.config) for row in rows]
    count, packed = found.tool.per_step(found.config), found.config.packed
    return ComparedCounts(
        theirs=_counts([one for one in seen if one[0]], packed.rows_of(count) if packed else count, spec),
        ours=_counts([(row.length, row.supervised) for row in ours], spec.global_batch, spec),
    )


def _counts(rows: Sequence[tuple[int, int]], per_step: float, spec: Spec) -> TrainedCounts:
    per_epoch = math.ceil(_num_trained(len(rows), spec) / per_step)
    steps = spec.schedule.steps or max(1, math.ceil((spec.schedule.epochs or 1) * per_epoch))
    lengths = np.array(rows, np.int64).reshape(-1, 2)
    return TrainedCounts(
        rows=len(rows),
        tokens=int(lengths[:, 0].sum()),
        supervised=int(lengths[:, 1].sum()),
        rows_per_step=per_step,
        steps=steps,
    )


def _text(found: Translation) -> str:
    """The spec, with a comment at every setting that means something else than the key that it comes from."""
    comments: dict[str, str] = {}
    for line in found.lines:
        place = next(iter(line.outcome.settings), None)
        if place and line.outcome.note and not line.is_default:
            comments.setdefault(place, f"{line.key}: {line.outcome.note}")
    lost = [line for line in found.of("not carried over") if line.outcome.matters]
    head = [f"From a config of {found.tool.name}, {Path(found.config.where).name}."]
    head += ["Not carried over, and it changes what is trained:"] if lost else []
    head += [f"- {', '.join(line.key for line in group)}: {group[0].outcome.note}" for group in grouped(lost)]
    return commented(found.values, comments, head)


def document(found: Imported) -> dict[str, Any]:
    """The import as JSON."""
    return {
        "tool": found.translation.tool.name,
        "spec": found.spec.model_dump(mode="json", by_alias=True),
        "keys": [_line_document(line) for line in found.translation.lines],
        "not_compared": found.not_compared or None,
        "compared": None
        if found.compared is None
        else {
            side: {name: getattr(counts, name) for name in TrainedCounts.__slots__}
            for side, counts in (("theirs", found.compared.theirs), ("ours", found.compared.ours))
        },
    }


def _line_document(line: Line) -> dict[str, Any]:
    return {
        "key": line.key,
        "value": line.value,
        "is_default": line.is_default,
        "fate": line.outcome.fate,
        "settings": dict(line.outcome.settings),
        "note": line.outcome.note,
        "matters": line.outcome.matters,
    }
