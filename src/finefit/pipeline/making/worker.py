"""`python -m finefit.pipeline.making.worker ORDER.json`: makes what a stage is for in the folder `output` beside its order, and leaves a record.

A stop ends it at once: what is half made is made again."""

import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from finefit.artifacts.atomic import full_disk_named
from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.artifacts.pipelines import Made, Order
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import FinefitError, Interrupted
from finefit.pipeline.making.kinds import maker_of
from finefit.spec.stages import EvaluateStage, TrainStage


def main() -> None:
    where = StageDir(Path(sys.argv[1]).resolve().parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    on_stop_signals(lambda number, _: _stop(where, f"stopped by {signal.Signals(number).name}"))
    when_launcher_ends(lambda: _stop(where, "stopped: the process that started it has ended"))
    sys.exit(work(where))


def work(where: StageDir) -> int:
    """The exit code; the reason of a failure is in the record."""
    order = read_record(where.order, Order)
    assert not isinstance(order.stage, TrainStage | EvaluateStage)  # they have processes of their own
    where.output.mkdir()
    try:
        with full_disk_named(where.output, 0):
            summary = maker_of(order.stage.kind).make(order, where.output)
    except FinefitError as error:
        write_record(where.made, Made(failure=Failure.of(error)))
        return error.exit_code
    write_record(where.made, Made(summary=summary, peak_bytes=_peak_bytes(order.device)))
    return 0


def _stop(where: StageDir, reason: str) -> None:
    """Whatever this process has started ends with it. Called by a signal, or by a thread that waits for the launcher's end."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    write_record(where.made, Made(failure=Failure.of(Interrupted(reason, "give the same command again"))))
    os._exit(Interrupted.exit_code)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        torch = sys.modules.get("torch")
        return 0 if torch is None else int(torch.cuda.max_memory_reserved())
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    # Linux's ru_maxrss begins with what the process that started this one held
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
