"""Merges an adapter into its base: a model folder that needs no peft, with the proof that it answers as base and
adapter did."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts.records import StageJob, read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.errors import ModelError
from finefit.model.load import base_bits
from finefit.model.merge import merge_adapter
from finefit.model.resolve_model import ADAPTER_CONFIG, resolve_model
from finefit.spec.stages import MergeAdapter
from finefit.stages.worker import serve

_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Fills `out` with the whole model, its tokenizer and template."""
    stage = job.stage
    assert isinstance(stage, MergeAdapter)
    adapter = _adapter(job, stage)
    base = resolve_model(job.models["model"].model, Path(job.base))
    merged = merge_adapter(base.folder, adapter, out, dtype=_DTYPES[stage.precision])
    trained = StageDir(adapter.resolve().parent.parent).stage  # of finefit's own checkpoints
    bits = base_bits(read_record(trained, Stage).tuning) if trained.is_file() else None
    warnings = []
    if bits is not None:
        warnings.append(
            f"the adapter was trained on weights in {bits} bits and is merged into the unpacked ones in "
            f"{merged.dtype}: answers differ a little from those that it was scored with, so score the merged model too"
        )
    if merged.loses:
        warnings.append(
            f"rounding to {merged.dtype} moves the logits by {merged.difference:.2g} of their spread and the adapter "
            f"itself by {merged.effect:.2g}: much of what it has learnt is lost; set precision: fp32"
        )
    return {**asdict(merged), "base": base.name, "bits": bits, "warnings": warnings}


def _adapter(job: StageJob, stage: MergeAdapter) -> Path:
    wired = job.models["model"]
    if stage.adapter is not None and wired.adapter is not None:
        problem = f"stage {job.name} names an adapter, but its model has one already: {Path(wired.adapter).name}"
        raise ModelError(problem, "leave adapter out, or name the base as model")
    found = wired.adapter if stage.adapter is None else str(Path(job.base) / stage.adapter)
    if found is None:
        problem = f"stage {job.name} merges an adapter, but its model has none"
        raise ModelError(problem, "name a stage that trains one, or a folder with adapter:")
    if not (Path(found) / ADAPTER_CONFIG).is_file():
        problem = f"{found} holds no {ADAPTER_CONFIG}, so there is no adapter to merge"
        raise ModelError(problem, "name a folder with an adapter that peft can read")
    return Path(found)


if __name__ == "__main__":
    serve(make)
