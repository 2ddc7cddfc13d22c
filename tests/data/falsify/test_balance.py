import random
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.balance import Counts, balance
from finefit.data.falsify.even import length_counts, take_evenly
from finefit.data.falsify.falsified import Falsified, RuleName

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
