"""A model of one's own for tests: the one that docs/custom.md shows, in a project with a tokenizer of bytes."""

import json
import re
from pathlib import Path
from typing import Any

from tests.conftest import make_rows, make_tokenizer, write_jsonl

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "custom.md"
CODE = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]  # type: ignore[index]
CONFIG = {"vocab_size": 260, "width": 16, "depth": 2, "dropped": 0.1}
SPEC: dict[str, Any] = {
    "name": "own",
    "seed": 7,
    "device": "cpu",
    "model": {
        "kind": "custom",
        "file": "my_model.py",
        "config": CONFIG,
        "tokenizer": {"kind": "folder", "path": "tokenizer"},
    },
    "tuning": {"kind": "lora", "rank": 4, "alpha": 8},
    "data": {
        "train": [{"path": "train.jsonl"}],
        "validation": {"path": "validation.jsonl"},
        "test": {"path": "test.jsonl"},
    },
    "optimizer": {"lr": 1e-2},
    "schedule": {"epochs": 2, "warmup": 0.1},
    "global_batch": 4,
    "levers": {"micro_batch": 2},
    "save": {"every": "3 steps", "keep": 2},
    "evaluate": [{"task": "json_match", "max_new_tokens": 8}],
}


def make_custom_project(folder: Path, *, code: str = CODE, rows: int = 22, **changes: Any) -> Path:
    """A spec with its model file, tokenizer and rows; returns the spec's path. `changes`: keys of the spec; None takes
    one away."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    make_tokenizer().save_pretrained(folder / "tokenizer")
    for name, count, seed in (("train", rows, 0), ("validation", 4, 1), ("test", 5, 2)):
        write_jsonl(folder / f"{name}.jsonl", make_rows(count, seed=seed))
    spec = {key: value for key, value in (SPEC | changes).items() if value is not None}
    path = folder / "spec.yaml"
    path.write_text(json.dumps(spec, indent=1), encoding="utf-8")  # which is YAML too
    return path
