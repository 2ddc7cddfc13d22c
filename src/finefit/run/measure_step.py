"""One real step of a spec on this machine's card, beside its forecast."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import FindingError, FinefitError, UserError
from finefit.run.create import create_run, read_request
from finefit.run.run_stages import train_run
from finefit.spec.load import load_spec, whole_text
from finefit.spec.pipeline import Pipeline

_ONE_STEP = (
    "schedule.epochs=null",
    "schedule.steps=1",
    "schedule.warmup=0",
    "evaluate=[]",
    "data.validation=null",
    "save.every=1000000 steps",
)


def measure_step(target: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run of one step in a temporary folder; training itself compares its longest rows with the forecast."""
    if not torch.cuda.is_available():
        raise UserError(
            "--measure needs a CUDA device, and torch finds none here",
            "`finefit doctor` says why; without --measure no device is needed",
        )
    spec = load_spec(target, (*overrides, *_ONE_STEP))
    base = target.resolve().parent
    with tempfile.TemporaryDirectory(prefix="finefit-measure-") as folder:
        overrides = (*overrides, *_ONE_STEP)
        request = read_request(Pipeline.of(spec), base, spec_text=whole_text(target), overrides=overrides)
        run = create_run(request, runs=Path(folder))
        require_measurable(read_record(stage_of(run).stage, Stage))
        train_run(run)
        found = measured(read_lines(stage_of(run).metrics))
    return {
        "card": torch.cuda.get_device_name(),
        **{key: found[key] for key in ("predicted_bytes", "measured_bytes", "error")},
    }


def require_measurable(stage: Stage) -> None:
    """Refused before a weight is loaded: such a step would not be compared."""
    if (num_ranks := stage.num_ranks or 1) > 1:
        raise UserError(
            f"--measure compares one card, and this spec is planned for {num_ranks} ranks",
            "measure one rank: --set 'engine={kind: single}'; memory.jsonl of a run says what each of several held",
        )
    if stage.levers.update == "inside":
        raise UserError(
            "--measure applies nothing, and with levers.update: inside backward itself changes the weights",
            "measure with --set levers.update=after; memory.jsonl of a run says what it held",
        )


def measured(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The line that training wrote about its longest rows."""
    events = {line["event"]: line for line in lines if "event" in line}
    if (found := events.get("measured")) is not None:
        return found
    if (short := events.get("worst_does_not_fit")) is not None:
        raise FindingError(
            f"a step of the longest rows ran out of memory; {short['predicted_bytes']:,} bytes were predicted",
            "close what else uses the card and measure again, or lower levers.micro_batch",
        )
    raise FinefitError(
        "the step was taken and not measured, which is a bug in finefit", "please report it with the spec"
    )
