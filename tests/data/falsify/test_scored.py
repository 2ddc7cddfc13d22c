import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.scored import Sample, Scored, from_scored
from finefit.data.falsify.written import write_pairs
from finefit.data.read import open_source
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.spec.rows import Source


def _row(asked: str = "Why?", *, number: int = 1, tools: str = "") -> Row:
    return Row(
        source="a", number=number, messages=(Message("user", asked), Message("assistant", "Because.")), tools=tools
    )


def _samples(*scored: tuple[str, float]) -> list[Sample]:
    return [Sample(answer=answer, score=score) for answer, score in scored]


def _texts(found: Scored) -> list[tuple[str, str]]:
    return [(pair.chosen.answer, pair.rejected.answer) for pair in found.pairs]


def test_the_best_answer_is_preferred_to_the_worst() -> None:
    found = from_scored([(_row(), _samples(("fair", 0.5), ("good", 0.9), ("bad", 0.1)))], seed=0)
    assert _texts(found) == [("good", "bad")]
    assert (found.pairs[0].row.place, found.unused) == ("a:1", ())


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ((("one", 1.0),), "has 1 sampled answers, and a pair needs two"),
        ((("one", 1.0), ("two", 1.0)), "has scores from 1 to 1, which differ by no more than 0.2"),
        ((("one", 1.0), ("two", 0.85)), "has scores from 0.85 to 1, which differ by no more than 0.2"),
        (
            (("Same text.", 1.0), (" same  TEXT", 0.0)),
            "has a best and a worst answer that read the same, or one that is empty",
        ),
        ((("one", 1.0), (" ", 0.0)), "has a best and a worst answer that read the same, or one that is empty"),
    ],
)
def test_a_row_without_a_difference_is_not_used_and_says_why(
    samples: tuple[tuple[str, float], ...], reason: str
) -> None:
    found = from_scored([(_row(), _samples(*samples))], seed=0, margin=0.2)
    assert found.pairs == ()
    assert [(unused.place, unused.reason) for unused in found.unused] == [("a:1", reason)]


def test_among_equal_scores_those_are_taken_that_keep_lengths_even() -> None:
    rows = [
        (
            _row(f"Why {at}?", number=at),
            _samples((f"middle {at:03}", 1.0), (f"longermuch {at:03}", 0.0), (f"mi {at:03}", 0.0)),
        )
        for at in range(100)
    ]
    found = from_scored(rows, seed=0)
    assert found.audit is not None
    assert [(size.longer, size.shorter) for size in found.audit.sizes] == [(50, 50)]
    assert from_scored(rows[::-1], seed=0).pairs[::-1] == found.pairs


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match="a:1 has an answer whose score is no number"):
        from_scored([(_row(), _samples(("one", math.nan), ("two", 1.0)))], seed=0)


@given(
    st.dictionaries(
        st.text("ab", max_size=3), st.lists(st.tuples(st.text("xy ", max_size=3), st.integers(0, 2)), max_size=4)
    )
)
def test_pairs_and_unused_are_all_rows_also_of_files_that_are_called_alike(
    rows: dict[str, list[tuple[str, int]]],
) -> None:
    found = from_scored([(_row(asked), _samples(*samples)) for asked, samples in rows.items()], seed=0)
    assert len(rows) == len(found.pairs) + len(found.unused)
    assert all(pair.chosen.score > pair.rejected.score for pair in found.pairs)


def test_scored_pairs_are_read_as_pairs_with_the_tools_of_their_prompt(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    found = from_scored([(_row(tools=json.dumps(tools)), _samples(("good", 0.9), ("bad", 0.1)))], seed=0)
    write_pairs(tmp_path / "pairs.jsonl", found.pairs)
    (row,) = open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows()
    assert isinstance(row, Row)
    assert (row.kind, row.answer, row.rejected) == ("pair", "good", (Message("assistant", "bad"),))
    assert json.loads(row.tools) == tools
