"""One real step of a spec on this machine's card, beside its forecast."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts.journal import read_lines
from finefit.errors import UserError
from finefit.pipeline.create import create_run, stage_of
from finefit.pipeline.execute import execute
from finefit.pipeline.inputs import open_inputs
from finefit.spec.load import load_spec

_ONE_STEP = ("schedule.epochs=null", "schedule.steps=1", "evaluate=[]", "data.validation=null", "save.every=1000000 steps")


def measure_step(target: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run of one step in a folder that is gone afterwards; training itself compares its longest rows with the forecast."""
    if not torch.cuda.is_available():
        raise UserError(
            "--measure needs a CUDA device, and torch finds none here", "`finefit doctor` says why; without --measure no device is needed"
        )
    spec = load_spec(target, (*overrides, *_ONE_STEP))
    base = target.resolve().parent
    with tempfile.TemporaryDirectory(prefix="finefit-measure-") as folder:
        opened = open_inputs(spec, base, Path(folder) / spec.name)
        run = create_run(opened, spec_text=target.read_text(encoding="utf-8-sig"), overrides=(*overrides, *_ONE_STEP), base=base, runs=Path(folder))
        execute(run, tick=lambda: None, warn=lambda _: None)
        (found,) = (line for line in read_lines(stage_of(run).metrics) if line.get("event") == "measured")
    return {"card": torch.cuda.get_device_name(), **{key: found[key] for key in ("foretold_bytes", "measured_bytes", "error")}}
