"""Which model types finefit trains: python tools/make_model_table.py [docs/models.md]

Writes the document from bench/results/census.json, which `python bench/census.py bench/results/census.json` renews."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "bench/results/census.json", ROOT / "docs/models.md"
COLUMNS = {"lora": "LoRA", "full": "full", "four_bit": "4-bit", "packing": "packing"}
_PARTS = COLUMNS | {"kernels": "fused kernels"}
Entry = Mapping[str, Any]

_DOCUMENT = """\
# Model types

What finefit does with every type of causal language model that {transformers} has; the type is `model_type` in its
config.json. Each was built tiny, with random weights, and went the way of a real model
(`python bench/census.py bench/results/census.json`, {date}, {versions}; all rows are text).
`python tools/make_model_table.py` writes this page, and `tests/model/test_census.py` holds that it says what the code
does. Vision-language models have a page of their own: [vision.md](vision.md).

Of {num_types} types, {lora} train with LoRA, {full} in full, {four_bit} with LoRA on 4-bit weights, and {packing} with
packed rows.

- **LoRA**: the plan for a card finds a gradient for every adapter, a worker can load the model, the loss falls, no row
  depends on the rows beside it, plain transformers and peft load the saved adapter to the same probabilities, and the
  model answers a batch of prompts as it answers each alone.
- **full**: a plan, steps, and a saved model that plain transformers loads to the same probabilities.
- **4-bit**: a plan for a card, and steps on bitsandbytes' NF4 weights.
- **packing**: packed rows have the probabilities of the same rows alone. Where it says no, `data.packing: auto` pads.
- **fused kernels**: the operations that `levers.kernels: fused` replaces. Fused adapters have the gradients of plain
  ones; the other kernels need a card, and were not run.

A reason that names a place in the code is a failure of the probe, and not a message of finefit's.

{table}
"""


def document(found: Mapping[str, Any]) -> str:
    types = found["types"]
    versions = {name: f"{name} {version}" for name, version in found["versions"].items()}
    return _DOCUMENT.format(
        date=found["date"],
        transformers=versions["transformers"],
        versions=", ".join(versions.values()),
        num_types=len(types),
        table="\n".join(_table(types)),
        **{column: _counted(types, column) for column in COLUMNS},
    )


def _counted(entries: Iterable[Entry], column: str) -> int:
    return sum(entry[column].get("works", False) for entry in entries)


def _table(entries: Iterable[Entry]) -> list[str]:
    names = ["type", *_PARTS.values(), "reason if not"]
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *map(_row, entries)]


def _row(entry: Entry) -> str:
    works = ["yes" if entry[column].get("works") else "no" for column in COLUMNS]
    kernels = entry["kernels"].get("note") or ("none" if entry["kernels"].get("works") else "no")
    return f"| {entry['type']} | {' | '.join(works)} | {kernels} | {_reasons(entry)} |"


def _reasons(entry: Entry) -> str:
    places: dict[str, list[str]] = {}
    for column, words in _PARTS.items():
        if reason := entry[column].get("refused") or entry[column].get("fault"):
            places.setdefault(reason, []).append(words)
    said = []
    for reason, where in places.items():
        said.append(reason if len(where) == len(_PARTS) else f"{', '.join(where)}: {reason}")
    return "; ".join(said).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main(path: str = str(DOCUMENT)) -> None:
    Path(path).write_text(document(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
