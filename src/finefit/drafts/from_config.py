"""A spec from a config of another tool: the translation, the commented text, and where the data is at hand a comparison
of what the other tool would have trained on with what the spec will."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from finefit.data.examples import open_examples
from finefit.data.rows import Row as DataRow
from finefit.data.sources import open_source
from finefit.errors import FinefitError, SpecError, first_line
from finefit.importers import TOOLS, tool_of, what_is
from finefit.importers.documents import read_document
from finefit.importers.keys import Config, Row
from finefit.importers.translate import Line, Translation, translate
from finefit.model.resolve_model import read_stub
from finefit.plan.prepared_data import missing, prepare_data
from finefit.spec.data import Source
from finefit.spec.draft import commented
from finefit.spec.load import parse_spec
from finefit.spec.schema import Dpo, Spec

_ANY_LENGTH = 1 << 24
"""More tokens than any row has."""
_CONVERSATIONS = ("chat messages", "ShareGPT conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a training trains on."""

    rows: int
    tokens: int
    supervised: int
    rows_per_step: float
    """The mean, where a step has packs."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    theirs: Counts
    ours: Counts
    rows_per_pack: float | None
    """Where the other tool packs rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    translation: Translation
    spec: Spec
    text: str
    compared: Compared | None
    not_compared: str = ""
    """Why there is no comparison."""


def import_config(
    path: Path, target: Path, *, devices: int = 1, dataset_info: Path | None = None, tool: str | None = None
) -> Imported:
    """`target`: the spec file to be written; `tool`: its name, if its config does not show it."""
    document = read_document(path)
    named = next((one for one in TOOLS if tool in (one.slug, one.name)), None) if tool else tool_of(document)
    if named is None:
        known = ", ".join(dict.fromkeys(one.name for one in TOOLS))
        problem = f"{path} is {what_is(document) or f'no config of {known}'}"
        raise SpecError(problem, f"name the tool with --tool: {', '.join(one.slug for one in TOOLS)}")
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
        rows = rows_of(spec, target.parent, limited=False)
        ours = rows_of(spec, target.parent, limited=True)
    except FinefitError as error:
        return Imported(translation=found, spec=spec, text=_text(found), compared=None, not_compared=first_line(error))
    per_pack = _rows_per_pack(rows, found)
    if per_pack is not None:
        found = translate(named, replace(config, rows_per_pack=per_pack), document)
        spec = _parsed(found, target)
    compared = _compare(rows, ours, found, spec, per_pack)
    return Imported(translation=found, spec=spec, text=_text(found), compared=compared)


def _parsed(found: Translation, target: Path) -> Spec:
    return parse_spec(json.dumps(found.values), where=str(target))


def _count_rows(source: Mapping[str, Any], *, base: Path) -> int | None:
    try:
        reader = open_source(Source.model_validate(source, strict=False), base, split="train")
    except (FinefitError, ValueError):
        return None
    return sum(isinstance(row, DataRow) for row in reader.rows())


def rows_of(spec: Spec, base: Path, *, limited: bool) -> list[Row]:
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
    return [Row(length=int(n), supervised=int(s), is_conversation=is_talk) for n, s in counts]


def _rows_per_pack(rows: Sequence[Row], found: Translation) -> float | None:
    """Packs the rows as the tool does, the longest first into the first pack with room."""
    size = found.tool.packs(found.config)
    if size is None:
        return None
    lengths = [seen for seen, _ in (found.tool.seen(row, found.config) for row in rows) if seen]
    return len(lengths) / num_packs(lengths, size) if lengths else None


def num_packs(lengths: Sequence[int], size: int) -> int:
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((at for at, room in enumerate(free) if room >= length), None)
        if at is None:
            free.append(size - length)
        else:
            free[at] -= length
    return len(free)


def _compare(
    rows: Sequence[Row], ours: Sequence[Row], found: Translation, spec: Spec, per_pack: float | None
) -> Compared:
    seen = [found.tool.seen(row, found.config) for row in rows]
    return Compared(
        theirs=_counts([one for one in seen if one[0]], _their_batch(found) * (per_pack or 1), spec),
        ours=_counts([(row.length, row.supervised) for row in ours], spec.global_batch, spec),
        rows_per_pack=per_pack,
    )


def _their_batch(found: Translation) -> int:
    """Rows or packs of a step."""
    config = found.config
    micro = config.whole(found.tool.micro_batch, 1)
    accumulated = config.whole("gradient_accumulation_steps", 1)
    return max(1, config.whole("global_batch_size") or micro * accumulated * config.devices)


def _counts(rows: Sequence[tuple[int, int]], per_step: float, spec: Spec) -> Counts:
    share = 1 - (spec.data.validation.share or 0) if spec.data.validation else 1
    trained = round(len(rows) * share)
    steps = spec.schedule.steps or max(1, math.ceil((spec.schedule.epochs or 1) * math.ceil(trained / per_step)))
    lengths = np.array(rows, np.int64).reshape(-1, 2)
    return Counts(
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
    head += [f"- {line.key}: {line.outcome.note}" for line in lost]
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
            side: {name: getattr(counts, name) for name in Counts.__slots__}
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
