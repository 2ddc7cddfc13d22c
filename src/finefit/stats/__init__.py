"""Uncertainty of measured numbers."""

from finefit.stats.intervals import Interval, bootstrap_mean, wilson

__all__ = ["Interval", "bootstrap_mean", "wilson"]
