import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.audit import Sides, _area, _fold, audit

MEASURES = {"characters": len}
VOCABULARY = [f"w{number}" for number in range(40)]


def _text(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(VOCABULARY, k=count))


def _sides(count: int, *, mark: str = "", more: int = 0) -> list[Sides]:
    chance = random.Random(0)
    return [
        Sides(row=str(row), chosen=_text(chance, 12), rejected=f"{_text(chance, 12 + more)} {mark}".strip())
        for row in range(count)
    ]


def test_sides_drawn_alike_cannot_be_told_apart() -> None:
    found = audit(_sides(400), MEASURES)
    assert found is not None
    assert found.words.worst < 0.6
    assert found.length["characters"].worst < 0.6
    assert found.warnings == ()
    assert sum(size.longer + size.shorter for size in found.sizes) <= found.pairs == 400


def test_a_wrong_side_that_is_always_longer_is_told_by_its_length() -> None:
    found = audit(_sides(200, more=3), MEASURES)
    assert found is not None
    assert found.length["characters"].within == 1
    assert sum(size.longer for size in found.sizes) == 200
    assert (
        "the sides of the 200 pairs can be told by their number of characters (AUC 1.00, at most 0.6"
        in found.warnings[0]
    )


def test_a_little_longer_in_every_pair_is_told_even_where_rows_differ_far_more() -> None:
    sides = [Sides(row=str(row), chosen="x" * (row * 10), rejected="x" * (row * 10 + 1)) for row in range(1, 200)]
    found = audit(sides, MEASURES)
    assert found is not None
    assert found.length["characters"].across < 0.6 < found.length["characters"].within == 1
    assert found.warnings


def test_a_template_is_told_by_its_words_though_lengths_are_even() -> None:
    chance = random.Random(0)
    sides = [
        Sides(row=str(row), chosen=_text(chance, 12) + " plain", rejected=_text(chance, 12) + " patie")
        for row in range(300)
    ]
    found = audit(sides, MEASURES)
    assert found is not None
    assert found.length["characters"].worst < 0.6
    assert min(found.words.within, found.words.across) > 0.9
    assert "can be told by single words" in found.warnings[0]


def test_what_only_one_row_teaches_is_not_asked_of_that_row() -> None:
    """Each row has a mark of its own on the wrong side, which no other row can have taught."""
    chance = random.Random(0)
    sides = [
        Sides(row=str(row), chosen=(text := _text(chance, 12)), rejected=f"{text} own{row}")
        for row in range(100)
        for _ in range(3)
    ]
    found = audit(sides, {"none": lambda _: 0})
    assert found is not None
    assert found.words.within == 0.5


def test_always_shorter_is_as_telling_as_always_longer() -> None:
    sides = _sides(200, more=3)
    found = [
        audit(some, MEASURES)
        for some in (sides, [Sides(row=side.row, chosen=side.rejected, rejected=side.chosen) for side in sides])
    ]
    assert found[0]
    assert found[1]
    assert found[0].length == found[1].length


def test_words_that_mislead_from_one_row_to_another_are_no_warning() -> None:
    """Each word is taken from one row and put into another."""
    sides = [Sides(row=str(row), chosen=f"w{row}", rejected=f"w{(row + 1) % 100}") for row in range(100)]
    found = audit(sides, MEASURES)
    assert found is not None
    assert found.words.within < 0.5
    assert found.warnings == ()


def test_rows_fall_into_all_folds() -> None:
    assert {_fold(str(row)) for row in range(200)} == {0, 1, 2, 3, 4}


def test_differences_are_counted_by_size_and_sign() -> None:
    lengths = [(5, 5), (5, 6), (5, 4), (5, 7), (5, 8), (5, 9), (5, 10), (20, 4)]
    found = audit(
        [Sides(row=str(at), chosen="x" * one, rejected="x" * other) for at, (one, other) in enumerate(lengths)],
        MEASURES,
    )
    assert found is not None
    assert [(size.up_to, size.longer, size.shorter) for size in found.sizes] == [
        (1, 1, 1),
        (2, 1, 0),
        (4, 2, 0),
        (8, 1, 0),
        (16, 0, 1),
    ]


def test_a_few_pairs_are_called_too_few() -> None:
    found = audit(_sides(29, more=3), MEASURES)
    assert found is not None
    assert found.warnings == (
        "29 pairs are too few to say whether their sides can be told by length or words; 30 or more are needed",
    )


def test_nothing_is_told_of_no_pairs() -> None:
    assert audit([], MEASURES) is None


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_the_area_is_the_share_of_couples_in_order(above: list[int], below: list[int]) -> None:
    couples = [(a > b) + 0.5 * (a == b) for a in above for b in below]
    assert abs(_area(np.array(above, float), np.array(below, float)) - sum(couples) / len(couples)) < 1e-12
