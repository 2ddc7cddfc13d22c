"""Trackers (TensorBoard, W&B, MLflow, Trackio), each fed by its own process that reads the run's metrics as they grow.
The file is the queue, so training never waits for a tracker, and the metrics are complete whatever a tracker does.

`python -m finefit.train.trackers KIND STAGE_DIR PROJECT LINES OFFSET LAST_SECONDS` feeds one tracker until standard
input ends. LINES are a run's metrics or its scores. Only numbers and the run's name leave it, and with scores a few
answers. A line that the tracker refuses is dropped and counted; a tracker that cannot start is tried again.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from finefit.artifacts.atomic import parse_line, write_text
from finefit.artifacts.reading import is_there, lines_of, open_file, open_to_append, read_document
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.errors import RunError
from finefit.spec.schema import Tracker

_LAST_SECONDS = 30.0  # that a tracker has for the remaining lines after a successful training
_HURRIED_SECONDS = 5.0  # after any other end: a scheduler may be waiting


class Tracking:
    """Feeds the trackers while the `with` block lasts. Lost lines are reported once, at its end."""

    def __init__(
        self,
        where: StageDir,
        trackers: Sequence[Tracker],
        tell: Callable[..., Any],
        *,
        last_seconds: float | None = None,
        lines: Path | None = None,
        offset: int | None = None,
    ) -> None:
        """`lines` is the file, by default the metrics; reading starts at `offset`, by default at its end."""
        self._where, self._trackers, self._tell = where, trackers, tell
        self._last_seconds = last_seconds or _LAST_SECONDS
        self._lines, self._offset = lines or where.metrics, offset
        self._fed: list[tuple[str, subprocess.Popen[bytes], int]] = []
        """Kind, process, and the offset in the lines at which it began."""

    def __enter__(self) -> "Tracking":
        run = self._where.run
        for tracker in self._trackers:
            if importlib.util.find_spec(tracker.kind) is None:  # packages are named like their kind
                found = f"{tracker.kind} is not installed: pip install {tracker.kind}"
                self._tell(event="tracker_failed", tracker=tracker.kind, found=found)
                continue
            end = self._lines.stat().st_size if self._lines.exists() else 0
            offset = end if self._offset is None else self._offset
            project = tracker.project or run.name.rpartition("-")[0] or run.name
            arguments = (tracker.kind, self._where.path, project, self._lines, offset, self._last_seconds)
            log = tracker_log(self._where, tracker.kind)
            log.parent.mkdir(exist_ok=True)
            with open_to_append(log) as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "finefit.train.trackers", *map(str, arguments)],
                    stdin=subprocess.PIPE,  # its end tells the process that training has ended
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # a keyboard interrupt is for the worker
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the card is for training
                )
            self._fed.append((tracker.kind, process, offset))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for _kind, process, _offset in self._fed:
            assert process.stdin is not None
            process.stdin.close()
        seconds = self._last_seconds if error is None else min(self._last_seconds, _HURRIED_SECONDS)
        deadline = time.monotonic() + seconds
        for kind, process, offset in self._fed:
            try:
                code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
                problem = None if code == 0 else f"its process ended with {code}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                problem = f"it had not accepted all lines {seconds:g} seconds after the end of training"
            log, delivery = tracker_log(self._where, kind), Delivery(pid=process.pid)
            with suppress(RunError, TypeError):  # missing, or not what the process wrote
                last = Delivery(**read_document(log.with_suffix(".json")))
                delivery = last if last.pid == process.pid else delivery  # else this process never began
            lost = sum(1 for _ in metric_points(self._lines, offset)) - delivery.sent
            if lost > 0 or problem:
                why = "; ".join(part for part in (problem, delivery.problem) if part)
                shown = str(log.relative_to(self._where.run))
                self._tell(event="tracker_failed", tracker=kind, lost_lines=lost, found=why, log=shown)


_LOOK_SECONDS = 0.5
_PAUSES = (1.0, 5.0, 20.0, 60.0)  # between attempts to start; the last one repeats
_NO_MEASURES = ("step", "time", "event")
_WITH_MEASURES = (None, "validated", "scored")  # events whose numbers are metrics: a step has no event
_LONGEST_TEXT = 4000
_SECRET_WORDS, _SECRET_LENGTH = ("KEY", "TOKEN", "SECRET", "PASSWORD"), 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    step: int
    values: dict[str, float]
    texts: dict[str, str] = field(default_factory=dict)
    """Scored answers, by name."""
    end: int
    """The offset in the file at which the line ends."""


@dataclass(slots=True, kw_only=True)
class Delivery:
    pid: int
    sent: int = 0
    dropped: int = 0
    problem: str | None = None
    """The latest problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a run to a tracker when the run resumes."""

    project: str
    name: str
    folder: Path
    """A folder for the tracker's own files."""


Sink = tuple[Callable[[int, Mapping[str, float], Mapping[str, str]], None], Callable[[], Any]]
"""Logs (step, values, texts), and closes. `texts`: a few answers, with scores of an earlier step."""


def _tensorboard(run: Identity) -> Sink:
    from tensorboard.summary import Writer

    folder = str(run.folder / "tensorboard")
    numbers = Writer(folder)

    def log(step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for name, value in values.items():
            numbers.add_scalar(name, value, step)
        if texts:
            from torch.utils.tensorboard import SummaryWriter  # the package's own writer supports only numbers

            with SummaryWriter(folder) as writer:
                for name, text in texts.items():
                    writer.add_text(name, text, step)

    return log, numbers.close


def _wandb(run: Identity) -> Sink:
    import wandb

    # our numbers and nothing else
    settings = wandb.Settings(x_disable_stats=True, console="off", disable_git=True, save_code=False)
    about = {"project": run.project, "id": run.name, "name": run.name, "dir": str(run.folder)}
    opened = wandb.init(**about, resume="allow", settings=settings)

    def log(step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """A tracker's own steps can only increase, so a checkpoint's step is logged as a value beside the scores."""
        if not texts:
            opened.log(dict(values), step=step)
            return
        task, rows = next(iter(values), "").partition("/")[0], [list(pair) for pair in texts.items()]
        samples = wandb.Table(columns=["sample", "text"], data=rows)
        opened.log({**values, f"{task}/samples": samples, f"{task}/step": step})

    return log, opened.finish


def _mlflow(run: Identity) -> Sink:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(run.project)
    experiment = found.experiment_id if found else client.create_experiment(run.project)
    earlier = client.search_runs([experiment], filter_string=f"tags.finefit = '{run.name}'", max_results=1)
    tags = {"finefit": run.name}
    opened = earlier[0] if earlier else client.create_run(experiment, run_name=run.name, tags=tags)
    number = opened.info.run_id

    def log(step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        now = int(time.time() * 1000)
        metrics = [mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        client.log_batch(number, metrics=metrics)
        for name, text in texts.items():
            client.log_text(number, text, f"samples/{name}.txt")

    return log, partial(client.set_terminated, number)


def _trackio(run: Identity) -> Sink:
    import trackio

    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    trackio.init(project=run.project, name=run.name, resume="allow", **quiet)

    def log(step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        trackio.log({**values, **texts}, step=step)

    return log, trackio.finish


SINKS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def tracker_log(where: StageDir, kind: str) -> Path:
    return where.run / "logs" / f"tracker-{kind}.log"


def metric_points(lines: Path, offset: int) -> Iterator[MetricPoint]:
    """The metrics of complete lines from `offset` on."""
    with open_file(lines) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(offset)
        for line in lines_of(file, lines):
            offset += len(line)
            if not line.endswith(b"\n"):
                return
            found = parse_line(line)
            if found is None or found.get("event") not in _WITH_MEASURES or "step" not in found:
                continue
            numbers = {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
            values = {k: float(v) for k, v in numbers.items() if math.isfinite(v) and k not in _NO_MEASURES}
            texts = {}
            for at, sample in enumerate(found.get("samples", ()), 1):
                text = f"{sample['prompt']}\n\nanswer: {sample['answer']}\n\nreference: {sample['reference']}"
                texts[f"{found.get('task')}/{found.get('checkpoint')}/sample-{at}"] = text[:_LONGEST_TEXT]
            yield MetricPoint(step=int(found["step"]), values=values, texts=texts, end=offset)


def feed(where: StageDir, kind: str, project: str, lines: Path, offset: int, is_over: threading.Event) -> None:
    record, name, delivery = RunDir(where.run).run, where.run.name, Delivery(pid=os.getpid())
    if is_there(record):  # enough of the digest to make the name unique
        name = f"{name}-{read_record(record, Run).digest[:8]}"

    def note() -> None:
        # often, and made again if lost
        write_text(tracker_log(where, kind).with_suffix(".json"), json.dumps(asdict(delivery)), durable=False)

    pauses = iter(_PAUSES)
    while True:
        try:
            log, close = SINKS[kind](Identity(project=project, name=name, folder=where.path))
            break
        except Exception as error:
            delivery.problem = _words(error)
            note()
            if is_over.wait(next(pauses, _PAUSES[-1])):
                raise
    delivery.problem = None
    while True:
        ends = is_over.is_set()  # before reading, so that lines written until then are read
        for point in metric_points(lines, offset):
            try:
                log(point.step, point.values, point.texts)
                delivery.sent += 1
            except Exception as error:  # noqa: BLE001 a tracker may raise anything, and may accept the next line
                print(_words(error), file=sys.stderr, flush=True)
                delivery.dropped += 1
                delivery.problem = _words(error)
            offset = point.end
            note()
        if ends:
            break
        is_over.wait(_LOOK_SECONDS)
    close()


def _words(error: Exception) -> str:
    """The error's text without secrets from the environment, which a package may include in it."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    for name, value in os.environ.items():
        if len(value) >= _SECRET_LENGTH and any(word in name.upper() for word in _SECRET_WORDS):
            text = text.replace(value, f"${name}")
    return text


def main() -> NoReturn:
    kind, folder, project, lines, offset, last_seconds = sys.argv[1:]
    is_over = threading.Event()

    def wait_for_the_end() -> None:
        """The process must end by itself, because its parent may be gone and a tracker may block forever."""
        while os.read(sys.stdin.fileno(), 1024):
            pass
        is_over.set()
        time.sleep(float(last_seconds))
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    feed(StageDir(Path(folder)), kind, project, Path(lines), int(offset), is_over)
    sys.stderr.flush()
    os._exit(0)  # exit handlers of a tracker may block forever


if __name__ == "__main__":
    main()
