"""What an evaluation of several models comes to: plain numbers for its record, and a line for each model."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from finefit.artifacts.evaluations import EvalResult, Score
from finefit.stats.metrics import Metric


def summary_of(scored: Mapping[str, Mapping[str, EvalResult]]) -> dict[str, Any]:
    """By model and task, in the order of the spec."""
    results = [result for found in scored.values() for result in found.values()]
    return {
        "models": list(scored),
        "scores": {name: {task: _scores(result) for task, result in found.items()} for name, found in scored.items()},
        "metrics": {result.task: [_metric(metric) for metric in result.definitions] for result in results},
        "loaded_bytes": _most(result.loaded_bytes for result in results),
        "peak_bytes": _most(result.peak_bytes for result in results),
    }


def _most(found: Iterable[int | None]) -> int | None:
    return max((one for one in found if one is not None), default=None)


def _scores(result: EvalResult) -> dict[str, Any]:
    found: dict[str, Any] = {"n": result.n, "available": result.available, "coverage": result.coverage}
    found["metrics"] = {name: _interval(score) for name, score in result.metrics.items()}
    found["warnings"] = list(result.warnings)
    if any(item.answered_by for item in result.items):
        found["answered_by"] = answered_by(result)
    return found


def answered_by(result: EvalResult) -> dict[str, int]:
    """How many items each expert answered, where a gate chose."""
    names = [item.answered_by for item in result.items if item.answered_by is not None]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _interval(score: Score) -> dict[str, float | None]:
    """An end that there is none of is None."""
    return {
        key: value if math.isfinite(value) else None
        for key, value in (("value", score.value), ("low", score.low), ("high", score.high))
    }


def _metric(metric: Metric) -> dict[str, str]:
    return {"name": metric.name, "unit": metric.unit, "better": metric.better}


def told(summary: dict[str, Any]) -> list[str]:
    """The tasks' own metrics, which are their first."""
    own = {task: metrics[0] for task, metrics in summary["metrics"].items() if metrics}
    width = max(map(len, summary["models"]))
    return [f"{name:<{width}}  {'; '.join(_of_model(found, own))}" for name, found in summary["scores"].items()]


def _of_model(found: dict[str, Any], own: dict[str, dict[str, str]]) -> list[str]:
    chosen = [
        ", ".join(f"{count} by {name}" for name, count in scores["answered_by"].items())
        for scores in found.values()
        if "answered_by" in scores
    ]
    return [*(_of_task(task, scores, own.get(task)) for task, scores in found.items()), *dict.fromkeys(chosen)]


def _of_task(task: str, scores: dict[str, Any], metric: dict[str, str] | None) -> str:
    """Some of lm-eval's metrics follow from no items and are defined nowhere."""
    name, unit = (metric["name"], metric["unit"]) if metric else (next(iter(scores["metrics"])), "number")
    value, low, high = (_shown(scores["metrics"][name][key], unit) for key in ("value", "low", "high"))
    called = name if name.startswith(task) else f"{task} {name}"
    return f"{called} {value} ({low} to {high}, n {scores['n']})"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    return f"{value:.1%}" if unit == "share" else f"{value:.3g}"
