"""How many of 100 intervals hold the truth: `python -m bench.intervals` prints the table of docs/compare.md; in
brackets the percentile bootstrap."""

import numpy as np

from finefit.stats import intervals
from finefit.stats.intervals import Numbers
from finefit.stats.metrics import Metric, combined, interval_of
from tests.stats.test_metrics import CASES, Draw

_SIZES = (10, 20, 50, 200)
_TRIALS = 1000
_DRAWS = 499


def _percentile(metric: Metric, table: Numbers, rng: np.random.Generator) -> tuple[float, float]:
    n = len(table)
    drawn = combined(metric, table[rng.integers(n, size=(_DRAWS, n))].sum(axis=1), n)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _held(metric: Metric, draw: Draw, n: int, truth: float, rng: np.random.Generator) -> str:
    ours = usual = 0
    for trial in range(_TRIALS):
        table = draw(rng, n)
        found, (low, high) = interval_of(metric, table, seed=trial), _percentile(metric, table, rng)
        ours, usual = ours + (found.low <= truth <= found.high), usual + (low <= truth <= high)
    return f"{100 * ours / _TRIALS:.1f} ({100 * usual / _TRIALS:.1f})"


def main() -> None:
    intervals.RESAMPLES = _DRAWS
    print(f"| items | {' | '.join(map(str, _SIZES))} |\n|{'---|' * (1 + len(_SIZES))}")
    for name, (metric, draw) in CASES.items():
        rng = np.random.default_rng(11)
        many = draw(rng, 1_000_000)
        truth = float(combined(metric, many.sum(axis=0), len(many)))
        print(f"| {name} | {' | '.join(_held(metric, draw, n, truth, rng) for n in _SIZES)} |", flush=True)


if __name__ == "__main__":
    main()
