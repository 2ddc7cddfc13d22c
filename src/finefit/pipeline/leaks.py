"""Rows that a model is trained on, among those that it is asked later. They are compared as they are read: nothing is rendered or cut first, and none
is left out for its length."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from finefit.data.built import builder
from finefit.data.fingerprint import fingerprint, system_is_content
from finefit.data.overlap import SAMPLE_ROWS, Overlap, OverlapIndex, common_windows
from finefit.data.read import Reading, open_source
from finefit.data.rows import Row
from finefit.data.selection import sampled
from finefit.spec.rows import Source
from finefit.spec.tasks import Form


def leaks(
    trained: tuple[Source, ...],
    questions: Source,
    *,
    base: Path,
    seed: int,
    turns: Literal["all", "last"] = "all",
    form: Form | None = None,
) -> tuple[Overlap, ...]:
    """Of each question that is trained on the first row that holds it. `turns`: the answers that are trained on; `form`: what both are built with."""
    sample = list(_sample(trained, base, form))
    with_system = system_is_content(sample)
    index = OverlapIndex(common_windows(fingerprint(row, with_system=with_system) for row in sample))
    for row in _rows(questions, base, seed, "test", form):
        index.add_held("test", row, fingerprint(row, with_system=with_system))
    found: dict[str, Overlap] = {}
    for source in trained:
        for row in _rows(source, base, seed, "train", form):
            overlap = index.find(row, fingerprint(row, with_system=with_system, turns=turns))
            if overlap is not None:
                found.setdefault(overlap.other, overlap)
    return tuple(found.values())


def _sample(sources: Sequence[Source], base: Path, form: Form | None) -> Iterator[Row]:
    """Enough of every source to know what is a template."""
    each = -(-SAMPLE_ROWS // max(1, len(sources)))
    for source in sources:
        yield from islice((row for row in _read(source, base, "train", form).rows() if isinstance(row, Row)), each)


def _rows(source: Source, base: Path, seed: int, split: str, form: Form | None) -> Iterator[Row]:
    """Those that a limit or a weight leaves."""
    reading = _read(source, base, split, form)
    choice = sampled(reading, source.weight, source.limit, seed)
    usable = (row for row in reading.rows() if isinstance(row, Row))
    for ordinal, row in enumerate(usable):
        choice.require(ordinal, source.path)
        if choice.taken is None or choice.taken[ordinal]:
            yield row


def _read(source: Source, base: Path, split: str, form: Form | None) -> Reading:
    return replace(open_source(source, base, split=split), build=builder(form, base=base))
