"""`python -m finefit.evaluate.worker REQUEST.json`: answers every item of a task with one checkpoint and leaves one record.

`--part k/n` is for a process that answers its share of the items beside others and leaves nothing but them.
"""

import argparse
import gc
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from finefit.artifacts.evaluations import EvalFailure, EvalItem, EvalRequest, EvalResult
from finefit.artifacts.journal import read_lines
from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.artifacts.records import Failure, write_record
from finefit.data.items import is_asked, key_of, read_items
from finefit.data.rows import Row
from finefit.data.tasks import Task, make_task
from finefit.errors import FinefitError, Interrupted
from finefit.evaluate.answering import Taken, Work, answer, answered, read_work
from finefit.evaluate.judge import judge_items, marks_made_fit
from finefit.evaluate.score import finished, summarise
from finefit.evaluate.sharing import ALONE, Part, companions, read_part
from finefit.evaluate.versions import made_with
from finefit.model.load import quiet

log = logging.getLogger("finefit")


def evaluate(work: Work) -> EvalResult:
    task, rows = _task_and_rows(work)
    asked = _asked(work, rows)
    chosen = sample(rows, work.request.evaluation.limit, among=asked)
    taken = _answer_all(work, task, rows, chosen)
    gc.collect()
    torch.cuda.empty_cache()  # what finishes the task may need a model of its own
    items = _scored(work, task, rows, chosen)
    result = summarise(task, work.request.checkpoint, items, available=len(asked), seconds=taken.seconds)
    befallen = dict.fromkeys(str(line["warning"]) for line in read_lines(work.paths.warnings))
    return replace(
        result,
        signature=result.signature | _signature(work.request),
        warnings=(*befallen, *result.warnings),
        loaded_bytes=taken.loaded_bytes,
        peak_bytes=taken.peak_bytes,
        foretold_bytes=work.request.room.reserved_bytes,
    )


def _scored(work: Work, task: Task, rows: Sequence[Row], chosen: Sequence[int]) -> list[EvalItem]:
    """With all that is counted once every item is answered: by the task itself, and by a judge where one is asked."""
    done, judge = answered(work.paths), work.request.evaluation.judge
    items = finished(task, [(rows[at], marks_made_fit(task, done[at])) for at in chosen])
    return (
        items
        if judge is None
        else judge_items(task, items, judge, verdicts=work.paths.verdicts, seed=work.request.subject.seed)
    )


def answer_part(work: Work, part: Part) -> None:
    """For one of several processes: its items and nothing else."""
    task, rows = _task_and_rows(work)
    mine = part.mine(sample(rows, work.request.evaluation.limit, among=_asked(work, rows)))
    done = answered(work.paths)
    answer(work, task, rows, [at for at in mine if at not in done], part=part)


def _task_and_rows(work: Work) -> tuple[Task, list[Row]]:
    subject = work.request.subject
    rows = read_items(work.where.verified(subject.items, {subject.items: subject.items_sha256}))
    return make_task(work.request.evaluation, form=subject.form, base=work.path.parent, run=work.where.run), rows


def _asked(work: Work, rows: Sequence[Row]) -> list[int]:
    return [at for at, row in enumerate(rows) if is_asked(row, work.request.evaluation.sources)]


def sample(rows: Sequence[Row], limit: int | None, *, among: Sequence[int] | None = None) -> list[int]:
    """The same items for every model and every run that has them, whatever its seed; a smaller sample is a part of a larger one."""
    everything = range(len(rows)) if among is None else among
    if limit is None or limit >= len(everything):
        return list(everything)
    drawn = sorted(everything, key=lambda at: hashlib.sha256(f"sample {key_of(rows[at])}".encode()).digest())
    return sorted(drawn[:limit])


def _answer_all(work: Work, task: Task, rows: Sequence[Row], chosen: list[int]) -> Taken:
    room, done = work.request.room, answered(work.paths)
    missing = [at for at in chosen if at not in done]
    num_parts = 1 if room.is_spread else max(1, min(room.devices, len(missing)))
    part = Part(number=0, of=num_parts)
    with companions(work.path, work.paths, num_parts) as look:
        taken = answer(work, task, rows, [at for at in part.mine(chosen) if at not in done], part=part, look=look)
        answered_at = time.perf_counter()
    return replace(taken, seconds=taken.seconds + time.perf_counter() - answered_at)


def _signature(request: EvalRequest) -> dict[str, str]:
    how = {
        "decoding": f"greedy, at most {request.evaluation.max_new_tokens} new tokens",
        "precision": request.subject.precision,
    }
    return made_with() | how


def _stop(number: int, _: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="finefit.evaluate.worker")
    parser.add_argument("request", type=lambda text: Path(text).resolve())
    parser.add_argument("--part", type=read_part, default=ALONE)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    quiet()
    sys.exit(work(asked.request, asked.part))


def work(path: Path, part: Part = ALONE) -> int:
    """The exit code; the reason of a failure is in a record of its own."""
    asked = read_work(path)
    failure = asked.paths.failure_of(part.number)
    failure.unlink(missing_ok=True)
    heeded = on_stop_signals(_stop)
    try:
        when_launcher_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
        if part.of > 1:
            answer_part(asked, part)
        else:
            write_record(asked.paths.result, evaluate(asked))
    except FinefitError as error:
        for number in heeded:  # one stop is enough
            signal.signal(number, signal.SIG_IGN)
        log.error("%s", error)
        write_record(failure, EvalFailure(failure=Failure.of(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
