"""What the page says of one training: its curves, and the answers to the four questions of whoever looks at it. Is it
learning, will it fit, when is it done, which checkpoint is best."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from finefit.artifacts.atomic import parse_line
from finefit.artifacts.checkpoint import MANIFEST, list_checkpoints, listed_files, problems, step_of, wrong_sizes
from finefit.artifacts.forecasts import Forecast, Plan, Resolved
from finefit.artifacts.reading import is_there, open_file
from finefit.artifacts.records import Record, read_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalItem, EvalResult, Stage, StageResult
from finefit.errors import RunError
from finefit.report.layout import duration, gib, plural
from finefit.report.live import describe_evaluating
from finefit.report.scores import best_of, format_value, main_metric, sorted_results
from finefit.spec import Period
from finefit.web.series import TrainingSeries

R = TypeVar("R", bound=Record)
Document = dict[str, Any]
_FALLEN = 0.99
"""Of its first value: a loss that is still above has not clearly fallen."""
_NUM_SHOWN_EVENTS = 100
_SMOOTHED_PARTS = 50
_TAIL_BYTES = 64 << 10
_MAX_VERIFIED_BYTES = 256 << 20
"""Of a checkpoint whose bytes are read once after it was written: a fraction of a second."""


class RecordReader:
    """Reads each record when it has changed, and says what cannot be read."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Any]] = {}
        self.problems: dict[Path, str] = {}

    def read(self, path: Path, kind: type[R]) -> R | None:
        """None if it is missing or damaged; of an evaluation without the items, which may be many."""
        stamp = stamp_of(path)
        if stamp is None:
            self.problems.pop(path, None)
            return None
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = self._known[path] = (stamp, self._read(path, kind))
        return cast("R | None", known[1])

    def _read(self, path: Path, kind: type[R]) -> Record | None:
        self.problems.pop(path, None)
        try:
            found = read_record(path, kind)
        except RunError as error:
            self.problems[path] = error.problem
            return None
        return replace(found, items=()) if isinstance(found, EvalResult) else found


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Differs after every change of a file; None if it is missing."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    level: Literal["good", "warn", "bad", "wait"]
    text: str
    more: str = ""


class WatchedTraining:
    """One training or evaluation, whose run directory is read again and again."""

    def __init__(self, run: RunDir, records: RecordReader) -> None:
        self._run, self._records = run, records
        self._sizes: dict[Path, tuple[tuple[int, int] | None, int | None, str | None]] = {}
        self._verified: dict[Path, tuple[tuple[int, int] | None, list[str]]] = {}
        self.where = next(iter(run.stages()), StageDir(run.path / "stages" / "1-none"))
        stage = records.read(self.where.stage, Stage)
        smooth_steps = min(max(stage.total_steps // _SMOOTHED_PARTS, 5), 200) if stage else 20
        self.series = TrainingSeries(self.where.metrics, self.where.memory, smooth_steps=smooth_steps)

    def read(self) -> bool:
        return self.series.read()

    def document(self, *, is_running: bool) -> Document:
        stage, forecast = self._records.read(self.where.stage, Stage), self._forecast()
        results = self.evaluations()
        found: Document = {
            "lines": self.series.num_lines,
            "events": [_event(event) for event in list(self.series.events)[-_NUM_SHOWN_EVENTS:]],
            "evaluations": evaluations_document(results),
            "planned": None if forecast is None else self._planned(forecast, stage),
        }
        if stage is None:
            return found | {"trains": False}
        checkpoints, eta_seconds = self._checkpoints(), self._eta_seconds(stage) if is_running else None
        answers = {
            "learning": self._learning(),
            "memory": self._memory(stage, forecast),
            "end": self._end(stage, forecast, eta_seconds, is_running=is_running),
            "best": _best(results, checkpoints),
        }
        return found | {
            "trains": True,
            "objective": stage.objective.kind,
            "step": self.series.step,
            "total_steps": stage.total_steps,
            "loss": self.series.steps.last("loss"),
            "tokens_per_second": self.series.steps.last("tokens_per_second"),
            "eta_seconds": eta_seconds,
            "answers": {name: _answer(answer) for name, answer in answers.items()},
            "instants": self.series.instants,
            "checkpoints": checkpoints,
            "saved": self._saved(checkpoints),
            "next": self._next(stage) if is_running else [],
        }

    def summary(self) -> Document:
        """A line of a list of runs, from the records and the end of the metrics alone."""
        stage, forecast, results = self._records.read(self.where.stage, Stage), self._forecast(), self.evaluations()
        last = _last_step(self.where.metrics)
        return {
            "step": last.get("step"),
            "total_steps": stage and stage.total_steps,
            "loss": last.get("loss"),
            "time": last.get("time"),
            "best": _best(results, self._checkpoints()).text if stage else _first_score(results),
            "cost": forecast and forecast.cost,
        }

    def evaluations(self) -> list[EvalResult]:
        read = (self._records.read(paths.result, EvalResult) for paths in self.where.evaluations())
        return sorted_results(result for result in read if result is not None)

    def items(self, task: str, checkpoint: str) -> Sequence[EvalItem]:
        """Only of an evaluation that exists: the names come from outside."""
        for paths in self.where.evaluations():
            if (paths.folder.name, paths.checkpoint) == (task, checkpoint) and is_there(paths.result):
                return read_record(paths.result, EvalResult).items
        return ()

    def decided(self) -> dict[str, Resolved]:
        plan = self._records.read(self._run.plan, Plan)
        return {key: value for values in (plan.stages.values() if plan else ()) for key, value in values.items()}

    def _forecast(self) -> Forecast | None:
        plan = self._records.read(self._run.plan, Plan)
        return next(iter(plan.forecasts.values()), None) if plan else None

    def _planned(self, forecast: Forecast, stage: Stage | None) -> Document:
        device = stage.device if stage else "cpu"
        return {
            "card": forecast.card,
            "device": device,
            "peak_bytes": forecast.predicted_bytes(device),
            "budget_bytes": forecast.budget_bytes,
            "tokens_per_second": forecast.tokens_per_second,
            "step_seconds": forecast.step_seconds,
            "cost": forecast.cost,
            "instants": forecast.instants,
            "components": forecast.components,
        }

    def _learning(self) -> PageAnswer:
        series = self.series
        smoothed, first, validations = series.steps.last("smoothed_loss"), series.first_loss, series.validations
        if smoothed is None or first is None:
            done = series.reference and f"reference of {series.reference[0]:,} of {series.reference[1]:,} pairs"
            return PageAnswer(level="wait", text="No step yet", more=done or "")
        fell = f"loss {first:.3f} at first, {smoothed:.3f} now"
        losses = validations.values.get("validation_loss")
        if losses is not None and len(losses) > 1:
            lowest = min(range(len(losses)), key=lambda at: losses[at] if losses[at] == losses[at] else float("inf"))
            if lowest == len(losses) - 1:
                return PageAnswer(
                    level="good", text="Yes: validation is at its lowest", more=f"{losses[-1]:.4f}; {fell}"
                )
            found = f"{losses[lowest]:.4f} at step {validations.steps[lowest]}, {losses[-1]:.4f} now; {fell}"
            return PageAnswer(level="warn", text="Validation no longer falls", more=found)
        if smoothed < _FALLEN * first:
            return PageAnswer(level="good", text="Yes: the loss falls", more=fell)
        return PageAnswer(level="wait", text="Not clear yet", more=fell)

    def _memory(self, stage: Stage, forecast: Forecast | None) -> PageAnswer:
        peak = self.peak_bytes()
        planned = f"{gib(stage.predicted_bytes)} planned"
        measured = f"peak {gib(peak)}" if peak else "not measured yet"
        if forecast is None:
            return PageAnswer(level="wait", text=planned, more=measured)
        room = f"{gib(forecast.budget_bytes)} on {forecast.card}"
        if rescued := sum(event.kind == "oom_recovered" for event in self.series.events):
            more = f"{plural(rescued, 'step')} repeated; {measured} of {room}; {planned}"
            return PageAnswer(level="warn", text="It ran out and went on", more=more)
        if peak is None:
            return PageAnswer(level="good" if forecast.fits else "bad", text=f"{planned} of {room}", more=measured)
        level: Literal["good", "bad"] = "good" if peak <= forecast.budget_bytes else "bad"
        return PageAnswer(
            level=level, text=f"{gib(peak)} of {gib(forecast.budget_bytes)}", more=f"{planned}; {forecast.card}"
        )

    def peak_bytes(self) -> int | None:
        """The most that any instant measured: reserved on a card, resident on a CPU."""
        measured = [values.get("peak_bytes", 0) for values in self.series.instants.values()]
        return max(measured, default=0) or None

    def _eta_seconds(self, stage: Stage) -> float | None:
        pace = self.series.step_seconds
        return None if pace is None else pace * (stage.total_steps - self.series.step)

    def _end(self, stage: Stage, forecast: Forecast | None, eta: float | None, *, is_running: bool) -> PageAnswer:
        step = f"step {self.series.step:,} of {stage.total_steps:,}"
        planned = forecast and forecast.total_seconds
        plan = f"{duration(planned)} planned in all" if planned else ""
        if evaluating := describe_evaluating(self.where):
            return PageAnswer(level="good", text=f"{step}, then evaluation", more=evaluating.words)
        result = self._records.read(self.where.result, StageResult)
        if self.series.step >= stage.total_steps:
            took = f"{duration(result.seconds)} since its last start" if result else ""
            return PageAnswer(level="good", text="Trained", more="; ".join(filter(None, (step, took))))
        if not is_running:
            return PageAnswer(level="bad", text="It does not run", more=step)
        if eta is None:
            return PageAnswer(level="wait", text="Not known yet", more="; ".join(filter(None, (step, plan))))
        clock = time.strftime("%H:%M" if eta < 43200 else "%a %d %b %H:%M", time.localtime(time.time() + eta))
        more = "; ".join(filter(None, (step, plan)))
        return PageAnswer(level="good", text=f"In {duration(eta)}, at {clock}", more=more)

    def _checkpoints(self) -> list[Document]:
        folder = self.where.checkpoints
        named = {name: (folder / name).readlink().name for name in ("best", "final") if (folder / name).is_symlink()}
        values = self.series.validations.values.get("validation_loss", ())
        losses = dict(zip(self.series.validations.steps, values, strict=False))
        found = []
        for path in list_checkpoints(folder):
            with_names = [name for name, target in named.items() if target == path.name]
            stamp, written = stamp_of(path / MANIFEST), stamp_of(path)
            if written is None:  # a newer one has just taken its place
                continue
            known = self._sizes.get(path)
            if known is None or known[0] != stamp:
                try:
                    known = stamp, sum(size for size, _ in listed_files(path).values()), None
                except RunError as error:
                    known = stamp, None, error.problem
                self._sizes[path] = known
            _, size, problem = known
            loss = losses.get(step_of(path))
            about: Document = {"name": path.name, "step": step_of(path), "bytes": size, "problem": problem}
            about |= {"names": with_names, "validation_loss": _finite(loss)}
            found.append(about | {"time": written[0] / 1e9})
        return found

    def _saved(self, checkpoints: Sequence[Document]) -> Document | None:
        """The newest checkpoint that is as it was written, which a resumed run begins from. A large one is compared by
        the sizes of its files alone: its bytes are verified when it is read."""
        for one in reversed(checkpoints):
            path = self.where.checkpoints / one["name"]
            stamp = stamp_of(path / MANIFEST)
            known = self._verified.get(path)
            if known is None or known[0] != stamp:
                if one["bytes"] is not None and one["bytes"] <= _MAX_VERIFIED_BYTES:
                    found = problems(path)
                else:
                    found = [one["problem"]] if one["problem"] else wrong_sizes(path)
                known = self._verified[path] = stamp, found
            if not known[1]:
                how = "verified" if one["bytes"] <= _MAX_VERIFIED_BYTES else "complete"
                return {"name": one["name"], "how": how, "time": one["time"]}
        return None

    def _next(self, stage: Stage) -> list[str]:
        if self.series.step >= stage.total_steps:
            return []
        dues = {"save": stage.save.every}
        if stage.validate_every is not None:
            dues["validation"] = stage.validate_every
        said = [f"{what} {_when(every, self.series.step, stage)}" for what, every in dues.items()]
        if stage.evaluate:
            said.append(f"after the last step: evaluation on {', '.join(one.label for one in stage.evaluate)}")
        return said


def _when(every: Period, step: int, stage: Stage) -> str:
    if every.unit == "minutes":
        return f"every {every}"
    count = every.count if every.unit == "steps" else stage.steps_per_epoch
    return f"at step {min((step // count + 1) * count, stage.total_steps):,}"


def _best(results: Sequence[EvalResult], checkpoints: Sequence[Document]) -> PageAnswer:
    """By the first task's main metric, else by validation loss."""
    trained = [one for one in results if one.task == results[0].task and one.checkpoint != "base"] if results else []
    if trained:
        best = best_of(trained, None) or trained[-1]
        name = main_metric(best, None)
        metric, score = best.metric(name), best.metrics[name]
        value, low, high = (format_value(metric, one) for one in (score.value, score.low, score.high))
        base = next((one for one in results if one.task == best.task and one.checkpoint == "base"), None)
        more = f"{best.task} {name} {low} to {high}"
        if base is not None and name in base.metrics:
            more += f"; base {format_value(metric, base.metrics[name].value)}"
        return PageAnswer(level="good", text=f"{best.checkpoint}: {value}", more=more)
    for one in checkpoints:
        if "best" in one["names"]:
            loss = one["validation_loss"]
            return PageAnswer(
                level="good", text=one["name"], more="" if loss is None else f"validation loss {loss:.4f}"
            )
    if checkpoints:
        return PageAnswer(level="wait", text=checkpoints[-1]["name"], more="the newest; nothing has compared them yet")
    return PageAnswer(level="wait", text="Nothing is saved yet")


def _first_score(results: Sequence[EvalResult]) -> str:
    if not results:
        return ""
    name = main_metric(results[0], None)
    return f"{name} {format_value(results[0].metric(name), results[0].metrics[name].value)}"


def _last_step(metrics: Path) -> Document:
    """Empty if no step is near the end."""
    if not is_there(metrics):
        return {}
    with open_file(metrics) as descriptor:
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    lines = (parse_line(line) for line in reversed(text.splitlines()[1 if size > _TAIL_BYTES else 0 :]))
    for line in lines:
        if line is not None and "loss" in line and "event" not in line:
            numbers = {name: line.get(name) for name in ("step", "loss", "time")}
            return {name: value for name, value in numbers.items() if _finite(value) is not None}
    return {}


def _finite(value: Any) -> float | None:
    """None for whatever JSON cannot hold as a number."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def evaluations_document(results: Sequence[EvalResult]) -> list[Document]:
    def rows() -> Iterator[Document]:
        for result in results:
            same = [one for one in results if one.task == result.task]
            scores = []
            for name, score in result.metrics.items():
                metric = result.metric(name)
                value, low, high = (format_value(metric, one) for one in (score.value, score.low, score.high))
                scores.append({"name": name, "value": value, "low": low, "high": high})
            yield {
                "task": result.task,
                "checkpoint": result.checkpoint,
                "n": result.n,
                "available": result.available,
                "coverage": result.coverage,
                "scores": scores,
                "is_best": best_of(same, None) is result,
                "warnings": list(result.warnings),
            }

    return list(rows())


def item_document(item: EvalItem) -> Document:
    kept = ("item", "place", "prompt", "reference", "answer", "scores", "failure", "verdict", "answered_by", "is_cut")
    found = {name: getattr(item, name) for name in kept}
    return found | {"scores": {name: value for name, value in item.scores.items() if _finite(value) is not None}}


def is_wrong(item: EvalItem) -> bool:
    """Anything less than full marks in the first score."""
    return item.failure is not None or next(iter(item.scores.values()), 1.0) < 1.0


def _answer(answer: PageAnswer) -> Document:
    return {"level": answer.level, "text": answer.text, "more": answer.more}


def _event(event: Any) -> Document:
    return {"step": event.step, "kind": event.kind, "text": event.text, "time": event.time}
