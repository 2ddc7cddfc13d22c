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
from finefit.data.rows import BadRow, Kind, Row
from finefit.data.sources import open_source
from finefit.errors import DataError, FinefitError
from finefit.spec.data import Source

_MAX_ROWS = 50_000
"""Rows that are looked at; a larger file is judged by its first ones."""
_TEST_NAMES = ("test", "val", "valid", "validation", "dev", "eval")
_SHORT_WORDS, _LONG_WORDS = 5, 60
_TASKS_OF_SHAPES = {"AMR": "amr", "QMSum": "qmsum", "TruthfulQA": "truthfulqa"}
_LETTERS_PER_TOKEN = 3.0
"""Fewer than English has, so that lengths are rather too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """`path`: as the user wrote it."""

    path: str
    shape: str
    mapping: dict[str, str]
    kind: Kind
    rows: int
    is_whole: bool
    """Whether all rows were looked at."""
    bad: tuple[str, ...]
    """The first rows that cannot be used, with reasons."""
    num_bad: int
    letters: tuple[int, ...]
    """Of each row, prompt and answer together."""
    answer_letters: int
    """At the median."""
    has_images: bool
    repeated: int
    """Rows whose prompt an earlier row has."""
    task: str | None
    """The metric that fits the answers; None if answers cannot be scored."""
    why: str
    where: dict[str, Any]
    """Selects the good answers among judged ones."""
    test: str | None
    """A file beside it that looks like its test rows."""
    shared_with_test: int = 0
    """Test rows whose prompt is also in training."""

    def tokens(self, share: float) -> int:
        """The estimated tokens of the row that is longer than this share of all."""
        ordered = sorted(self.letters)
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] / _LETTERS_PER_TOKEN) + 32


def look_at(path: str, base: Path) -> DataFile:
    """Raises a DataError that says what is wrong with a file that cannot be trained on."""
    source = Source(path=path)
    reader = open_source(source, base, split="train")
    found = list(islice(reader.rows(), _MAX_ROWS + 1))
    rows = [row for row in found[:_MAX_ROWS] if isinstance(row, Row)]
    bad = [row for row in found[:_MAX_ROWS] if isinstance(row, BadRow)]
    if not rows:
        first = f"; the first: {bad[0].place} {bad[0].reason}" if bad else ""
        raise DataError(f"{path} holds no row that can be trained on{first}", "fix the file, or name another")
    shape = reader.shapes[0]
    where: dict[str, Any] = {}
    if rows[0].kind == "judged":
        where = {shape.parts["label"].name: shape.good}
        rows = [row for row in rows if row.is_good] or rows
    prompts = Counter(_prompt(row) for row in rows)
    task, why = _task(rows, shape.name)
    test = _test_beside(path, base)
    return DataFile(
        path=path,
        shape=shape.name,
        mapping=dict(shape.mapping),
        kind=rows[0].kind,
        rows=len(rows),
        is_whole=len(found) <= _MAX_ROWS,
        bad=tuple(f"{row.place} {row.reason}" for row in bad[:3]),
        num_bad=len(bad),
        letters=tuple(_letters(row) for row in rows),
        answer_letters=round(statistics.median(len(row.answer or row.text) for row in rows)),
        has_images=any(row.images for row in rows),
        repeated=0 if rows[0].kind == "text" else sum(prompts.values()) - len(prompts),
        task=task,
        why=why,
        where=where,
        test=test,
        shared_with_test=_shared(prompts, test, base) if test else 0,
    )


def _letters(row: Row) -> int:
    messages = sum(len(message.content) for message in (*row.messages, *row.rejected))
    return messages + len(row.text) + len(row.tools)


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
    words = statistics.median(len(answer.split()) for answer in answers)
    if words <= _SHORT_WORDS:
        return "exact_match", f"answers have {words:.0f} words at the median"
    name = "rouge" if words >= _LONG_WORDS else "chrf"
    return name, f"answers are texts of {words:.0f} words at the median"


def _is_json(answer: str) -> bool:
    if not answer.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


def _test_beside(path: str, base: Path) -> str | None:
    """Looks for `test.jsonl` beside `train.jsonl`, or `x_test.csv` beside `x_train.csv`."""
    file = base / path
    if not file.is_file() or "train" not in plain(file.name):
        return None
    for name in _TEST_NAMES:
        for written in ("train", "training"):
            other = file.with_name(file.name.replace(written, name))
            if other != file and other.is_file():
                return (Path(path).parent / other.name).as_posix()
    return None


def _shared(prompts: Counter[str], test: str, base: Path) -> int:
    try:
        rows = open_source(Source(path=test), base, split="test").rows()
    except FinefitError:
        return 0
    return sum(isinstance(row, Row) and _prompt(row) in prompts for row in islice(rows, _MAX_ROWS))
