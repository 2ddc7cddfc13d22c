"""A number of the answer becomes another one of the same form: digits, decimals, separators, sign, unit and roundness stay, years stay years."""

import math
import random
import re
from dataclasses import dataclass
from functools import lru_cache

from finefit.data.falsify.corpus import Context
from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.words import Words

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.?[0-9]+)"
_NUMBER = re.compile(rf"(?<![\w.,/:\[#])(?<![^\W\d][-–]){_DIGITS}(?![.,:/]\d)(?!\d)")
_RANGE = re.compile(rf"(?P<low>{_DIGITS})(?P<sign>\s?%)?\s?(?:-|–|to)\s?(?P<high>{_DIGITS})")
_BEHIND = re.compile(r"(?P<percent>\s?%)|-?(?P<unit>[A-Za-z]+)")
_FOLLOWS = re.compile(r"\s?%?\s*([A-Za-z]+)")
_DATE = re.compile(r"\d+[-/]\d+[-/]\d+")
_TRIES = 60
_YEARS = range(1900, 2051)
_LEAST_CHANGE = 0.15
_FARTHEST = 3.0
"""Times, up or down: a number stays plausible for what it counts."""


@dataclass(frozen=True, slots=True)
class Number:
    text: str
    at: int
    least: float
    most: float
    """A new value stays between these: a share is at most 100, and the ends of a range stay in their order."""
    is_year: bool

    @property
    def value(self) -> float:
        return _value(self.text)


def change_number(answer: str, context: Context, chance: random.Random) -> Falsified | None:
    numbers = numbers_of(answer, context.words)
    for number in chance.sample(numbers, len(numbers)):
        for _ in range(_TRIES):
            other = _changed(number, chance)
            if other is not None and not context.source.holds(other) and not context.source.holds(f"{other}%"):
                return Falsified(answer=answer, rule="number", before=number.text, after=other, at=number.at)
    return None


@lru_cache(maxsize=64)
def numbers_of(text: str, words: Words) -> tuple[Number, ...]:
    """Those that say how much, how many or when; not those of names, dates and confidence levels."""
    within_dates = {at for found in _DATE.finditer(text) for at in range(*found.span())}
    ranges = _ranges(text)
    found = (
        _number(text, match, ranges, words) for match in _NUMBER.finditer(text) if match.start() not in within_dates
    )
    return tuple(number for number in found if number is not None)


def _ranges(text: str) -> dict[int, tuple[float, float]]:
    """By the place of each end of a range, between what values it keeps the order."""
    bounds: dict[int, tuple[float, float]] = {}
    for span in _RANGE.finditer(text):
        low, high = (_value(span[name]) for name in ("low", "high"))
        if low < high:
            bounds[span.start("low")], bounds[span.start("high")] = (0.0, high), (low, math.inf)
    return bounds


def _number(text: str, found: re.Match[str], ranges: dict[int, tuple[float, float]], words: Words) -> Number | None:
    behind = _BEHIND.match(text, found.end())
    unit = (behind["unit"] or "").lower() if behind else ""
    follows = _FOLLOWS.match(text, found.end())
    if (unit and unit not in words.numbers.units) or (follows and follows[1].lower() in words.numbers.fixed):
        return None
    value = _value(found[0])
    least, most = ranges.get(found.start(), (0.0, math.inf))
    is_percent = bool(behind and behind["percent"])
    if is_percent and value <= 100:
        most = min(most, 100.0)
    is_year = value in _YEARS and found[0].isdecimal() and not is_percent and not unit
    return Number(found[0], found.start(), least, most, is_year)


def _changed(number: Number, chance: random.Random) -> str | None:
    """None where the draw is no use."""
    if number.is_year:
        year = int(number.value) + chance.choice((-1, 1)) * chance.randint(1, 12)
        return str(year) if number.least < year < number.most and year in _YEARS else None
    other = _redrawn(number.text, chance)
    value, old = _value(other), number.value
    is_near = old == 0 or (max(value, old) <= _FARTHEST * min(value, old) and abs(value - old) >= _LEAST_CHANGE * old)
    return other if other != number.text and is_near and number.least < value < number.most else None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _redrawn(text: str, chance: random.Random) -> str:
    """Other digits between the leading and the trailing zeros, so that a probability stays below 1; a last 5 stays one, as in rounded numbers."""
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    telling = [at for at in digits if text[at] != "0"] or digits[-1:]
    first, last = telling[0], telling[-1]
    new = list(text)
    for at in digits:
        if first <= at <= last and not (at == last > first and text[at] == "5"):
            new[at] = chance.choice("123456789" if at in (first, last) else "0123456789")
    return "".join(new)
