"""Preference pairs: two answers to one prompt, the first of which is preferred. For the order of rows a pair is one row."""

from dataclasses import dataclass

from finefit.data.examples import Example


@dataclass(frozen=True, slots=True)
class Pair:
    chosen: Example
    rejected: Example
    reference: tuple[float, float] | None = None
    """Summed log-probabilities of both sides under the starting weights, where they were computed before the first step."""


Trained = Example | Pair
"""A row of the order."""
