"""What a data file holds: its shape, rows, lengths, splits, and what a good answer looks like."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finefit.data.columns import plain
from finefit.data.files import find_files
from finefit.data.records import is_amr
from finefit.data.rows import BadRow, Kind, Row
from finefit.data.shapes import Shape
from finefit.data.sources import open_source
from finefit.errors import DataError, UserError
from finefit.spec.data import Data, Fields, Source

_MAX_ROWS = 50_000
"""Rows that are looked at; a larger file is judged by its first ones."""
_TEST_NAMES, _VALIDATION_NAMES = ("test", "eval"), ("validation", "valid", "val", "dev")
_CONFIGS = (".yaml", ".yml", ".toml", ".py", ".ipynb")
_SHORT_WORDS, _LONG_WORDS = 5, 60
_TASKS_OF_SHAPES = {"AMR": "amr", "QMSum": "qmsum", "TruthfulQA": "truthfulqa"}
_BYTES_PER_TOKEN = 3.0
"""Fewer than English has, so that lengths are rather too long; a Chinese character has three."""
_MAX_BAD_SHARE: float = Data.model_fields["drop_at_most"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedData:
    """`path`: as the user wrote it."""

    path: str
    fields: Fields
    """What the user said, or the whole document for a text file."""
    shape: str
    mapping: dict[str, str]
    kind: Kind
    rows: int
    is_whole: bool
    """Whether all rows were looked at."""
    bad: tuple[str, ...]
    """The first rows that cannot be used, with reasons."""
    num_bad: int
    """Of all splits."""
    bytes: tuple[int, ...]
    """Of each row, prompt and answer together."""
    answer_bytes: int
    """At the median."""
    longest_answer_bytes: int
    num_images: int
    """Of the row with the most."""
    repeated: int
    """Rows whose prompt an earlier row has."""
    task: str | None
    """The metric that fits the answers; None if answers cannot be scored."""
    why: str
    where: dict[str, Any]
    """Selects the good answers among judged ones."""
    validation: str | None
    test: str | None
    """Rows beside it, or in another split of it."""
    test_rows: int = 0
    shared: int = 0
    """Rows of validation and test whose prompt is also in training."""

    def tokens(self, share: float) -> int:
        """The estimated tokens of the row that is longer than this share of all."""
        ordered = sorted(self.bytes)
        return tokens_of(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def tokens_of(num_bytes: float) -> int:
    """Estimated, with the tokens of a chat template."""
    return round(num_bytes / _BYTES_PER_TOKEN) + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    shape: Shape
    usable: list[Row]
    bad: list[BadRow]
    is_whole: bool


def look_at(path: str, base: Path, fields: Fields | None = None) -> InspectedData:
    """Raises a DataError that says what is wrong with a file that cannot be trained on."""
    if path.lower().endswith(_CONFIGS):
        remedy = f"finefit init --from {path} translates a config of another tool; finefit plan {path} plans a spec"
        raise DataError(f"{path} is not a file of rows", remedy)
    if fields is None:
        fields = Fields(text="document") if _is_plain_text(path, base) else Fields()
    found = _read(Source(path=path, fields=fields), base, "train")
    rows, where = found.usable, {}
    if rows[0].kind == "judged":
        where = {found.shape.parts["label"].name: found.shape.good}
        rows = [row for row in rows if row.is_good] or rows
    validation, test = _held_out(path, base, "validation"), _held_out(path, base, "test")
    if test is None:  # rows that are scored say more than rows that only choose the checkpoint
        validation, test = None, validation
    others = {
        split: _read(Source(path=place, fields=fields), base, split)
        for split, place in (("validation", validation), ("test", test))
        if place is not None
    }
    prompts = Counter(_prompt(row) for row in rows)
    task, why = _task(rows, found.shape.name)
    bad = [row for one in (found, *others.values()) for row in one.bad]
    return InspectedData(
        path=path,
        fields=fields,
        shape=found.shape.name,
        mapping=dict(found.shape.mapping),
        kind=rows[0].kind,
        rows=len(rows),
        is_whole=found.is_whole,
        bad=tuple(f"{row.place} {row.reason}" for row in bad[:3]),
        num_bad=len(bad),
        bytes=tuple(_num_bytes(row) for row in rows),
        longest_answer_bytes=max(len((row.answer or row.text).encode()) for row in rows),
        answer_bytes=round(statistics.median(len((row.answer or row.text).encode()) for row in rows)),
        num_images=max(len(row.images) for row in rows),
        repeated=0 if rows[0].kind == "text" else sum(prompts.values()) - len(prompts),
        task=task,
        why=why,
        where=where,
        validation=validation,
        test=test,
        test_rows=len(others["test"].usable) if test else 0,
        shared=sum(_prompt(row) in prompts for one in others.values() for row in one.usable),
    )


def _read(source: Source, base: Path, split: str) -> _Rows:
    """A source that has more bad rows than a run lets pass is refused."""
    try:
        reader = open_source(source, base, split=split)
    except DataError as error:
        here = "; to finefit init, give them as --fields with quotes around the braces"
        raise DataError(error.problem, error.remedy + (here if "fields: {" in error.remedy else "")) from None
    found = list(islice(reader.rows(), _MAX_ROWS + 1))
    looked = found[:_MAX_ROWS]
    bad = [row for row in looked if isinstance(row, BadRow)]
    if len(bad) > _MAX_BAD_SHARE * len(looked):
        problem = f"{len(bad):,} of the {len(looked):,} rows of {source.path} cannot be used"
        remedy = "fix or remove these rows, or name another file"
        raise DataError(f"{problem}; the first: {bad[0].place} {bad[0].reason}", remedy)
    usable = [row for row in looked if isinstance(row, Row)]
    return _Rows(shape=reader.shapes[0], usable=usable, bad=bad, is_whole=len(found) <= _MAX_ROWS)


def _is_plain_text(path: str, base: Path) -> bool:
    files = find_files(path, base, split="train")
    return files[0].format == "text" and not is_amr(files[0])


def _num_bytes(row: Row) -> int:
    messages = (message.content for message in (*row.messages, *row.rejected))
    return sum(len(text.encode()) for text in (*messages, row.text, row.tools))


def _prompt(row: Row) -> str:
    return row.text or " ".join(message.content for message in row.prompt).strip().lower()


def _task(rows: Sequence[Row], shape: str) -> tuple[str | None, str]:
    """Returns the task that scores such answers, and why."""
    if (task := _TASKS_OF_SHAPES.get(shape)) is not None:
        return task, f"the rows are {shape}"
    if rows[0].kind == "text":
        return "perplexity", "plain text has no answers"
    if rows[0].kind == "pair":
        return "hallucination", "how often the rejected answer is likelier than the chosen one"
    answers = [row.answer for row in rows[:1000]]
    if all(_is_json(answer) for answer in answers):
        return "json_match", "every answer is JSON"
    words = round(statistics.median(len(answer.split()) for answer in answers))
    length = f"answers have {words} word{'' if words == 1 else 's'} at the median"
    if words <= _SHORT_WORDS:
        return "exact_match", length
    return "rouge" if words >= _LONG_WORDS else "chrf", length


def _is_json(answer: str) -> bool:
    if not answer.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


def _held_out(path: str, base: Path, split: str) -> str | None:
    """Looks for `test.jsonl` beside `train.jsonl`, or `x_test.csv` beside `x_train.csv`; in a folder or a dataset of
    the hub, for the files of the split."""
    file = base / path
    if not file.is_file():
        try:
            others = find_files(path, base, split=split)
        except UserError:
            return None
        return path if {one.path for one in others}.isdisjoint(_train_paths(path, base)) else None
    if "train" not in plain(file.name):
        return None
    for name in _TEST_NAMES if split == "test" else _VALIDATION_NAMES:
        for written in ("training", "train"):
            other = file.with_name(file.name.replace(written, name))
            if other != file and other.is_file():
                return (Path(path).parent / other.name).as_posix()
    return None


def _train_paths(path: str, base: Path) -> set[Path]:
    return {one.path for one in find_files(path, base, split="train")}
