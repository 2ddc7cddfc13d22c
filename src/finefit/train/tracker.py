"""`python -m finefit.train.tracker KIND STAGE_DIR PROJECT LINES OFFSET LAST_SECONDS`: feeds one tracker from a run's lines until standard input ends.

The lines are those of its metrics, or of its scores. Numbers and the name of the run leave it, and of scores a few answers with them.
A line that the tracker refuses is dropped and counted; one that cannot begin is tried again.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from finefit.artifacts.journal import whole
from finefit.artifacts.rundir import RunDir, StageDir

_LOOK_SECONDS = 0.5
_PAUSES = (1.0, 5.0, 20.0, 60.0)
"""Between attempts to begin; the last one over and over."""
_NO_MEASURES = ("step", "time", "event")
_WITH_MEASURES = (None, "validated", "scored")
"""The events whose numbers are measures: a step has no event."""
_LONGEST_TEXT = 4000

_SECRET_WORDS, _SECRET_LENGTH = ("KEY", "TOKEN", "SECRET", "PASSWORD"), 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    step: int
    values: dict[str, float]
    texts: dict[str, str] = field(default_factory=dict)
    """Answers that were scored, by what they are called."""
    end: int
    """Where the line ends in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How far a process came."""

    pid: int
    sent: int = 0
    dropped: int = 0
    problem: str | None = None
    """The last one."""


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def score(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Of a checkpoint, with a few answers; by then the tracker is past that step."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """By which a tracker knows a run again when it goes on."""

    project: str
    name: str
    folder: Path
    """For what the tracker itself writes."""


class TensorBoard:
    def __init__(self, run: Identity) -> None:
        from tensorboard.summary import Writer

        self._folder = str(run.folder / "tensorboard")
        self._writer = Writer(self._folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def score(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the package's own writer knows numbers only

        self.log(step, values)
        with SummaryWriter(self._folder) as writer:
            for name, text in texts.items():
                writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    def __init__(self, run: Identity) -> None:
        import wandb

        settings = wandb.Settings(
            x_disable_stats=True, console="off", disable_git=True, save_code=False
        )  # numbers of ours, and nothing else
        self._run = wandb.init(
            project=run.project, id=run.name, name=run.name, dir=str(run.folder), resume="allow", settings=settings
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def score(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Its own steps only rise, so the checkpoint's is a value beside the scores."""
        import wandb

        task = next(iter(values), "").partition("/")[0]
        samples = (
            {f"{task}/samples": wandb.Table(columns=["sample", "text"], data=[list(pair) for pair in texts.items()])}
            if texts
            else {}
        )
        self._run.log({**values, **samples, f"{task}/step": step})

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
        made = (
            earlier[0]
            if earlier
            else self._client.create_run(experiment, run_name=run.name, tags={"finefit": run.name})
        )
        self._id, self._metric = made.info.run_id, mlflow.entities.Metric

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def score(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self.log(step, values)
        for name, text in texts.items():
            self._client.log_text(self._id, text, f"samples/{name}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    def __init__(self, run: Identity) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(
            project=run.project, name=run.name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def score(self, step: int, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        self._trackio.log({**values, **texts}, step=step)

    def close(self) -> None:
        self._trackio.finish()


SINKS: dict[str, Callable[[Identity], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def log_of(where: StageDir, kind: str) -> Path:
    """What the tracker says."""
    return where.run / "logs" / f"tracker-{kind}.log"


def last_delivery(where: StageDir, kind: str, pid: int) -> Delivery:
    """Of this process; of one that never began, nothing."""
    path = log_of(where, kind).with_suffix(".json")
    found = Delivery(**json.loads(path.read_text())) if path.exists() else Delivery(pid=pid)
    return found if found.pid == pid else Delivery(pid=pid)


def points(lines: Path, offset: int) -> Iterator[Point]:
    """The measures of whole lines from `offset` on."""
    with lines.open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            if not line.endswith(b"\n"):
                return
            found = whole(line)
            if found is None or found.get("event") not in _WITH_MEASURES or "step" not in found:
                continue
            yield Point(step=int(found["step"]), values=_numbers(found), texts=_texts(found), end=offset)


def _texts(line: Mapping[str, Any]) -> dict[str, str]:
    """Of a line of scores: each sample as it would be read."""
    about = f"{line.get('task')}/{line.get('checkpoint')}"
    return {
        f"{about}/sample-{at}": f"{sample['prompt']}\n\nanswer: {sample['answer']}\n\nreference: {sample['reference']}"[
            :_LONGEST_TEXT
        ]
        for at, sample in enumerate(line.get("samples", ()), 1)
    }


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and name not in _NO_MEASURES
    }


class Feed:
    """Of one tracker, until `is_over`."""

    def __init__(
        self, where: StageDir, kind: str, project: str, lines: Path, offset: int, is_over: threading.Event
    ) -> None:
        self._where, self._kind, self._lines, self._is_over = where, kind, lines, is_over
        self._identity = Identity(project=project, name=_name(where), folder=where.path)
        self._offset = offset
        self._delivery = Delivery(pid=os.getpid())

    def run(self) -> None:
        sink = self._opened()
        while True:
            ends = self._is_over.is_set()  # before the look: what was written until then is seen by it
            for point in points(self._lines, self._offset):
                self._send(sink, point)
            if ends:
                break
            self._is_over.wait(_LOOK_SECONDS)
        sink.close()

    def _opened(self) -> Sink:
        pauses = iter(_PAUSES)
        while True:
            try:
                return SINKS[self._kind](self._identity)
            except Exception as error:
                self._note(replace(self._delivery, problem=_words(error)))
                if self._is_over.wait(next(pauses, _PAUSES[-1])):
                    raise

    def _send(self, sink: Sink, point: Point) -> None:
        try:
            if point.texts:
                sink.score(point.step, point.values, point.texts)
            else:
                sink.log(point.step, point.values)
            self._delivery = replace(self._delivery, sent=self._delivery.sent + 1)
        except Exception as error:  # noqa: BLE001 a foreign package may raise anything, and its next line may be taken
            print(_words(error), file=sys.stderr, flush=True)
            self._delivery = replace(self._delivery, dropped=self._delivery.dropped + 1, problem=_words(error))
        self._offset = point.end
        self._note(self._delivery)

    def _note(self, delivery: Delivery) -> None:
        path = log_of(self._where, self._kind).with_suffix(".json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(delivery)), encoding="utf-8")
        temporary.replace(path)


def _name(where: StageDir) -> str:
    """The run's, with enough of its digest to be one of its kind."""
    record = RunDir(where.run).run
    digest = json.loads(record.read_text(encoding="utf-8"))["digest"][:8] if record.exists() else ""
    return f"{where.run.name}-{digest}" if digest else where.run.name


def _words(error: Exception) -> str:
    """What the environment keeps secret stays there, also where a package names it in its error."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    for name, value in os.environ.items():
        if len(value) >= _SECRET_LENGTH and any(word in name.upper() for word in _SECRET_WORDS):
            text = text.replace(value, f"${name}")
    return text


def _wait_for_the_end(is_over: threading.Event, last_seconds: float) -> None:
    """Nobody may be left to end this process, and a tracker may hold it for ever."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    is_over.set()
    time.sleep(last_seconds)
    os._exit(1)


def main() -> NoReturn:
    kind, folder, project, lines, offset, last_seconds = sys.argv[1:]
    is_over = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(is_over, float(last_seconds)), daemon=True).start()
    Feed(StageDir(Path(folder)), kind, project, Path(lines), int(offset), is_over).run()
    sys.stderr.flush()
    os._exit(0)  # what a tracker has registered for the exit of a process may wait for ever


if __name__ == "__main__":
    main()
