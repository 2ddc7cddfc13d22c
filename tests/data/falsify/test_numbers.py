import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.numbers import change_number, numbers_of
from finefit.data.falsify.words import shipped_words
from tests.data.falsify.corpus import context_of

WHOLE = st.integers(0, 10**9).map(str)
DECIMAL = st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 5)).map(
    lambda n: f"{n[0]}.{n[1]:0{n[2]}d}"
)
GROUPED = st.integers(1000, 10**9).map(lambda n: f"{n:,}")
NUMBERS = WHOLE | DECIMAL | GROUPED
BEHIND = st.sampled_from(("", "%", " %", " mg", "mg", "-fold", " patients"))


def _change(answer: str, seed: int = 0) -> Falsified | None:
    return change_number(answer, context_of(answer), random.Random(seed))


def _changes(answer: str) -> set[str]:
    return {change.text for seed in range(200) if (change := _change(answer, seed))}


@given(NUMBERS, BEHIND, st.integers(0, 99))
def test_a_changed_number_keeps_its_digits_decimals_separators_and_unit(number: str, behind: str, seed: int) -> None:
    answer = f"It was {number}{behind} in all."
    change = _change(answer, seed)
    if change is not None:
        assert change.text != answer
        assert float(change.after.replace(",", "")) != float(number.replace(",", ""))
        assert re.sub(r"\d", "9", change.text) == re.sub(r"\d", "9", answer)


@given(st.integers(1, 9999).map(str) | st.integers(1000, 10**7).map(lambda n: f"{n:,}"), st.integers(0, 99))
def test_a_number_stays_as_round_as_it_is(number: str, seed: int) -> None:
    change = _change(f"There were {number} of them.", seed)
    if change is not None and not 1900 <= int(number.replace(",", "")) <= 2050:
        assert len(change.after) - len(change.after.rstrip("0,")) == len(number) - len(number.rstrip("0,"))


def test_a_last_five_stays_one() -> None:
    changed = _changes("There were 45 of them.")
    assert changed == {f"There were {tens}5 of them." for tens in (1, 2, 3, 5, 6, 7, 8, 9)}


def test_nearly_every_number_can_be_changed() -> None:
    assert all(_change(f"There were {number} of them.") for number in range(1, 1000) if number not in (100,))


@given(st.integers(1900, 2050), st.integers(0, 99))
def test_a_year_stays_a_year(year: int, seed: int) -> None:
    change = _change(f"It began in {year}.", seed)
    assert change is not None
    assert 0 < abs(int(change.after) - year) <= 12
    assert 1900 <= int(change.after) <= 2050


@given(st.integers(1, 99), st.integers(0, 99))
def test_a_share_stays_at_most_a_hundred_percent(share: int, seed: int) -> None:
    change = _change(f"In {share}% it worked.", seed)
    assert change is None or 0 < int(change.after) < 100


def test_all_is_not_more_than_all() -> None:
    assert _changes("In 100% it worked.") == set()
    assert _changes("It was 140% of that.") != set()


@pytest.mark.parametrize("written", ["p<0.05", "P = 0.032", "p-value of 0.8", "p ≤ .001"])
def test_a_probability_stays_below_one(written: str) -> None:
    changed = _changes(f"It differed ({written}).")
    assert changed
    assert all(0 < float(re.findall(r"[\d.]*\d", text)[0]) < 1 for text in changed)


def test_the_ends_of_a_range_stay_in_order() -> None:
    for text in _changes("The age was 8 - 90 years."):
        low, high = map(int, re.findall(r"\d+", text))
        assert low < high
    ends = {tuple(re.findall(r"\d+\.\d", text)) for text in _changes("It was 58.2-64.6 there.")}
    assert {end[1] for end in ends} > {"64.6"}
    assert all(float(low) < float(high) for low, high in ends)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "L3 and HER2 and COVID-19",
            "on 2011-05-03",
            "at 10:30",
            "120/80",
            "version 1.2.3",
            "95% CI",
            "a 95 % confidence interval",
            "as shown [12]",
            "21st",
        ),
        *("no number",),
    ],
)
def test_names_dates_ratios_and_conventions_are_left_alone(text: str) -> None:
    assert numbers_of(text, shipped_words()) == ()


def test_a_number_that_stands_in_the_source_is_never_put_in() -> None:
    source = " ".join(f"{number}%" if number % 2 else str(number) for number in range(1, 10) if number != 6)
    changed = {change_number("It took 4 days.", context_of(source), random.Random(seed)) for seed in range(50)}
    assert {change.after for change in changed if change} == {"6"}


def test_a_number_moves_far_enough_to_matter_and_stays_plausible() -> None:
    values = [int(re.findall(r"\d+", text)[0]) for text in _changes("There were 423 of them.")]
    assert len(values) > 50
    assert all(141 <= value <= 1269 and abs(value - 423) >= 63 for value in values)
