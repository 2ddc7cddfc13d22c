"""An adapter merged into its base: a model folder that needs no peft, with the proof that it answers as base and adapter do."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts.pipelines import Order
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.trainings import Stage
from finefit.errors import ModelError
from finefit.model.adapter_files import CONFIG
from finefit.model.load import base_bits
from finefit.model.locate import locate
from finefit.model.merging import Merged, merge_adapter
from finefit.spec.stages import MergeAdapter

_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with the whole model, tokenizer and template along."""
    stage = order.stage
    assert isinstance(stage, MergeAdapter)
    adapter = _adapter(order, stage)
    base = locate(order.models["model"].model, Path(order.base))
    merged = merge_adapter(base.folder, adapter, out, dtype=_DTYPES[stage.precision])
    return {
        **asdict(merged),
        "base": base.name,
        "bits": _trained_bits(adapter),
        "warnings": list(_warnings(merged, _trained_bits(adapter))),
    }


def _adapter(order: Order, stage: MergeAdapter) -> Path:
    wired = order.models["model"]
    if stage.adapter is not None and wired.adapter is not None:
        raise ModelError(
            f"stage {order.name} names an adapter, and the model that it stands on has one already: {Path(wired.adapter).name}",
            "leave adapter out, or name the base as model",
        )
    found = wired.adapter if stage.adapter is None else str(Path(order.base) / stage.adapter)
    if found is None:
        raise ModelError(
            f"stage {order.name} merges an adapter, and its model has none",
            "name a stage that trains one, or a folder with adapter:",
        )
    if not (Path(found) / CONFIG).is_file():
        raise ModelError(
            f"{found} holds no {CONFIG}, so there is no adapter to merge",
            "name a folder with an adapter that peft can read",
        )
    return Path(found)


def _trained_bits(adapter: Path) -> int | None:
    """Of the base that it was trained on, where it is a checkpoint of ours; else nobody says."""
    record = StageDir(adapter.resolve().parent.parent).stage
    return base_bits(read_record(record, Stage).tuning) if record.is_file() else None


def _warnings(merged: Merged, bits: int | None) -> list[str]:
    found = []
    if bits is not None:
        found.append(
            f"the adapter was trained on weights in {bits} bits and is merged into the unpacked ones in {merged.dtype}: answers differ a little from "
            "those that it was scored with, so score the merged model too"
        )
    if merged.loses:
        found.append(
            f"rounding to {merged.dtype} moves the logits by {merged.difference:.2g} of their spread and the adapter itself by {merged.effect:.2g}: "
            "much of what it has learnt is lost; set precision: fp32"
        )
    return found


def lines(summary: dict[str, Any]) -> list[str]:
    proof = f"differs from base and adapter by {summary['difference']:.1e} of the logits' spread (at most {summary['tolerance']:g})"
    first = f"{summary['base']} with its adapter: {summary['parameters']:,} parameters in {summary['dtype']}, {proof}; the adapter itself by"
    return [
        f"{first} {summary['effect']:.1e}",
        "read back in plain transformers: the same logits",
        *(f"warning: {words}" for words in summary["warnings"]),
    ]
