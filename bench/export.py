"""A trained run in several formats: how far each is from what was trained, what it scores in the run's task when another
program answers, how large it is, and how long it takes.

    finefit demo && python -m bench.export runs/demo-1 bench/results/export.json    # on a CPU: a quarter of an hour
    python -m bench.export runs/demo-1 bench/results/export.json gguf:q6_k  # only these are made, and added or replaced

Every test row of the run is asked. Formats that are refused are in the result, too, with the reason.
"""  # noqa: E501

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finefit.artifacts.processes import chosen_variables

os.environ |= chosen_variables(os.environ, deterministic=False)  # before torch starts, as `finefit export` has them

from finefit import api
from finefit.artifacts.export_records import ExportedFormat, ExportReport
from finefit.facts.machine import count_cores, read_cpu_model
from finefit.stats.intervals import Interval

FORMATS = ("adapter", "merged:fp32", "merged:bf16", "gguf:bf16", "gguf:q8_0", "gguf:q4_k_m", "gguf-lora")
ALL_ROWS = 1000
"""More prompts than a demonstration has test rows."""


def collected(report: ExportReport) -> dict[str, Any]:
    return {
        "model": report.name,
        "base": report.base,
        "parameters": report.parameters,
        "prompts": report.prompts,
        "answer_tokens": report.answer_tokens,
        "computed_in": report.computed_in,
        "machine": f"{count_cores()} cores, {read_cpu_model(Path('/proc/cpuinfo'))}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": report.versions,
        "formats": {one.format: row(one) for one in report.exports},
    }


def row(one: ExportedFormat) -> dict[str, Any]:
    assert one.distance is not None
    score = one.score
    return {
        "bytes": sum(one.files.values()),
        "make_seconds": round(one.seconds, 1),
        "proof_seconds": round(one.proof_seconds, 1),
        "peak_bytes": one.peak_bytes,
        "kl": interval(one.distance.kl),
        "kl_at_most": one.bound.kl,
        "agreement": interval(one.distance.agreement),
        "same_answers": sum(answers.are_equal for answers in one.answers),
        "score": None
        if score is None
        else {"metric": score.metric, "trained": interval(score.trained), "exported": interval(score.exported)},
        "loaded_by": one.loaded_by,
        "template_is_equal": one.template_is_equal,
        "stops_are_equal": one.stops_are_equal,
        "problems": list(one.problems),
    }


def interval(found: Interval) -> list[float]:
    """Value, low, high."""
    return [float(f"{value:.4g}") for value in (found.value, found.low, found.high)]


def main(run: Path, out: Path, formats: Sequence[str]) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        made = api.export(
            run,
            formats or FORMATS,
            Path(place, "export"),
            prompts=ALL_ROWS,
            with_modelfile=any(name.startswith("gguf:") for name in formats or FORMATS),
            accept=True,
            progress=lambda now: print(f"{time.perf_counter() - began:7.0f} s  {now.words}", flush=True),
        )
    found = collected(made.report)
    if formats and out.exists():
        found["formats"] = json.loads(out.read_text(encoding="utf-8"))["formats"] | found["formats"]
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
