"""A source of the spec -> its rows, streamed: the files it names, the shape of their records, and what is joined to them."""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import get_args

from finefit.data.cells import is_given, shown
from finefit.data.columns import plain
from finefit.data.files import DataFile, find_files
from finefit.data.published import numbered_split
from finefit.data.records import Record, Unit, Value, read_records
from finefit.data.rows import BadRow, Row
from finefit.data.shapes import Shape, find_shape
from finefit.data.where import Wanted, chosen, told, wanted_of
from finefit.errors import DataError
from finefit.spec.rows import Fields, Source

_SAMPLE = 100
"""Records at the start of a file that its shape is recognised by."""
_UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The records of another file, by the id that they share with these."""

    path: str
    column: str
    partners: dict[str | int, Value | None]
    """None for an id that occurs more than once."""

    def joined(self, record: Record) -> Record | BadRow:
        at = record.value.get(self.column)
        if not isinstance(at, str | int):
            return BadRow(record.source, record.number, f"has no {self.column} to join {self.path} by")
        if at not in self.partners:
            return BadRow(record.source, record.number, f"has the {self.column} {shown(at)}, which {self.path} lacks")
        partner = self.partners[at]
        if partner is None:
            return BadRow(
                record.source,
                record.number,
                f"has the {self.column} {shown(at)}, which occurs more than once in {self.path}",
            )
        for name in partner.keys() & record.value.keys():
            if partner[name] != record.value[name]:
                return BadRow(
                    record.source,
                    record.number,
                    f"has another {name} than its partner in {self.path}: {shown(partner[name])}",
                )
        return replace(record, value=record.value | partner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    source: str
    """The path as the spec has it."""
    files: tuple[DataFile, ...]
    shapes: tuple[Shape, ...]
    """One per file, all of one kind."""
    unit: Unit | None = None
    """What a record of a text file is, where the user says so."""
    join: Join | None = None
    wanted: Wanted = field(default_factory=dict)
    """Records with other values are no rows of this source."""
    images_root: tuple[str, Path] | None = None
    """Where paths of images start, as the user names it and as it is; None: in the folder of their file."""
    build: Callable[[Row], Row | BadRow] | None = None
    """What `data.task` makes of a row."""

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    def rows(self) -> Iterator[Row | BadRow]:
        """Every record of every file yields at least one."""
        for file, shape in zip(self.files, self.shapes, strict=True):
            name, root = self.images_root or ("", file.path.parent)
            for record in chosen(_records(file, self.unit, self.join), self.wanted):
                if isinstance(record, BadRow):
                    yield record
                else:
                    yield from (self._built(_rooted(row, name, str(root))) for row in shape.rows(record))

    def _all_records(self) -> Iterator[Record | BadRow]:
        return (record for file in self.files for record in _records(file, self.unit, self.join))

    def _built(self, row: Row | BadRow) -> Row | BadRow:
        return row if self.build is None or isinstance(row, BadRow) else self.build(row)


def _rooted(row: Row | BadRow, name: str, root: str) -> Row | BadRow:
    if isinstance(row, BadRow) or not row.images:
        return row
    return replace(
        row, images=tuple(replace(image, root=root, root_name=name) if image.path else image for image in row.images)
    )


def open_source(source: Source, base: Path, *, split: str) -> Reading:
    path, fields, images_root = source.path, source.fields, source.images_root
    files = find_files(path, base, split=split)
    unit = next((unit for unit in _UNITS if unit == fields.text), None) if files[0].format == "text" else None
    if unit:
        fields = fields.model_copy(update={"text": None})
    join = _join(fields.join, files, base, split) if fields.join else None
    wanted = wanted_of(source.where)
    samples = [list(islice(chosen(_records(file, unit, join), wanted), _SAMPLE)) for file in files]
    _require_some(samples, path, wanted)
    found = [_shape(file, sample, fields) for file, sample in zip(files, samples, strict=True)]
    first = next((shape for shape in found if shape), None)
    if first is None:
        raise _nothing(path, [record for sample in samples for record in sample if isinstance(record, BadRow)])
    shapes = tuple(_only(shape or first, wanted) for shape in found)
    for file, shape in zip(files, shapes, strict=True):
        if shape.kind != first.kind:
            problem = f"{path} mixes kinds of rows: {files[found.index(first)].name} holds {first.name}, {file.name} {shape.name}"
            raise DataError(problem, "make them two sources")
    root = None if images_root is None else (images_root, _root(path, images_root, base))
    reading = Reading(source=path, files=files, shapes=shapes, unit=unit, join=join, wanted=wanted, images_root=root)
    return reading if wanted else _of_numbered_split(reading, split)


def _of_numbered_split(reading: Reading, split: str) -> Reading:
    """Of one file that holds all splits of a published data set, the records of the one that is asked for."""
    columns = [shape.columns or frozenset() for shape in reading.shapes]
    wanted = numbered_split(frozenset.intersection(*columns), split)
    if not wanted:
        return reading
    if next(chosen(reading._all_records(), wanted), None) is None:
        raise _none_wanted(reading.source, wanted)
    return replace(reading, wanted=wanted, shapes=tuple(_only(shape, wanted) for shape in reading.shapes))


def _only(shape: Shape, wanted: Wanted) -> Shape:
    return replace(shape, mapping={"only": told(wanted)} | shape.mapping) if wanted else shape


def _require_some(samples: list[list[Record | BadRow]], path: str, wanted: Wanted) -> None:
    if wanted and not any(samples):
        raise _none_wanted(path, wanted)


def _none_wanted(path: str, wanted: Wanted) -> DataError:
    return DataError(
        f"{path} has no record with {told(wanted)}", "say by `where` which records are meant, such as where: {split: 1}"
    )


def _root(path: str, images_root: str, base: Path) -> Path:
    root = base / images_root
    if not (root.is_dir() or zipfile.is_zipfile(root)):
        problem = f"{path}: images_root {images_root} is neither a folder nor a zip (looked for {root})"
        raise DataError(problem, "its path is relative to the spec file")
    return root


def _records(file: DataFile, unit: Unit | None, join: Join | None) -> Iterator[Record | BadRow]:
    records = read_records(file, unit=unit)
    if join is None:
        return records
    return (join.joined(record) if isinstance(record, Record) else record for record in records)


def _shape(file: DataFile, sample: list[Record | BadRow], fields: Fields) -> Shape | None:
    """None where nothing of the file could be read."""
    records = [record for record in sample if isinstance(record, Record)]
    return find_shape(records, fields, source=file.name) if records else None


def _nothing(path: str, faults: list[BadRow]) -> DataError:
    if not faults:
        return DataError(f"{path} holds no records", "check the path, or leave the source out")
    return DataError(
        f"{path} holds no record that can be read; the first: {faults[0].place} {faults[0].reason}", "mend the file"
    )


def _join(path: str, files: tuple[DataFile, ...], base: Path, split: str) -> Join:
    others = find_files(path, base, split=split)
    column = _shared_id(path, files, others)
    partners: dict[str | int, Value | None] = {}
    for file in others:
        for record in read_records(file):
            at = record.value.get(column) if isinstance(record, Record) else None
            if isinstance(record, BadRow) or not isinstance(at, str | int):
                reason = record.reason if isinstance(record, BadRow) else f"has no {column}"
                raise DataError(
                    f"{file.name}:{record.number} {reason}, so it cannot be joined", "mend or remove this record"
                )
            partners[at] = None if at in partners else record.value
    return Join(path=path, column=column, partners=partners)


def _shared_id(path: str, files: tuple[DataFile, ...], others: tuple[DataFile, ...]) -> str:
    """An image's id is shared by all questions about it, so it names no record."""
    ours, theirs = _columns(files), _columns(others)
    shared = [name for name in ours if name in theirs and plain(name).endswith("id") and plain(name) != "imageid"]
    if len(shared) == 1:
        return shared[0]
    what = (
        f"{', '.join(shared)} are all ids that both have"
        if shared
        else f"no id column is in both: {', '.join(ours)}; {', '.join(theirs)}"
    )
    raise DataError(
        f"{path} cannot be joined: {what}", "keep exactly one id column that both files have, such as question_id"
    )


def _columns(files: tuple[DataFile, ...]) -> list[str]:
    """Of the first records."""
    records = (record for file in files for record in read_records(file))
    names = (
        name
        for record in islice(records, _SAMPLE)
        if isinstance(record, Record)
        for name in record.value
        if is_given(record.value[name])
    )
    return list(dict.fromkeys(names))
