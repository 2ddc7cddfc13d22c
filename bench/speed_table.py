"""The table of docs/performance.md, from bench/results/speed.json.

python bench/speed_table.py docs/performance.md     writes it between the marks in the document
"""

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "speed.json"
GIB = 2**30
BEGIN, END = "<!-- begin: bench/speed_table.py -->", "<!-- end: bench/speed_table.py -->"
GOALS: dict[str, tuple[float | None, float | None]] = {
    "4x2048, all layers recomputed, fp32 adapters": (39_000, 9.44),
    "4x2048, all layers recomputed, bf16 adapters": (39_000, 8.6),
    "4x2048, planned for a 24 GiB card, fp32 adapters": (48_000, 24),
    "4x2048, planned for a 24 GiB card, bf16 adapters": (48_000, 24),
    "1x8192, recomputed, fp32 adapters": (35_000, 9.44),
    "1x8192, recomputed, bf16 adapters": (35_000, 8.6),
    "1x512, fp32 adapters": (9_000, 7.35),
    "1x512, bf16 adapters": (9_000, 7.35),
    "4x2048 NF4 r=16, recomputed, fp32 adapters": (38_000, 5.86),
    "4x2048 NF4 r=16, recomputed, bf16 adapters": (38_000, 5.4),
    "whole Qwen2.5-7B r=128, 2048-token rows, 24 GiB cap, fp32 adapters": (10_500, 24),
    "whole Qwen2.5-7B r=128, 2048-token rows, 24 GiB cap, bf16 adapters": (10_500, 24),
    "Qwen3-4B r=16, one step of 262,144 tokens, 48 GiB cap": (None, 48),
    "DPO, Mistral-7B shape, NF4, pairs 2x1024, 12 GiB cap": (None, 11),
    "full fine-tune, 6 B parameters, 80 GiB cap, 8-bit AdamW": (None, 80),
    "full fine-tune, 6 B parameters, 80 GiB cap, AdamW inside backward": (None, 80),
}
"""Tokens a second at least, GiB at most."""


def misses(row: dict[str, Any]) -> list[str]:
    """What of its goal a row of ours does not reach."""
    fast, small = GOALS.get(row["case"], (None, None))
    slow = ["speed"] if fast is not None and row["tokens_per_second"] < fast else []
    return slow + (["memory"] if small is not None and row["reserved_bytes"] / GIB > small else [])


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | tool | tokens/s | goal | reserved GiB | predicted | goal | seconds a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        is_ours = row["tool"] == "finefit"
        fast, small = GOALS.get(row["case"], (None, None)) if is_ours else (None, None)
        cells = (
            row["case"],
            f"**{row['tool']}**" if is_ours else row["tool"],
            f"{row['tokens_per_second']:,.0f}",
            f"{fast:,}" if fast else "",
            f"{row['reserved_bytes'] / GIB:.2f}",
            f"{row['predicted_reserved_bytes'] / GIB:.2f}" if is_ours else "",
            f"{small}" if small else "",
            f"{row['step_seconds']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rendered(text: str, rows: list[dict[str, Any]]) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(table(rows)) + "\n" + END + after


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(
        rendered(document.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8"
    )
