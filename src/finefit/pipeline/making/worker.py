"""`python -m finefit.pipeline.making.worker ORDER.json`: makes what a stage is for in the folder `output` beside its order, and leaves a record.

A stop ends it at once: what is half made is made again."""

import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import psutil

from finefit.artifacts.atomic import full_disk_named, given_back_when_full
from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.artifacts.pipelines import Made, Order
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import DiskFull, FinefitError, Interrupted
from finefit.pipeline.making.kinds import maker_of
from finefit.spec.stages import EvaluateStage, TrainStage


def main() -> None:
    where = StageDir(Path(sys.argv[1]).resolve().parent)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what cannot be written as UTF-8 is told all the same
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    on_stop_signals(lambda number, _: _stop(where, f"stopped by {signal.Signals(number).name}"))
    when_launcher_ends(lambda: _stop(where, "stopped: the process that started it has ended"))
    sys.exit(work(where))


def work(where: StageDir) -> int:
    """The exit code; the reason of a failure is in the record."""
    order = read_record(where.order, Order)
    assert not isinstance(order.stage, TrainStage | EvaluateStage)  # they have processes of their own
    try:
        # around the clean-up, so that the bytes it names as free are those for the next attempt
        with full_disk_named(where.output), given_back_when_full(where.output):
            where.output.mkdir()
            summary = maker_of(order.stage.kind).make(order, where.output)
            write_record(where.made, Made(summary=summary, peak_bytes=_peak_bytes(order.device)))
    except FinefitError as error:
        return _failed(where, error)
    return 0


def _failed(where: StageDir, error: FinefitError) -> int:
    """Where there is no room even for the record, there is none, and the exit code speaks alone."""
    where.made.unlink(missing_ok=True)
    problem, remedy = (text.encode(errors="backslashreplace").decode() for text in (error.problem, error.remedy))
    with suppress(DiskFull):
        write_record(where.made, Made(failure=Failure.of(type(error)(problem, remedy))))
    return error.exit_code


def _stop(where: StageDir, reason: str) -> None:
    """Whatever this process has started ends with it. Called by a signal, or by a thread that waits for the launcher's end."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    os._exit(_failed(where, Interrupted(reason, "give the same command again")))


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
