import random
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finefit.negatives.balance import Counts, Sides, _area, audit, balance, fold_of, length_counts, take_evenly
from finefit.negatives.rules import Falsified, RuleName

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
        "the sides of the 200 pairs can be told apart by their number of characters (AUC 1.00, at most 0.6"
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
    assert "can be told apart by single words" in found.warnings[0]


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
    assert {fold_of(str(row)) for row in range(200)} == {0, 1, 2, 3, 4}


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
        "29 pairs are too few to say whether their sides can be told apart by length or words; 30 or more are needed",
    )


def test_nothing_is_told_of_no_pairs() -> None:
    assert audit([], MEASURES) is None


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_the_area_is_the_share_of_couples_in_order(above: list[int], below: list[int]) -> None:
    couples = [(a > b) + 0.5 * (a == b) for a in above for b in below]
    assert abs(_area(np.array(above, float), np.array(below, float)) - sum(couples) / len(couples)) < 1e-12


OPTION = st.dictionaries(st.sampled_from("abc"), st.integers(-3, 3).map(float), max_size=3)
CHOICES = st.lists(st.lists(OPTION, min_size=1, max_size=3), min_size=1, max_size=5)
LENGTHS = {"characters": len}


def _cost(choices: list[list[Counts]], taken: tuple[int, ...] | list[int], target: float) -> float:
    totals = {
        name: sum(options[at].get(name, 0.0) for options, at in zip(choices, taken, strict=True)) for name in "abc"
    }
    return sum((total - (target if name == "a" else 0)) ** 2 for name, total in totals.items())


@given(CHOICES, st.integers(-4, 4))
def test_no_single_other_choice_would_be_better(choices: list[list[Counts]], target: int) -> None:
    taken = balance(choices, targets={"a": target}, weights=dict.fromkeys("abc", 1.0), chance=random.Random(0))
    for choice, options in enumerate(choices):
        others = [[*taken[:choice], at, *taken[choice + 1 :]] for at in range(len(options))]
        assert _cost(choices, taken, target) <= min(_cost(choices, other, target) for other in others)
    assert _cost(choices, taken, target) >= min(
        _cost(choices, other, target) for other in product(*(range(len(options)) for options in choices))
    )


def test_longer_and_shorter_come_out_even_at_every_size() -> None:
    choices: list[list[Counts]] = [
        [{"all": 1.0, size: 1.0}, {"all": -1.0, size: -1.0}] for size in ("small", "large") for _ in range(50)
    ]
    taken = balance(choices, targets={}, weights={"all": 1.0, "small": 1.0, "large": 1.0}, chance=random.Random(1))
    for size in ("small", "large"):
        assert sum(options[at].get(size, 0) for options, at in zip(choices, taken, strict=True)) in (-2, 0, 2)


def test_what_has_no_weight_decides_nothing() -> None:
    options: list[Counts] = [{"a": 100.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    assert balance([options], targets={}, weights={"b": 1.0}, chance=random.Random(0)) == [0]


def test_lengths_count_by_sign_and_by_size() -> None:
    assert length_counts("12345678", "1234", LENGTHS) == {("characters", 0): -1.0, ("characters", 4): -1.0}
    assert length_counts("1", "123456", LENGTHS) == {("characters", 0): 1.0, ("characters", 8): 1.0}
    assert length_counts("ab", "cd", LENGTHS) == {}


def _change(row: int, rule: RuleName, before: str, after: str) -> Falsified:
    answer = f"{row} {before}"
    return Falsified(answer=answer, rule=rule, before=before, after=after, at=len(str(row)) + 1)


def test_rules_come_in_their_shares() -> None:
    options = {
        str(row): [_change(row, "entity", f"x{row}", f"y{row}"), _change(row, "number", f"1{row}", f"2{row}")]
        for row in range(100)
    }
    taken = take_evenly(options, shares={"entity": 3.0, "number": 1.0}, per_row=1, lengths=LENGTHS, seed=0)
    assert sum(change.rule == "entity" for changes in taken.values() for change in changes) == 75


def test_no_word_stands_on_one_side_much_more_often_than_a_coin_would_have_it() -> None:
    denied = [(verb, f"{verb} not") for verb in ("is", "was", "are")]
    options = {
        str(row): [_change(row, "negation", *change) for change in (*denied, ("is not", "is"))] for row in range(400)
    }
    leanings = []
    for seed in range(10):
        taken = take_evenly(options, shares={"negation": 1.0}, per_row=1, lengths={}, seed=seed)
        leanings.append(
            sum(1 if change.after.endswith("not") else -1 for changes in taken.values() for change in changes)
        )
    assert max(map(abs, leanings)) <= 4 * 20
    assert len(set(leanings)) > 4


def test_several_pairs_of_a_row_are_made_by_different_rules() -> None:
    options = {
        str(row): [_change(row, "entity", "x", "y"), _change(row, "number", "1", "2"), _change(row, "number", "1", "3")]
        for row in range(10)
    }
    taken = take_evenly(options, shares={"entity": 1.0, "number": 1.0}, per_row=2, lengths=LENGTHS, seed=0)
    assert all(sorted(change.rule for change in changes) == ["entity", "number"] for changes in taken.values())
