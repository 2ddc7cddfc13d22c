"""A run on a terminal and as a document: the plan of a training, which stages would run and why, the stage in progress,
and the results. A run of a flat spec is one training; a pipeline has a table of stages."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from finefit.artifacts.atomic import read_lines, read_steps
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.processes import holder_of
from finefit.artifacts.records import FinishedStage, PipelineState, Run, StageMemory, StageState, read_record
from finefit.artifacts.rundir import RunDir, StageDir, find_run, is_pipeline, is_run
from finefit.artifacts.stage_records import EvalItem, EvalResult, Stage, StageResult
from finefit.data.rows import read_items
from finefit.errors import RunError
from finefit.report.check import ledger_lines
from finefit.report.events import describe_validation
from finefit.report.forecast import tower_lines
from finefit.report.layout import clock, gib
from finefit.report.live import RunView
from finefit.report.scores import format_n, format_value, metric_of, score_boards, scores_document, sorted_results
from finefit.report.stage_summary import summary_lines
from finefit.spec.load import pipeline_from_json
from finefit.spec.pipeline import Pipeline, needs

if TYPE_CHECKING:
    from finefit.run.staleness import StageDecision


_RESULT = ("step", "total_steps", "checkpoint", "trainable_parameters", "parameters", "tokens", "seconds", "peak_bytes")


def plan_view(plan: Plan) -> RenderableType:
    """Every value with its source: decisions in a table, values of the spec and defaults in a
    paragraph each."""
    parts: list[RenderableType] = []
    for name, values in plan.stages.items():
        table = Table(
            title=f"stage {name}, decided", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
        )
        for key, resolved in values.items():
            if resolved.source not in ("spec", "default"):
                table.add_row(key, _shown(resolved), Text(resolved.source, style="dim"))
        parts += [table, _paragraph("from the spec", "spec", values), _paragraph("defaults", "default", values)]
    towers = (line for forecast in plan.forecasts.values() for line in tower_lines(forecast.towers))
    return Group(*parts, *(Text(f"tower    {line}") for line in towers))


def _paragraph(title: str, source: str, values: dict[str, Resolved]) -> Text:
    return Text(
        f"{title}: " + ", ".join(f"{key} {_shown(r)}" for key, r in values.items() if r.source == source), style="dim"
    )


def _shown(resolved: Resolved) -> str:
    return resolved.value if isinstance(resolved.value, str) else json.dumps(resolved.value, ensure_ascii=False)


def result_lines(result: StageResult) -> list[str]:
    share = result.trainable_parameters / result.parameters
    return [
        f"trained {result.trainable_parameters:,} of {result.parameters:,} parameters ({share:.2%})",
        (
            f"{result.step} steps, {result.tokens:,} tokens; {clock(result.seconds)} since it was last started; "
            f"peak memory {gib(result.peak_bytes)}"
        ),
    ]


def waited_share(where: StageDir) -> float:
    """Of the time of all steps, what they waited for their rows."""
    steps = read_steps(where.metrics)
    seconds = sum(step["seconds"] for step in steps)
    return float(sum(step.get("wait_seconds", 0.0) for step in steps) / seconds) if seconds else 0.0


def last_validation(where: StageDir) -> dict[str, Any] | None:
    """What was found, and at which step."""
    found = [line for line in read_lines(where.metrics) if line.get("event") == "validated"]
    return {name: value for name, value in found[-1].items() if name != "event"} if found else None


def evals_of(where: StageDir) -> list[EvalResult]:
    """Those that this version can read; others are scored again when they are asked for."""
    return sorted_results(result for paths in where.evaluations() if (result := _readable(paths.result)) is not None)


def _readable(path: Path) -> EvalResult | None:
    try:
        return read_record(path, EvalResult) if path.exists() else None
    except RunError:
        return None


def training_document(run: RunDir) -> dict[str, Any]:
    """What `--json` prints of a training, beside what it prints of every run."""
    where = run.stages()[0]
    result = read_record(where.result, StageResult) if where.result.exists() else None
    return {
        "checkpoints": str(where.checkpoints),
        "plan": {
            stage: {key: {"value": r.value, "source": r.source} for key, r in values.items()}
            for stage, values in read_record(run.plan, Plan).stages.items()
        },
        "ledger": [line for line in read_lines(where.ledger) if "read" in line],
        "result": None if result is None else {key: getattr(result, key) for key in _RESULT},
        "loss": next((line["loss"] for line in reversed(read_steps(where.metrics))), None),
        "validation": last_validation(where),
        "waited_share": waited_share(where),
        "evaluations": scores_document(evals_of(where), where),
    }


def show_training(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    for line in result_lines(read_record(where.result, StageResult)):
        console.print(line, highlight=False)
    console.print(f"{waited_share(where):.1%} of the time was spent waiting for rows", highlight=False)
    if (found := last_validation(where)) is not None:
        console.print(f"{describe_validation(found)} at step {found['step']}", highlight=False)
    results = evals_of(where)
    if results:
        console.print(score_boards(results, run))
    console.print(f"run      {run.path}\nmodel    {where.checkpoints / 'final'}", highlight=False, soft_wrap=True)
    if results:
        console.print(f"next     finefit eval {run.path} --checkpoint all", highlight=False, soft_wrap=True)


_ACTIONS = {"run": "would run", "done": "done", "reused": "reused"}


class ConsoleProgress:
    """Shows the stages of a run as they come; a training has a live view."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console

    def start(self) -> None:
        self.say(f"run      {self._run.path}")
        if not is_pipeline(self._run.path):
            self._console.print(plan_view(read_record(self._run.plan, Plan)))

    def begin(self, decision: "StageDecision", number: int, count: int) -> None:
        self.say("")
        self.say(f"stage {number}/{count}  {decision.name} ({decision.kind}): {decision.reason}")

    def training(self, run: RunDir) -> RunView:
        for line in ledger_lines(run.stages()[0]):
            self.say(line)
        return RunView(run, self._console, log=run.log)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def end(self, decision: "StageDecision", done: FinishedStage) -> None:
        if decision.action != "run":
            self.say(f"stage {decision.name} ({decision.kind}) is {decision.action}: {decision.reason}")
            return
        if done.kind == "train":
            run = RunDir(find_run(self._run.path / done.name))
            where = run.stages()[0]
            for line in result_lines(read_record(where.result, StageResult)):
                self.say(f"  {line}")
            if results := evals_of(where):
                self._console.print(score_boards(results, run))
        for line in summary_lines(done.kind, done.summary):
            self.say(f"  {line}")
        self.say(f"  {clock(done.seconds)}; {format_memory(done.memory)}")


def format_memory(memory: StageMemory | None) -> str:
    if memory is None:
        return "memory was not measured"
    where = "on the card" if memory.device == "cuda" else "in its processes"
    loaded = "" if memory.loaded_bytes is None else f"loaded {gib(memory.loaded_bytes)}, "
    peak = "" if memory.peak_bytes is None else f"peak {gib(memory.peak_bytes)}, "
    return f"memory {where}: before {gib(memory.before_bytes)}, {loaded}{peak}after {gib(memory.after_bytes)}"


# before a run


def decisions_table(pipeline: Pipeline, decisions: "Sequence[StageDecision]") -> Table:
    """The graph, and what would happen to each stage."""
    table = Table(title=f"stages of {pipeline.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "kind", "depends on", "", "why"):
        table.add_column(column, overflow="fold")
    for decision in decisions:
        below = ", ".join(needs(pipeline.stages[decision.name])) or "-"
        table.add_row(decision.name, decision.kind, below, _ACTIONS[decision.action], decision.reason)
    return table


def decisions_document(pipeline: Pipeline, decisions: "Sequence[StageDecision]") -> list[dict[str, Any]]:
    return [
        {
            "stage": decision.name,
            "kind": decision.kind,
            "needs": list(needs(pipeline.stages[decision.name])),
            "action": decision.action,
            "why": decision.reason,
        }
        for decision in decisions
    ]


# after a run


def run_document(run: RunDir) -> dict[str, Any]:
    """What `--json` prints of a run."""
    record = read_record(run.run, Run)
    return {
        "run": str(run.path),
        "kind": record.kind,
        "status": record.status,
        "failure": record.failure and asdict(record.failure),
        **(
            {"stages": [_stage_document(run, state) for state in states_of(run)]}
            if is_pipeline(run.path)
            else training_document(run)
        ),
    }


def show_end(run: RunDir, console: Console) -> None:
    if not is_pipeline(run.path):
        return show_training(run, console)
    console.print()
    console.print(stages_table(run))
    for line in next_steps(run):
        console.print(line, highlight=False, soft_wrap=True)
    return None


def states_of(run: RunDir) -> list[StageState]:
    """A run that was killed had no time to record that it stopped."""
    states = read_record(run.state, PipelineState).stages
    is_held = holder_of(run.lock) is not None
    return [replace(one, status="stopped") if one.status == "running" and not is_held else one for one in states]


def done_of(run: RunDir, state: StageState) -> FinishedStage | None:
    path = StageDir(run.path / state.place).done
    return read_record(path, FinishedStage) if state.status == "done" and path.exists() else None


def stages_table(run: RunDir) -> Table:
    table = Table(title="stages; memory in GiB", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "kind", "status"):
        table.add_column(column, no_wrap=True)
    for column in ("time", "before", "loaded", "peak", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    for state in states_of(run):
        done = done_of(run, state)
        time = "-" if done is None else clock(done.seconds)
        table.add_row(state.name, state.kind, state.status, time, *_memory_cells(done), _shown_place(run, state))
    return table


def _memory_cells(done: FinishedStage | None) -> list[str]:
    if done is None or done.memory is None:
        return ["-"] * 4
    values = (done.memory.before_bytes, done.memory.loaded_bytes, done.memory.peak_bytes, done.memory.after_bytes)
    return ["-" if value is None else f"{value / 2**30:.2f}" for value in values]


def _shown_place(run: RunDir, state: StageState) -> str:
    """As the user would type it: a stage of this run by its name."""
    return str(run.path / state.name) if state.place.startswith("stages/") else os.path.normpath(run.path / state.place)


def _stage_document(run: RunDir, state: StageState) -> dict[str, Any]:
    done = done_of(run, state)
    found: dict[str, Any] = {
        "stage": state.name,
        "kind": state.kind,
        "status": state.status,
        "why": state.reason,
        "place": _shown_place(run, state),
    }
    if done is None:
        return found
    return found | {
        "key": done.key,
        "output_digest": done.output_digest,
        "seconds": done.seconds,
        "memory": done.memory and asdict(done.memory),
        "summary": done.summary,
    }


def next_steps(run: RunDir) -> list[str]:
    """Commands that make sense after what was done, and for what was not."""
    states = states_of(run)
    pipeline = pipeline_from_json(run.spec_json.read_text(encoding="utf-8"))
    done = {state.name: pipeline.stages[state.name] for state in states if state.status == "done"}
    trained = [name for name, stage in done.items() if stage.kind == "train" and stage.evaluate]
    scored = [name for name, stage in done.items() if stage.kind == "evaluate" and len(stage.models) > 1]
    found = [f"finefit run {run.path}"] if len(done) < len(states) else []
    found += [f"finefit compare {run.path / name}" for name in scored]
    if len(trained) > 1:
        found.append(f"finefit review {run.path / trained[-2]} {run.path / trained[-1]}")
    return [f"{'next' if at == 0 else '':9}{line}" for at, line in enumerate(found)]


# seen from another terminal


class RunWatch:
    """Follows a run that another process works on: its training, or the stage in progress with its live view."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console
        self._shown: dict[str, str] = {}
        self._view: RunView | None = None

    def __enter__(self) -> "RunWatch":
        self.tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        self._close()

    def tick(self) -> None:
        if not is_pipeline(self._run.path):
            return self._follow(self._run)
        for state in read_record(self._run.state, PipelineState).stages:
            if state.status != "waiting" and self._shown.get(state.name) != state.status:
                self._close()
                self._console.print(_state_line(self._run, state), highlight=False, soft_wrap=True)
                self._shown[state.name] = state.status
            if state.status == "running" and state.kind == "train":
                self._follow(RunDir(self._run.path / state.place))
        return None

    def _follow(self, run: RunDir) -> None:
        if self._view is None and is_run(run.path):
            self._view = RunView(run, self._console).__enter__()
        if self._view is not None:
            self._view.tick()

    def _close(self) -> None:
        if self._view is not None:
            self._view.__exit__(None, None, None)
            self._view = None


def _state_line(run: RunDir, state: StageState) -> str:
    done = done_of(run, state)
    more = f"; {clock(done.seconds)}; {format_memory(done.memory)}" if done is not None else ""
    return f"stage {state.name} ({state.kind}) is {state.status}: {state.reason}{more}"


# What a demo run changed: base against fine-tuned, with answers side by side.

_NUM_SHOWN = 3
_MAX_TEXT = 240


def show_change(run: RunDir, console: Console) -> None:
    where = run.stages()[0]
    result, evaluation = read_record(where.result, StageResult), read_record(where.stage, Stage).evaluate[0]
    base, tuned = (
        read_record(where.evaluation(evaluation.label, checkpoint, evaluation.limit).result, EvalResult)
        for checkpoint in ("base", str(result.checkpoint))
    )
    for line in result_lines(result):
        console.print(line)
    console.print(_scores_table({"base": base, "fine-tuned": tuned}))
    messages = [row.prompt[-1].content for row in read_items(where.prepared("test.jsonl"))]
    pairs = list(zip(base.items, tuned.items, strict=True))
    for before, after in pairs[:: max(1, base.n // _NUM_SHOWN)][:_NUM_SHOWN]:  # evenly spaced, not chosen
        console.print(_side_by_side(messages[before.item], before, after))
    console.print(f"run      {run.path}\nmodel    {where.checkpoints / 'final'}", soft_wrap=True)
    console.print(
        "next     finefit recipes demo --to my-demo   (then put your own rows in, and: finefit run my-demo/spec.yaml)",
        soft_wrap=True,
    )


def _scores_table(results: dict[str, EvalResult]) -> Table:
    """All items count; a failure scores zero."""
    task = next(iter(results.values())).task
    table = Table(title=f"held-out items, task {task}", title_justify="left")
    for column in ("model", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "score", "95 % interval", "coverage"):
        table.add_column(column, justify="right", no_wrap=True)
    for model, result in results.items():
        for at, (name, score) in enumerate(result.metrics.items()):
            value, low, high = (
                format_value(metric_of(result, name), one) for one in (score.value, score.low, score.high)
            )
            label = model if at == 0 else ""
            table.add_row(label, name, format_n(result), value, f"{low} .. {high}", f"{result.coverage:.0%}")
    return table


def _side_by_side(message: str, before: EvalItem, after: EvalItem) -> Table:
    reference = Text(f"reference: {before.reference}")
    table = Table(title=Text(message), title_justify="left", caption=reference, caption_justify="left", expand=True)
    for column in ("base", "fine-tuned"):
        table.add_column(column, overflow="fold", ratio=1)
    table.add_row(_coloured(before), _coloured(after))
    return table


def _coloured(item: EvalItem) -> Text:
    is_right = all(score == 1.0 for score in item.scores.values())
    answer = " ".join(item.answer.split()) or "(empty)"
    shown = answer if len(answer) <= _MAX_TEXT else f"{answer[:_MAX_TEXT]} ..."
    return Text(shown, style="green" if is_right else "red")
