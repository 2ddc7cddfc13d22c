"""The process of a stage, `python -m finefit.stages.<kind> JOB.json`. It fills the folder `output` beside the job and
leaves a record. Each kind is a module of its own, so that it imports only what it needs. A stop ends it at once, and
half-made output is made again."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import psutil

from finefit.artifacts.atomic import release_on_disk_full, report_disk_full
from finefit.artifacts.processes import on_stop_signals, when_launcher_ends
from finefit.artifacts.records import Failure, StageJob, StageOutcome, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import DiskFull, FinefitError, Interrupted
from finefit.facts.machine import read_peak_resident_bytes

Make = Callable[[StageJob, Path], dict[str, Any]]
"""Fills a folder and returns a summary."""


def serve(make: Make) -> None:
    where = StageDir(Path(sys.argv[1]).resolve().parent)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # so that text which is not UTF-8 is logged, too
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    on_stop_signals(lambda number, _: _stop(where, f"stopped by {signal.Signals(number).name}"))
    when_launcher_ends(lambda: _stop(where, "stopped: the process that started it has ended"))
    job = read_record(where.job, StageJob)
    try:
        # outermost, so that the free bytes it reports are those after the clean-up
        with report_disk_full(where.output), release_on_disk_full(where.output):
            where.output.mkdir()
            summary = make(job, where.output)
            write_record(where.outcome, StageOutcome(summary=summary, peak_bytes=_peak_bytes(job.device)))
    except FinefitError as error:
        sys.exit(_failed(where, error))


def _failed(where: StageDir, error: FinefitError) -> int:
    """If the disk is too full for the record, only the exit code shows the failure."""
    where.outcome.unlink(missing_ok=True)
    problem, remedy = (text.encode(errors="backslashreplace").decode() for text in (error.problem, error.remedy))
    with suppress(DiskFull):
        write_record(where.outcome, StageOutcome(failure=Failure.of(type(error)(problem, remedy))))
    return error.exit_code


def _stop(where: StageDir, reason: str) -> None:
    """Stops the stage with all child processes. Called by a signal handler, or by a thread that waits for the
    launcher's end."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    os._exit(_failed(where, Interrupted(reason, "give the same command again")))


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        torch = sys.modules.get("torch")
        return 0 if torch is None else int(torch.cuda.max_memory_reserved())
    return read_peak_resident_bytes()
