"""The tables and the plot of docs/memory.md, from bench/results/memory.json and bench/results/cpu_memory.json.

python bench/memory_table.py docs/memory.md docs/memory.svg     writes both: the tables between the marks in the
document, and the plot
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "memory.json"
CPU_RESULTS = RESULTS.with_name("cpu_memory.json")
GIB = 2**30
BEGIN, END = "<!-- begin: bench/memory_table.py -->", "<!-- end: bench/memory_table.py -->"
CPU_BEGIN, CPU_END = "<!-- begin: bench/cpu_memory.py -->", "<!-- end: bench/cpu_memory.py -->"


def errors(rows: list[dict[str, Any]], predicted: str, measured: str) -> list[float]:
    return [row["predicted"][predicted] / row["measured"][measured] - 1 for row in rows]


def by_component(rows: list[dict[str, Any]]) -> list[str]:
    """What a card shows apart: weights and adapters, which are there before the first step, and all that the steps
    add."""
    held = [(sum(row["predicted"]["components"].get(name, 0) for name in ("weights", "adapters")), row) for row in rows]
    loaded = [abs(known / row["measured"]["loaded_bytes"] - 1) for known, row in held]
    added = [
        abs(
            (row["predicted"]["allocated_bytes"] - known)
            / (row["measured"]["allocated_bytes"] - row["measured"]["loaded_bytes"])
            - 1
        )
        for known, row in held
    ]
    return [
        f"| of allocated, weights and adapters: mean / largest | | {statistics.mean(loaded):.3%} / {max(loaded):.3%} |",
        (
            "| of allocated, what the steps add (activations, gradients, optimizer and the rest) | | "
            f"{statistics.mean(added):.3%} / {max(added):.3%} |"
        ),
    ]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    allocated, reserved = (list(map(abs, errors(rows, key, key))) for key in ("allocated_bytes", "reserved_bytes"))
    peak = errors(rows, "peak_bytes", "device_bytes")
    capped = [row["capped"] for row in rows if row["capped"]]
    died = sum(not limits["fits"] for limits in capped)
    lowered = [limits["does not fit"] for limits in capped if "does not fit" in limits]
    lived = sum(lowered)
    return [
        "| figure | goal | measured |",
        "|---|---|---|",
        (
            f"| allocated: mean / largest absolute error | 0.1 % / 0.5 % | {statistics.mean(allocated):.3%} / "
            f"{max(allocated):.3%} |"
        ),
        *by_component(rows),
        (
            f"| reserved: mean / largest absolute error | 0.5 % / 2 % | {statistics.mean(reserved):.2%} / "
            f"{max(reserved):.2%} |"
        ),
        (
            f"| what the card must hold, below the truth | never | {sum(error < 0 for error in peak)} of "
            f"{len(rows)} (least {min(peak):+.2%}) |"
        ),
        f"| the same, above the truth, mean | 2 % | {statistics.mean(peak):.2%} |",
        f"| runs that were to fit under a limit just above the forecast, and died | none | {died} of {len(capped)} |",
        f"| runs that lived under a limit 3 % below the forecast of reserved memory | | {lived} of {len(lowered)} |",
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        (
            "| configuration | allocated GiB | error | reserved GiB | error | card GiB | forecast | seconds a step "
            "| error |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        off = {key: predicted[key] / measured[key] - 1 for key in ("allocated_bytes", "reserved_bytes", "step_seconds")}
        lines.append(
            f"| {row['config']} | {measured['allocated_bytes'] / GIB:.3f} | {off['allocated_bytes']:+.3%} "
            f"| {measured['reserved_bytes'] / GIB:.3f} | {off['reserved_bytes']:+.2%} "
            f"| {measured['device_bytes'] / GIB:.2f} | {predicted['peak_bytes'] / GIB:.2f} "
            f"| {measured['step_seconds']:.3f} | {off['step_seconds']:+.0%} |"
        )
    return lines


def plot(rows: list[dict[str, Any]]) -> str:
    """Forecast against truth, both in GiB on logarithmic axes; a point on the line is exact."""
    size, low, high = 420, 2.0, 64.0

    def at(value: float) -> float:
        return 50 + (size - 70) * (math.log(value / low) / math.log(high / low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" font-family="sans-serif" font-size="11">'  # noqa: E501
    ]
    parts.append(f'<rect width="{size}" height="{size}" fill="white"/>')
    for tick in (2, 4, 8, 16, 32, 64):
        x, y = at(tick), size - at(tick)
        parts.append(f'<path d="M{x:.1f} {size - 50} V20 M50 {y:.1f} H{size - 20}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{size - 34}" text-anchor="middle">{tick}</text><text x="44" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'  # noqa: E501
        )
    parts.append(f'<path d="M{at(low):.1f} {size - at(low):.1f} L{at(high):.1f} {size - at(high):.1f}" stroke="#888"/>')
    for row in rows:
        x, y = at(row["measured"]["device_bytes"] / GIB), size - at(row["predicted"]["peak_bytes"] / GIB)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#4c78a8" fill-opacity="0.7"><title>{row["config"]}</title></circle>'  # noqa: E501
        )
    parts.append(f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">GiB that the card reported</text>')
    parts.append(
        f'<text transform="translate(14 {size / 2}) rotate(-90)" text-anchor="middle">GiB predicted by the plan</text></svg>'  # noqa: E501
    )
    return "\n".join(parts) + "\n"


def tables(rows: list[dict[str, Any]]) -> str:
    return "\n".join([BEGIN, *summary(rows), "", *table(rows), END])


def cpu_table(result: dict[str, Any]) -> str:
    """A case without an evaluation has no figures of one."""
    lines = [
        f"{result['machine']}; torch {result['versions']['torch']}, transformers {result['versions']['transformers']}",
        "",
        "| configuration | training GiB | predicted | error | evaluation GiB | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in result["cases"].items():
        held = [case.get(what) for what in ("training", "evaluation")]
        cells = (
            f"{one['measured_bytes'] / GIB:.2f} | {one['predicted_bytes'] / GIB:.2f} | {one['error']:+.1%}"
            if one
            else "- | - | -"
            for one in held
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([CPU_BEGIN, *lines, CPU_END])


def _replaced(text: str, begin: str, end: str, new: str) -> str:
    return text.split(begin)[0] + new + text.split(end)[1]


def main() -> None:
    document, picture = map(Path, sys.argv[1:])
    rows = json.loads(RESULTS.read_text())
    text = _replaced(document.read_text(encoding="utf-8"), BEGIN, END, tables(rows))
    text = _replaced(text, CPU_BEGIN, CPU_END, cpu_table(json.loads(CPU_RESULTS.read_text())))
    document.write_text(text, encoding="utf-8")
    picture.write_text(plot(rows))


if __name__ == "__main__":
    main()
