"""What a row calls right and wrong."""

from finefit.data.rows import Row
from finefit.data.tasks.task import NoResult


def right_answers(row: Row) -> tuple[str, ...]:
    """The one trained on first."""
    return _distinct((row.answer, *row.references))


def wrong_answers(row: Row) -> tuple[str, ...]:
    return _distinct(row.wrong)


def _distinct(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def require_right(row: Row) -> None:
    if not right_answers(row):
        raise NoResult("the reference is empty")


def require_wrong(row: Row) -> None:
    require_right(row)
    if not wrong_answers(row):
        raise NoResult("it has no wrong answers to compare with; preference pairs and TruthfulQA's rows have them")
