"""An export as a test writes it by hand: files, the record of how they were proved, no model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finefit.artifacts.export_records import EXPORT, Bound, Distance, ExportedAdapter, ExportedFormat, ExportReport
from finefit.artifacts.records import write_record
from finefit.stats.intervals import Interval

DISTANCE = Distance(
    kl=Interval(value=2e-5, low=1e-5, high=3e-5, n=16),
    agreement=Interval(value=0.99, low=0.97, high=1.0, n=16),
    logits=1e-4,
    tokens=300,
)


def make_format(asked: str = "adapter", **changes: Any) -> ExportedFormat:
    values: dict[str, Any] = {
        "format": asked,
        "path": ".",
        "files": {},
        "loaded_by": "transformers 5.17.0",
        "distance": DISTANCE,
        "bound": Bound(kl=1e-3, agreement=0.95),
        "template_is_equal": True,
        "stops_are_equal": True,
        "answers": (),
        "problems": (),
        "seconds": 1.0,
        "proof_seconds": 2.0,
    }
    return ExportedFormat(**values | changes)


def make_report(*exports: ExportedFormat, **changes: Any) -> ExportReport:
    values: dict[str, Any] = {
        "finefit": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "name": "orders-1",
        "target": "runs/orders-1",
        "checkpoint": "checkpoint-6",
        "base": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_license": "apache-2.0",
        "adapter": ExportedAdapter(rank=12, alpha=24.0, targets=("q_proj", "v_proj")),
        "parameters": 139_399_488,
        "bits": None,
        "onto": None,
        "template": "{{ messages }}",
        "stop_tokens": {"<|im_end|>": 2},
        "prompts": 16,
        "prompts_from": "test",
        "answer_tokens": 300,
        "computed_in": "cpu fp32",
        "exports": exports or (make_format(),),
        "versions": {"finefit": "0.1.0", "transformers": "5.17.0"},
        "seconds": 5.0,
    }
    return ExportReport(**values | changes)


def make_export(folder: Path, files: Mapping[str, bytes], *, report: ExportReport | None = None) -> Path:
    """A folder with its export.json."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    write_record(folder / EXPORT, report or make_report(make_format(files=sizes)))
    return folder
