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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from finefit.artifacts.atomic import parse_line, write_text
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.spec.schema import Tracker

_LAST_SECONDS = 30.0
"""That a tracker has for the remaining lines after a successful training."""
_HURRIED_SECONDS = 5.0
"""After any other end: a scheduler may be waiting."""
_COMMAND = (sys.executable, "-m", "finefit.train.trackers")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrackerProcess:
    tracker: Tracker
    process: "subprocess.Popen[bytes]"
    offset: int
    """In the lines that it began at."""


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
        """`lines`: the file, by default the metrics; from `offset` on, by default from its end."""
        self._where, self._trackers, self._tell = where, trackers, tell
        self._last_seconds = last_seconds or _LAST_SECONDS
        self._lines, self._offset = lines or where.metrics, offset
        self._fed: list[_TrackerProcess] = []

    def __enter__(self) -> "Tracking":
        for tracker in self._trackers:
            if importlib.util.find_spec(tracker.kind) is None:  # packages are named like their kind
                found = f"{tracker.kind} is not installed: pip install {tracker.kind}"
                self._tell(event="tracker_failed", tracker=tracker.kind, found=found)
            else:
                self._fed.append(self._started(tracker))
        return self

    def _started(self, tracker: Tracker) -> _TrackerProcess:
        end = self._lines.stat().st_size if self._lines.exists() else 0
        offset = end if self._offset is None else self._offset
        project = tracker.project or self._where.run.name.rpartition("-")[0] or self._where.run.name
        log = tracker_log(self._where, tracker.kind)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            where = (str(self._where.path), project, str(self._lines), str(offset), str(self._last_seconds))
            process = subprocess.Popen(
                [*_COMMAND, tracker.kind, *where],
                stdin=subprocess.PIPE,  # its end tells the process that training has ended
                stdout=output,
                stderr=output,
                start_new_session=True,  # a keyboard interrupt is for the worker
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the card is for training
            )
        return _TrackerProcess(tracker=tracker, process=process, offset=offset)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for fed in self._fed:
            assert fed.process.stdin is not None
            fed.process.stdin.close()
        seconds = self._last_seconds if kind is None else min(self._last_seconds, _HURRIED_SECONDS)
        deadline = time.monotonic() + seconds
        for fed in self._fed:
            self._account(fed, _ended(fed.process, deadline, seconds))

    def _account(self, fed: _TrackerProcess, problem: str | None) -> None:
        delivery = last_delivery(self._where, fed.tracker.kind, fed.process.pid)
        lost = sum(1 for _ in metric_points(self._lines, fed.offset)) - delivery.sent
        if lost > 0 or problem:
            found = "; ".join(part for part in (problem, delivery.problem) if part)
            log = tracker_log(self._where, fed.tracker.kind).relative_to(self._where.run)
            self._tell(event="tracker_failed", tracker=fed.tracker.kind, lost_lines=lost, found=found, log=str(log))


def _ended(process: "subprocess.Popen[bytes]", deadline: float, seconds: float) -> str | None:
    """Why it had to be killed, or its exit code if that is not 0."""
    try:
        code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"it had not accepted all lines {seconds:g} seconds after the end of training"
    return None if code == 0 else f"its process ended with {code}"


_LOOK_SECONDS = 0.5
_PAUSES = (1.0, 5.0, 20.0, 60.0)
"""Between attempts to start; the last one repeats."""
_NO_MEASURES = ("step", "time", "event")
_WITH_MEASURES = (None, "validated", "scored")
"""Events whose numbers are metrics: a step has no event."""
_LONGEST_TEXT = 4000

_SECRET_WORDS, _SECRET_LENGTH = ("KEY", "TOKEN", "SECRET", "PASSWORD"), 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    step: int
    values: dict[str, float]
    texts: dict[str, str] = field(default_factory=dict)
    """Scored answers by name."""
    end: int
    """Where the line ends in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The progress of a process."""

    pid: int
    sent: int = 0
    dropped: int = 0
    problem: str | None = None
    """The last one."""


class TrackerSink(Protocol):
    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """`texts`: a few answers, where the values are scores of a checkpoint; the tracker is past that step then."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """By which a tracker recognises a run that resumes."""

    project: str
    name: str
    folder: Path
    """For the tracker's own files."""


class TensorBoard:
    def __init__(self, run: Identity) -> None:
        from tensorboard.summary import Writer

        self._folder = str(run.folder / "tensorboard")
        self._writer = Writer(self._folder)

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if texts:
            from torch.utils.tensorboard import SummaryWriter  # the package's own writer supports only numbers

            with SummaryWriter(self._folder) as writer:
                for name, text in texts.items():
                    writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, run: Identity) -> None:
        import wandb

        # our numbers and nothing else
        settings = wandb.Settings(x_disable_stats=True, console="off", disable_git=True, save_code=False)
        about = {"project": run.project, "id": run.name, "name": run.name, "dir": str(run.folder)}
        self._run, self._table = wandb.init(**about, resume="allow", settings=settings), wandb.Table

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Its own steps only increase, so a checkpoint's step is a value beside the scores."""
        if not texts:
            self._run.log(dict(values), step=step)
            return
        task, rows = next(iter(values), "").partition("/")[0], [list(pair) for pair in texts.items()]
        samples = self._table(columns=["sample", "text"], data=rows)
        self._run.log({**values, f"{task}/samples": samples, f"{task}/step": step})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, run: Identity) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        import mlflow

        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        earlier = self._client.search_runs([experiment], filter_string=f"tags.finefit = '{run.name}'", max_results=1)
        tags = {"finefit": run.name}
        made = earlier[0] if earlier else self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._id, self._metric = made.info.run_id, mlflow.entities.Metric

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"samples/{name}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    def __init__(self, run: Identity) -> None:
        import trackio

        self._trackio = trackio
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        trackio.init(project=run.project, name=run.name, resume="allow", **quiet)

    def log(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._trackio.log({**values, **texts}, step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, Callable[[Identity], TrackerSink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def tracker_log(where: StageDir, kind: str) -> Path:
    """The tracker's own output."""
    return where.run / "logs" / f"tracker-{kind}.log"


def last_delivery(where: StageDir, kind: str, pid: int) -> Delivery:
    """Of this process; empty for one that never began."""
    path = tracker_log(where, kind).with_suffix(".json")
    found = Delivery(**json.loads(path.read_text())) if path.exists() else Delivery(pid=pid)
    return found if found.pid == pid else Delivery(pid=pid)


def metric_points(lines: Path, offset: int) -> Iterator[MetricPoint]:
    """The metrics of complete lines from `offset` on."""
    with lines.open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            if not line.endswith(b"\n"):
                return
            found = parse_line(line)
            if found is None or found.get("event") not in _WITH_MEASURES or "step" not in found:
                continue
            yield MetricPoint(step=int(found["step"]), values=_numbers(found), texts=_texts(found), end=offset)


def _texts(line: Mapping[str, Any]) -> dict[str, str]:
    """The samples of a line of scores."""
    about, found = f"{line.get('task')}/{line.get('checkpoint')}", {}
    for at, sample in enumerate(line.get("samples", ()), 1):
        text = f"{sample['prompt']}\n\nanswer: {sample['answer']}\n\nreference: {sample['reference']}"
        found[f"{about}/sample-{at}"] = text[:_LONGEST_TEXT]
    return found


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {name: float(v) for name, v in numbers.items() if math.isfinite(v) and name not in _NO_MEASURES}


class TrackerFeed:
    """Feeds one tracker until `is_over`."""

    def __init__(
        self, where: StageDir, kind: str, project: str, lines: Path, offset: int, is_over: threading.Event
    ) -> None:
        record, name = RunDir(where.run).run, where.run.name
        if record.exists():  # enough of the digest to make the name unique
            name = f"{name}-{json.loads(record.read_text(encoding='utf-8'))['digest'][:8]}"
        self._log, self._kind, self._lines, self._is_over = tracker_log(where, kind), kind, lines, is_over
        self._identity, self._offset = Identity(project=project, name=name, folder=where.path), offset
        self._delivery = Delivery(pid=os.getpid())

    def run(self) -> None:
        sink = self._opened()
        while True:
            ends = self._is_over.is_set()  # before reading, so that lines written until then are read
            for point in metric_points(self._lines, self._offset):
                self._send(sink, point)
            if ends:
                break
            self._is_over.wait(_LOOK_SECONDS)
        sink.close()

    def _opened(self) -> TrackerSink:
        pauses = iter(_PAUSES)
        while True:
            try:
                return SINKS[self._kind](self._identity)
            except Exception as error:
                self._note(replace(self._delivery, problem=_words(error)))
                if self._is_over.wait(next(pauses, _PAUSES[-1])):
                    raise

    def _send(self, sink: TrackerSink, point: MetricPoint) -> None:
        try:
            sink.log(point.step, point.values, point.texts)
            self._delivery = replace(self._delivery, sent=self._delivery.sent + 1)
        except Exception as error:  # noqa: BLE001 a tracker may raise anything, and may accept the next line
            print(_words(error), file=sys.stderr, flush=True)
            self._delivery = replace(self._delivery, dropped=self._delivery.dropped + 1, problem=_words(error))
        self._offset = point.end
        self._note(self._delivery)

    def _note(self, delivery: Delivery) -> None:
        # often, and made again if lost
        write_text(self._log.with_suffix(".json"), json.dumps(asdict(delivery)), durable=False)


def _words(error: Exception) -> str:
    """Without secrets of the environment, which a package may name in its error."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    for name, value in os.environ.items():
        if len(value) >= _SECRET_LENGTH and any(word in name.upper() for word in _SECRET_WORDS):
            text = text.replace(value, f"${name}")
    return text


def _wait_for_the_end(is_over: threading.Event, last_seconds: float) -> None:
    """The process must end by itself: its parent may be gone, and a tracker may block forever."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    is_over.set()
    time.sleep(last_seconds)
    os._exit(1)


def main() -> NoReturn:
    kind, folder, project, lines, offset, last_seconds = sys.argv[1:]
    is_over = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(is_over, float(last_seconds)), daemon=True).start()
    TrackerFeed(StageDir(Path(folder)), kind, project, Path(lines), int(offset), is_over).run()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of a tracker may block forever


if __name__ == "__main__":
    main()
