"""Uncertainty of measured numbers."""

from finefit.stats.agreement import Agreement, Preference, kappa, preference, sign_test
from finefit.stats.differences import Difference, Spread, holm, paired, spread
from finefit.stats.intervals import Interval, wilson
from finefit.stats.scores import cautions, interval_of

__all__ = [
    "Agreement",
    "Difference",
    "Interval",
    "Preference",
    "Spread",
    "cautions",
    "holm",
    "interval_of",
    "kappa",
    "paired",
    "preference",
    "sign_test",
    "spread",
    "wilson",
]
