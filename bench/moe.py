"""Mixtures of experts: predicted against measured memory, with tokens spread over all experts and with all of
them sent to the same few.

python -m bench.moe bench/results/moe.json          on the card, about three minutes python -m bench.moe
bench/results/moe.json mixtral  only cases whose name has this part, and only these are replaced in the result
"""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.memory import FULL, RATES, Case, alone, lora, measure, subset, versions
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import step_seconds
from finefit.rehearse.layer_kinds import rehearse_extrapolated

TWO, LARGE, MANY = "qwen2-0.5b-of-2", "mixtral", "qwen3-moe"
ROUTERS = subset("mlp.gate")
CASES: tuple[Case, ...] = (
    Case(shape=TWO, layers=24, tuning=FULL, rows=4, tokens=1024, loss_chunk=1024),
    Case(shape=TWO, layers=24, tuning=FULL, rows=8, tokens=1024, recompute=24, loss_chunk=1024, kernels="fused"),
    Case(shape=TWO, layers=24, tuning=ROUTERS, rows=8, tokens=1024, loss_chunk=1024),
    Case(shape=TWO, layers=24, tuning=FULL, rows=4, tokens=512, packing=True, loss_chunk=1024),
    Case(shape=LARGE, layers=2, tuning=FULL, rows=1, tokens=4096, recompute=2, loss_chunk=1024),
    Case(shape=LARGE, layers=8, tuning=lora(16), rows=2, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape=LARGE, layers=4, tuning=lora(16), rows=1, tokens=4096, loss_chunk=1024),
    Case(shape=LARGE, layers=4, tuning=ROUTERS, rows=2, tokens=2048, recompute=4, loss_chunk=1024),
    Case(shape=MANY, layers=2, tuning=FULL, rows=1, tokens=4096, recompute=2, loss_chunk=1024),
    Case(shape=MANY, layers=4, tuning=lora(16), rows=2, tokens=4096, loss_chunk=1024),
    Case(shape=MANY, layers=4, tuning=lora(16), rows=1, tokens=2048, precision="fp32"),
)


def predicted(case: Case) -> dict[str, Any]:
    trace = rehearse_extrapolated(case.cfg).trace
    answer = replay(trace.stream())
    return {
        "allocated_bytes": answer.allocated_bytes,
        "reserved_bytes": answer.reserved_bytes,
        "step_seconds": step_seconds(trace, RATES),
    }


def collapse(model: nn.Module) -> None:
    """Routers that have nothing to say: every token goes to the first experts."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()


def measured(case: Case, *, is_collapsed: bool) -> dict[str, Any]:
    return alone(partial(measure, case, adjust=collapse) if is_collapsed else partial(measure, case))


def off(found: dict[str, Any], told: dict[str, Any], key: str) -> str:
    return f"{told[key] / found[key] - 1:+.2%}" if key in found else "failed"


def renewed(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row has its own date, card and versions, so those that stay say what they were measured with. Cases that are
    no more are dropped."""
    known = {row["config"]: row for row in (*rows, found)}
    return [known[case.name] for case in CASES if case.name in known]


def main(out: Path, parts: Sequence[str]) -> None:
    rows = json.loads(out.read_text())["cases"] if out.exists() else []
    about = {"card": torch.cuda.get_device_name(), "versions": versions()}
    for case in (case for case in CASES if not parts or any(part in case.name for part in parts)):
        expected = predicted(case)
        taken = {name: measured(case, is_collapsed=name == "collapsed") for name in ("even", "collapsed")}
        date = datetime.now(UTC).date().isoformat()
        rows = renewed(rows, {"config": case.name, "date": date, **about, "predicted": expected, **taken})
        for name, found in taken.items():
            words = " ".join(
                f"{key.removesuffix('_bytes')} {off(found, expected, key)}"
                for key in ("allocated_bytes", "reserved_bytes", "step_seconds")
            )
            print(f"{case.name:60} {name:10} {words} {found.get('error', '')}", flush=True)
        out.write_text(json.dumps({"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
