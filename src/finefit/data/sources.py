"""Streams the rows of a source of the spec: finds its files, selects records by `where`, determines their shape and
joins other files. It also decides which rows take part, which are held out, and how often each is seen; this selection
is seeded and made before anything is rendered."""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from finefit.data.columns import RecordError, Value, is_given, plain, scalar, shown
from finefit.data.files import DataFile, find_files
from finefit.data.fingerprint import held_share, prompt_key
from finefit.data.records import DataRecord, Unit, read_records
from finefit.data.rows import BadRow, Row
from finefit.data.shapes import Shape, find_shape, numbered_split
from finefit.errors import DataError
from finefit.spec.data import Data, Fields, Source

Wanted = Mapping[str, tuple[str, ...]]
"""For each column, the values (as `scalar` writes them) that a row of the source may have."""
Keys = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_SAMPLE = 100
"""Number of records at the start of a file from which its shape is recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Joins the records of another file by the id that both share."""

    path: str
    column: str
    partners: dict[str | int, Value | None]
    """The other file's records by id; None for an id that occurs more than once."""

    def joined(self, record: DataRecord) -> DataRecord | BadRow:
        at = record.value.get(self.column)
        if not isinstance(at, str | int):
            return BadRow(record.source, record.number, f"has no {self.column} to join {self.path} by")
        partner, its = self.partners.get(at), f"has the {self.column} {shown(at)}, which"
        if partner is None:
            fault = f"occurs more than once in {self.path}" if at in self.partners else f"{self.path} lacks"
            return BadRow(record.source, record.number, f"{its} {fault}")
        if others := [name for name in partner.keys() & record.value.keys() if partner[name] != record.value[name]]:
            fault = f"has a different {others[0]} than its partner in {self.path}: {shown(partner[others[0]])}"
            return BadRow(record.source, record.number, fault)
        return replace(record, value=record.value | partner)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReader:
    source: str
    """The path as written in the spec."""
    files: tuple[DataFile, ...]
    shapes: tuple[Shape, ...]
    """One shape per file, all of the same kind."""
    unit: Unit | None = None
    """The record unit of a text file, if the user sets it."""
    join: Join | None = None
    wanted: Wanted = field(default_factory=dict)
    images_root: tuple[str, Path] | None = None
    """Root of image paths, as the user names it and resolved; None for the folder of each data file."""
    build: Callable[[Row], Row | BadRow] | None = None

    def rows(self) -> Iterator[Row | BadRow]:
        """Every record of every file yields at least one row."""
        for file, shape in zip(self.files, self.shapes, strict=True):
            name, root = self.images_root or ("", file.path.parent)
            for record in _selected(_records(file, self.unit, self.join), self.wanted):
                for row in [record] if isinstance(record, BadRow) else shape.rows(record):
                    if isinstance(row, Row) and row.images:
                        images = (replace(i, root=str(root), root_name=name) if i.path else i for i in row.images)
                        row = replace(row, images=tuple(images))
                    yield row if self.build is None or isinstance(row, BadRow) else self.build(row)


def open_source(source: Source, base: Path, *, split: str) -> SourceReader:
    path, fields = source.path, source.fields
    files = find_files(path, base, split=split)
    unit = next((unit for unit in get_args(Unit) if unit == fields.text), None) if files[0].format == "text" else None
    if unit:
        fields = fields.model_copy(update={"text": None})
    join = _join(fields.join, files, base, split) if fields.join else None
    wanted: Wanted = {
        name: tuple(scalar(value, name) for value in (values if isinstance(values, tuple) else (values,)))
        for name, values in source.where.items()
    }
    samples = [list(islice(_selected(_records(file, unit, join), wanted), _SAMPLE)) for file in files]
    if wanted and not any(samples):
        raise _none_selected(path, wanted)
    shapes = _shapes(path, files, samples, fields)
    root = None
    if source.images_root is not None:
        root = (source.images_root, base / source.images_root)
        if not (root[1].is_dir() or zipfile.is_zipfile(root[1])):
            problem = f"{path}: images_root {root[0]} is neither a folder nor a zip (looked for {root[1]})"
            raise DataError(problem, "its path is relative to the spec file")
    if not wanted:  # one file may hold all splits of a published dataset
        columns = [shape.columns or frozenset() for shape in shapes]
        wanted = numbered_split(frozenset.intersection(*columns), split)
        records = (record for file in files for record in _records(file, unit, join))
        if wanted and next(_selected(records, wanted), None) is None:
            raise _none_selected(path, wanted)
    if wanted:
        shapes = tuple(replace(shape, mapping={"only": _described(wanted)} | shape.mapping) for shape in shapes)
    return SourceReader(source=path, files=files, shapes=shapes, unit=unit, join=join, wanted=wanted, images_root=root)


def _shapes(
    path: str, files: Sequence[DataFile], samples: Sequence[Sequence[DataRecord | BadRow]], fields: Fields
) -> tuple[Shape, ...]:
    """A file without readable records gets the shape of the first file that has some."""
    records = [[record for record in sample if isinstance(record, DataRecord)] for sample in samples]
    both = zip(files, records, strict=True)
    found = [find_shape(read, fields, source=file.name) if read else None for file, read in both]
    first = next((shape for shape in found if shape), None)
    if first is None:
        bad = [record for sample in samples for record in sample if isinstance(record, BadRow)]
        if not bad:
            raise DataError(f"{path} holds no records", "check the path, or leave the source out")
        problem = f"{path} holds no record that can be read; the first: {bad[0].place} {bad[0].reason}"
        raise DataError(problem, "fix the file")
    shapes = tuple(shape or first for shape in found)
    for file, shape in zip(files, shapes, strict=True):
        if shape.kind != first.kind:
            one = files[found.index(first)].name
            problem = f"{path} mixes kinds of rows: {one} holds {first.name}, {file.name} {shape.name}"
            raise DataError(problem, "make them two sources")
    return shapes


def _selected(records: Iterable[DataRecord | BadRow], wanted: Wanted) -> Iterator[DataRecord | BadRow]:
    """Yields the records that match `where`. A record without such a column becomes a bad row."""
    for record in records:
        try:
            if isinstance(record, BadRow) or all(_matches(record, *want) for want in wanted.items()):
                yield record
        except RecordError as error:
            yield BadRow(record.source, record.number, str(error))


def _matches(record: DataRecord, name: str, values: tuple[str, ...]) -> bool:
    if not is_given(record.value.get(name)):
        raise RecordError(f"has no {name}, by which rows are selected")
    return scalar(record.value[name], name) in values


def _described(wanted: Wanted) -> str:
    return " and ".join(f"{name} = {' or '.join(values)}" for name, values in wanted.items())


def _none_selected(path: str, wanted: Wanted) -> DataError:
    remedy = "select records with `where`, such as where: {split: 1}"
    return DataError(f"{path} has no record with {_described(wanted)}", remedy)


def _records(file: DataFile, unit: Unit | None, join: Join | None) -> Iterator[DataRecord | BadRow]:
    records = read_records(file, unit=unit)
    if join is None:
        return records
    return (join.joined(record) if isinstance(record, DataRecord) else record for record in records)


def _join(path: str, files: tuple[DataFile, ...], base: Path, split: str) -> Join:
    others = find_files(path, base, split=split)
    ours, theirs = _first_columns(files), _first_columns(others)
    # all questions about an image share its id, so an image id does not identify a record
    shared = [name for name in ours if name in theirs and plain(name).endswith("id") and plain(name) != "imageid"]
    if len(shared) != 1:
        what = f"no id column is in both: {', '.join(ours)}; {', '.join(theirs)}"
        what = f"{', '.join(shared)} are all ids that both have" if shared else what
        remedy = "keep exactly one id column that both files have, such as question_id"
        raise DataError(f"{path} cannot be joined: {what}", remedy)
    partners: dict[str | int, Value | None] = {}
    for file in others:
        for record in read_records(file):
            at = record.value.get(shared[0]) if isinstance(record, DataRecord) else None
            if isinstance(record, BadRow) or not isinstance(at, str | int):
                reason = record.reason if isinstance(record, BadRow) else f"has no {shared[0]}"
                problem = f"{record.place} {reason}, so it cannot be joined"
                raise DataError(problem, "fix or remove this record")
            partners[at] = None if at in partners else record.value
    return Join(path=path, column=shared[0], partners=partners)


def _first_columns(files: tuple[DataFile, ...]) -> list[str]:
    first = islice((record for file in files for record in read_records(file)), _SAMPLE)
    values = [record.value for record in first if isinstance(record, DataRecord)]
    return list(dict.fromkeys(name for value in values for name in value if is_given(value[name])))


LEFT_OUT = ("left out by limit", "left out by weight")
"""Reasons for rows that the spec itself leaves out."""


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which rows of a source take part, by their index among its usable rows."""

    taken: Mask | None = None
    """None for all rows."""
    elsewhere: Mask | None = None
    """Rows of another split, which are not counted in this one."""
    reason: str = ""
    """The reason why the other rows are left out."""

    def require(self, ordinal: int, source: str) -> None:
        """Raises an error for a file that grows while it is read: its new rows have no decision."""
        if any(mask is not None and ordinal >= len(mask) for mask in (self.taken, self.elsewhere)):
            remedy = "run the command again when nothing writes to the file"
            raise DataError(f"{source} has changed while it was read", remedy)


def select_rows(
    data: Data, readers: Sequence[SourceReader], seed: int, *, with_system: bool
) -> list[tuple[RowSelection | None, RowSelection]]:
    """Returns for every training source the rows that are held out for validation and the rows that are trained on."""
    chosen = [sampled(reader, s.weight, s.limit, seed) for s, reader in zip(data.train, readers, strict=True)]
    share = data.validation.share if data.validation else None
    if share is None:
        return [(None, selection) for selection in chosen]
    keys = [_keys(reader, with_system=with_system) for reader in readers]
    sizes = [len(prompts) for prompts, _ in keys]
    masks = (np.ones(n, bool) if s.taken is None else s.taken for s, n in zip(chosen, sizes, strict=True))
    taken = np.concatenate(list(masks))
    # records of different sources are different
    offsets = np.cumsum([0, *(int(records.max(initial=0)) + 1 for _, records in keys)])
    records = np.concatenate([records + np.uint64(offset) for (_, records), offset in zip(keys, offsets, strict=False)])
    prompts = np.concatenate([prompts for prompts, _ in keys])
    held = np.zeros(len(taken), bool)
    held[taken] = held_share(group_keys(prompts[taken], records[taken]), share, seed)
    parts = np.split(held, np.cumsum(sizes)[:-1])
    return [
        (RowSelection(taken=part, elsewhere=~part), RowSelection(taken=s.taken, elsewhere=part, reason=s.reason))
        for part, s in zip(parts, chosen, strict=True)
    ]


def sampled(reader: SourceReader, weight: float, limit: int | None, seed: int) -> RowSelection:
    if weight >= 1 and limit is None:
        return RowSelection()
    total = sum(isinstance(row, Row) for row in reader.rows())
    by_weight = max(1, round(total * weight)) if weight < 1 else total
    count = min(by_weight, limit or total, total)
    taken = np.zeros(total, bool)
    taken[np.random.RandomState(seed).permutation(total)[:count]] = True
    is_limited = limit is not None and limit <= by_weight
    return RowSelection(taken=taken, reason=LEFT_OUT[0] if is_limited else LEFT_OUT[1])


def sampled_rows(reader: SourceReader, source: Source, seed: int) -> Iterator[Row | BadRow]:
    """Yields all rows of a source; those that its limit or weight leaves out become bad rows with a reason of
    `LEFT_OUT`."""
    selection = sampled(reader, source.weight, source.limit, seed)
    ordinal = -1
    for row in reader.rows():
        ordinal += isinstance(row, Row)
        selection.require(ordinal, source.path)
        is_taken = isinstance(row, BadRow) or selection.taken is None or selection.taken[ordinal]
        yield row if is_taken else BadRow(row.source, row.number, selection.reason, row.part)


def _keys(reader: SourceReader, *, with_system: bool) -> tuple[Keys, Keys]:
    """Returns for every row the key of its prompt, and the index of its record."""
    prompts: list[int] = []
    records: list[int] = []
    usable = (row for row in reader.rows() if isinstance(row, Row))
    for number, (_, rows) in enumerate(groupby(usable, key=lambda row: (row.source, row.number)), start=1):
        found = [prompt_key(row, with_system=with_system) for row in rows]
        prompts += found
        records += [number] * len(found)
    return np.array(prompts, np.uint64), np.array(records, np.uint64)


def group_keys(prompts: Keys, records: Keys) -> Keys:
    """Returns for each row the smallest prompt key among all rows that share a prompt or a record with it, directly or
    through others."""
    groups = [np.unique(keys, return_inverse=True)[1] for keys in (records, prompts)]
    keys, before = prompts, None
    while before is None or (keys != before).any():
        before = keys
        for group in groups:
            least = np.full(group.max(initial=0) + 1, np.iinfo(np.uint64).max, np.uint64)
            np.minimum.at(least, group, keys)
            keys = least[group]
    return keys


def weighted(begin: int, end: int, weight: float, seed: int) -> NDArray[np.int64]:
    """Lists each example as often as it is seen in an epoch; a fractional weight repeats a seeded subset once more."""
    numbers = np.arange(begin, end)
    if weight <= 1:
        return numbers
    times, rest = divmod(weight, 1)
    more = np.random.RandomState(seed).permutation(numbers)[: round(rest * len(numbers))]
    return np.concatenate([np.tile(numbers, int(times)), np.sort(more)])
