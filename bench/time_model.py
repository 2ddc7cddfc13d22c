"""Predicted against measured time of every step that the committed results measured on a card.

    python -m bench.time_model rehearse WORK.json [NAME...]    counts kernels and operations of each, about 25 minutes
    python -m bench.time_model fit WORK.json                   calibrates the constants of `finefit.rehearse.cost_model`
    python -m bench.time_model report WORK.json OUT.json       predicts all with the constants that ship

Configurations are divided by shape. `fit` sees those of calibration alone; the held-out ones say how far the model
carries. `report` keeps the predictions of the model before it (`earlier_seconds`), and writes today's beside the
measurements in memory.json, moe.json and speed.json, whose bytes it leaves as they are.
"""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bench.memory
import bench.moe
import bench.speed
from finefit.plan.target import rates_of
from finefit.rehearse import cost_model
from finefit.rehearse.cost_model import step_seconds
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.trace import Cost, Trace

RESULTS = Path(__file__).parent / "results"
HELD_OUT = frozenset(
    {"mistral-7b-v0.3", "gemma-3-4b", "mixtral", "qwen2-0.5b-of-2", "deepseek-v2-lite", "qwen3-next"}
    | {"llava-1.5-7b", "smolvlm-2b", "paligemma-3b-448"}
)
"""Shapes that the fit never sees. Preferences with a reference in the same model, and most of 4 and 8 bits, are among
them alone."""
Work = dict[str, Any]
"""For each phase the kernels and the operations of a step."""
_SHARES = ("MATRIX_SHARE", "ATTENTION_SHARE", "BANDWIDTH_SHARE")
_LIMITS = {"BANDWIDTH_SHARE": (0.75, 0.9), "MATRIX_SHARE": (0.7, 1.0), "ATTENTION_SHARE": (0.5, 0.8)}
_PRIOR = 0.05
"""Weight of the constants' present values, by the logarithm of the change: what no step determines stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    name: str
    file: str
    shape: str
    cfg: StepConfig
    seconds: float
    predicted_seconds: float
    """As the file has it."""

    @property
    def is_held_out(self) -> bool:
        return self.shape in HELD_OUT


def measured() -> Iterator[Measured]:
    memory = {row["config"]: row for row in _rows("memory.json")}
    mixtures = {row["config"]: row for row in _rows("moe.json")}
    speed = {row["case"]: row for row in _rows("speed.json") if row["tool"] == "finefit"}
    sources = (("memory.json", bench.memory.CASES, memory, "measured"), ("moe.json", bench.moe.CASES, mixtures, "even"))
    for file, cases, rows, key in sources:
        for case in (case for case in cases if case.name in rows):
            row = rows[case.name]
            seconds, predicted = row[key]["step_seconds"], row["predicted"]["step_seconds"]
            yield _measured(file, case, seconds, predicted)
    for one in (one for one in bench.speed.CASES if one.name in speed):
        yield _measured("speed.json", one, speed[one.name]["step_seconds"], speed[one.name]["predicted_seconds"])


def _rows(file: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / file).read_text())
    rows: list[dict[str, Any]] = found["cases"] if isinstance(found, dict) else found
    return rows


def _measured(file: str, case: Any, seconds: float, predicted: float) -> Measured:
    return Measured(
        name=case.name, file=file, shape=case.shape, cfg=case.cfg, seconds=seconds, predicted_seconds=predicted
    )


def rehearse(out: Path, parts: Sequence[str]) -> None:
    found = json.loads(out.read_text()) if out.exists() else {}
    for one in measured():
        if parts and not any(part in one.name for part in parts):
            continue
        began, trace = time.perf_counter(), rehearse_extrapolated(one.cfg).trace
        found[f"{one.file} {one.name}"] = work_of(trace)
        print(f"{one.name:75} {time.perf_counter() - began:6.1f} s", flush=True)
        out.write_text(json.dumps(found) + "\n")


def work_of(trace: Trace) -> Work:
    costs: dict[str, Counter[Cost]] = {}
    operations: dict[str, Counter[str]] = {}
    for (phase, _), kernels in trace.costs.items():
        costs.setdefault(phase, Counter()).update(kernels)
    for (phase, _), kinds in trace.operations.items():
        operations.setdefault(phase, Counter()).update(kinds)
    return {
        phase: {"costs": [[*cost, count] for cost, count in costs.get(phase, {}).items()], "ops": kinds}
        for phase, kinds in operations.items()
    }


def trace_of(work: Work) -> Trace:
    return Trace(
        costs={
            (phase, 0): Counter(
                {Cost(flops, size, bool(half), bool(attention)): n for flops, size, half, attention, n in part["costs"]}
            )
            for phase, part in work.items()
        },
        operations={(phase, 0): Counter(part["ops"]) for phase, part in work.items()},
    )


def fit(path: Path) -> None:
    """Prints the constants with the least error on the shapes of calibration."""
    from scipy.optimize import least_squares

    known = json.loads(path.read_text())
    cases = [(trace_of(known[key]), one) for one in measured() if (key := f"{one.file} {one.name}") in known]
    used = [(trace, one) for trace, one in cases if not one.is_held_out]
    kinds = list(cost_model.HOST_SECONDS)
    start = np.log([*cost_model.HOST_SECONDS.values(), cost_model.STEP_SECONDS, cost_model.KERNEL_SECONDS])
    start = np.append(start, np.log([getattr(cost_model, name) for name in _SHARES]))
    wide = [(value - math.log(8), value + math.log(8)) for value in start[: -len(_SHARES)]]
    limits = np.array([*wide, *(np.log(_LIMITS[name]) for name in _SHARES)])

    def take(values: Any) -> None:
        constants = np.exp(values).tolist()
        cost_model.HOST_SECONDS.update(zip(kinds, constants, strict=False))
        cost_model.STEP_SECONDS, cost_model.KERNEL_SECONDS = constants[len(kinds) : len(kinds) + 2]
        for name, value in zip(_SHARES, constants[-len(_SHARES) :], strict=True):
            setattr(cost_model, name, value)

    def errors(values: Any) -> Any:
        take(values)
        off = [math.log(step_seconds(trace, RATES) / one.seconds) for trace, one in used]
        return np.array([*off, *(_PRIOR * (values - start))])

    found = least_squares(errors, start, bounds=limits.T, loss="soft_l1", f_scale=0.1, diff_step=1e-3)
    take(found.x)
    for name in ("STEP_SECONDS", "KERNEL_SECONDS", *_SHARES):
        print(f"{name} = {getattr(cost_model, name):.3g}")
    print({kind: float(f"{seconds:.2g}") for kind, seconds in cost_model.HOST_SECONDS.items()})
    for words, part in _divided([one for _, one in cases]).items():
        off = [step_seconds(trace, RATES) / one.seconds - 1 for trace, one in cases if one in part]
        print(words, summary(off))


def report(path: Path, out: Path) -> None:
    known, rows = json.loads(path.read_text()), list(measured())
    before = {(row["file"], row["config"]): row for row in json.loads(out.read_text())["cases"]} if out.exists() else {}
    found = []
    for one in rows:
        seconds = step_seconds(trace_of(known[f"{one.file} {one.name}"]), RATES)
        earlier = before.get((one.file, one.name), {}).get("earlier_seconds", one.predicted_seconds)
        found.append(
            {
                "config": one.name,
                "file": one.file,
                "shape": one.shape,
                "is_held_out": one.is_held_out,
                "measured_seconds": round(one.seconds, 5),
                "earlier_seconds": round(earlier, 5),
                "predicted_seconds": round(seconds, 5),
                "earlier_error": round(earlier / one.seconds - 1, 4),
                "error": round(seconds / one.seconds - 1, 4),
            }
        )
    parts = {
        words: {
            key: summary([row[key] for row in found if words == "all" or row["is_held_out"] == (words == "held out")])
            for key in ("earlier_error", "error")
        }
        for words in ("calibration", "held out", "all")
    }
    out.write_text(json.dumps({"card": "NVIDIA H200", "summary": parts, "cases": found}, indent=1) + "\n")
    renew({(row["file"], row["config"]): row["predicted_seconds"] for row in found})
    print(json.dumps(parts, indent=1))


def summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.15 for size in sizes)
    return {
        "num": len(sizes),
        "mean": round(statistics.mean(sizes), 4),
        "worst": round(max(sizes), 4),
        "within_15": within,
    }


def renew(seconds: dict[tuple[str, str], float]) -> None:
    """Writes the predictions of today into the files of the measurements; everything else stays."""
    for file in ("memory.json", "moe.json", "speed.json"):
        found = json.loads((RESULTS / file).read_text())
        for row in found["cases"] if isinstance(found, dict) else found:
            told = seconds.get((file, row.get("config", row.get("case"))))
            if told is not None and "predicted" in row:
                row["predicted"]["step_seconds"] = told
            elif told is not None and row["tool"] == "finefit":
                row["predicted_seconds"] = told
        (RESULTS / file).write_text(json.dumps(found, indent=1) + "\n")


def _divided(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    return {
        "calibration": [one for one in rows if not one.is_held_out],
        "held out": [one for one in rows if one.is_held_out],
    }


assert bench.memory.KIND is not None
RATES = rates_of(bench.memory.KIND)


def main() -> None:
    match sys.argv[1:]:
        case ["rehearse", out, *parts]:
            rehearse(Path(out), parts)
        case ["fit", path]:
            fit(Path(path))
        case ["report", path, out]:
            report(Path(path), Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
