"""Preference pairs that a tiny model can learn: one digit is preferred to another, whatever is asked."""

import random
import re
from pathlib import Path
from typing import Any

from tests.conftest import SPEC, make_model_folder, write_jsonl

DPO = (
    re.sub(r"evaluate: .*\n", "", SPEC).replace("  test: {path: test.jsonl}\n", "").replace("epochs: 2", "epochs: 3")
    + "objective: {kind: dpo}\n"
)
"""18 steps with dropout, a checkpoint every 3, of which 2 are kept."""


def make_pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Sides of unequal length."""
    chance = random.Random(seed)
    return [
        {
            "prompt": f"say {chance.randrange(1000)}" + " please" * chance.randrange(6),
            "chosen": "7" * chance.randrange(1, 9),
            "rejected": "2" * chance.randrange(1, 9),
        }
        for _ in range(count)
    ]


def make_pairs_project(folder: Path, *, spec: str = DPO, rows: int = 22, dropout: float = 0.1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_model_folder(folder / "model", dropout=dropout)
    write_jsonl(folder / "train.jsonl", make_pairs(rows))
    write_jsonl(folder / "validation.jsonl", make_pairs(4, seed=1))
    path = folder / "spec.yaml"
    path.write_text(spec, encoding="utf-8")
    return path
