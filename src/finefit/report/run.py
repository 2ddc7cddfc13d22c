"""A run on a terminal and as a document: which stages would run and why, the stage in progress, and the results. A run
of a flat spec is one training; a pipeline has a table of stages."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from finefit.artifacts.atomic import read_lines, read_steps, read_validations
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.processes import holder_of
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import (
    FinishedStage,
    PipelineState,
    Run,
    StageMemory,
    StageState,
    read_if_there,
    read_pipeline,
    read_record,
)
from finefit.artifacts.rundir import RunDir, StageDir, find_run, is_pipeline, is_run
from finefit.artifacts.stage_records import EvalResult, Stage, StageResult
from finefit.data.rows import read_items
from finefit.errors import OtherVersion
from finefit.report.check import ledger_lines
from finefit.report.layout import PLAIN_TABLE, clock, gib
from finefit.report.live import RunView, describe_validation
from finefit.report.plan import plan_view
from finefit.report.scores import change_tables, score_boards, scores_document, sorted_results
from finefit.report.stage_summary import summary_lines
from finefit.spec.models import CustomModel, Lora
from finefit.spec.pipeline import Pipeline, needs

if TYPE_CHECKING:
    from finefit.run.staleness import StageDecision

_FINISHED = ("key", "output_digest", "seconds", "memory", "summary")
_ACTIONS = {"run": "would run", "done": "done", "reused": "reused"}
_RESULT = ("step", "total_steps", "checkpoint", "trainable_parameters", "parameters", "tokens", "seconds", "peak_bytes")


def result_lines(result: StageResult) -> list[str]:
    share = result.trainable_parameters / result.parameters
    trained = f"trained {result.trainable_parameters:,} of {result.parameters:,} parameters ({share:.2%})"
    steps = f"{result.step} steps, {result.tokens:,} tokens; {clock(result.seconds)} since its last start"
    return [trained, f"{steps}; {_peak(result)}"]


def _peak(result: StageResult | EvalResult) -> str:
    """A plan assumes the longest rows, so a run may need less."""
    planned = "" if result.predicted_bytes is None else f", planned for {gib(result.predicted_bytes)}"
    return f"peak memory {gib(result.peak_bytes or 0)}{planned}"


def eval_memory_lines(results: Sequence[EvalResult]) -> list[str]:
    """The evaluation that took the most memory."""
    measured = [one for one in results if one.peak_bytes is not None]
    return [f"evaluation: {_peak(max(measured, key=lambda one: one.peak_bytes or 0))}"] if measured else []


def waited_share(where: StageDir) -> float:
    """The share of all steps' time that they waited for their rows."""
    steps = read_steps(where.metrics)
    seconds = sum(step.get("seconds", 0.0) for step in steps)
    return float(sum(step.get("wait_seconds", 0.0) for step in steps) / seconds) if seconds else 0.0


def last_validation(where: StageDir) -> dict[str, Any] | None:
    """The values found, and the step."""
    found = list(read_validations(where.metrics))
    return {name: value for name, value in found[-1].items() if name != "event"} if found else None


def evals_of(where: StageDir) -> list[EvalResult]:
    """The evaluations of this version; others are scored again when they are requested."""
    results = []
    for paths in where.evaluations():
        with suppress(OtherVersion):
            if is_there(paths.result):
                results.append(read_record(paths.result, EvalResult))
    return sorted_results(results)


class ConsoleProgress:
    """Shows the stages of a run as they come; a training has a live view."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console

    def start(self) -> None:
        self.say(f"run      {self._run.path}")
        if not is_pipeline(self._run.path):
            self._console.print(plan_view(read_record(self._run.plan, Plan), self._run.plan))

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


def decisions_table(pipeline: Pipeline, decisions: "Sequence[StageDecision]") -> Table:
    table = Table(title=f"stages of {pipeline.name}", **PLAIN_TABLE)
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


def run_document(run: RunDir) -> dict[str, Any]:
    """The output of `--json` for a run."""
    record = read_record(run.run, Run)
    failure = record.failure and asdict(record.failure)
    shared = {"run": str(run.path), "kind": record.kind, "status": record.status, "failure": failure}
    if is_pipeline(run.path):
        stages = []
        for state in states_of(run):
            place = {"why": state.reason, "place": _place_of(run, state)}
            stages.append({"stage": state.name, "kind": state.kind, "status": state.status, **place})
            if (done := done_of(run, state)) is not None:
                recorded = asdict(done)
                stages[-1] |= {key: recorded[key] for key in _FINISHED}
        return shared | {"stages": stages}
    where = run.stages()[0]
    result = (read_record if record.status == "finished" and record.kind == "train" else read_if_there)(
        where.result, StageResult
    )
    return shared | {
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


def show_end(run: RunDir, console: Console) -> None:
    if is_pipeline(run.path):
        console.print()
        console.print(_stages_table(run))
        width = max(len(state.name) for state in states_of(run)) + 2
        for state in states_of(run):  # below the table, where a path is not folded and can be copied
            console.print(f"{state.name:<{width}}{_place_of(run, state)}", highlight=False, soft_wrap=True)
        for line in _next_steps(run):
            console.print(line, highlight=False, soft_wrap=True)
        return
    where = run.stages()[0]
    if is_there(where.eval_stage):
        console.print(score_boards(evals_of(where), run))
        console.print(f"run      {run.path}", highlight=False, soft_wrap=True)
        return
    for line in result_lines(read_record(where.result, StageResult)):
        console.print(line, highlight=False)
    console.print(f"{waited_share(where):.1%} of the time was spent waiting for data", highlight=False)
    if (found := last_validation(where)) is not None:
        console.print(f"{describe_validation(found)} at step {found['step']}", highlight=False)
    results = evals_of(where)
    if results:
        console.print(score_boards(results, run))
    for line in eval_memory_lines(results):
        console.print(line, highlight=False)
    for line in (f"run      {run.path}", *_model_lines(where)):
        console.print(line, highlight=False, soft_wrap=True)
    evaluated = [f"finefit eval {run.path} --checkpoint all"] if results else []
    for line in _as_next([*evaluated, *_taking(run, where)]):
        console.print(line, highlight=False, soft_wrap=True)


def _model_lines(where: StageDir) -> list[str]:
    """Where the model is, and what loads it."""
    stage = read_record(where.stage, Stage)
    if isinstance(stage.model, CustomModel):
        use = f"{stage.model.file} loads it"
    elif isinstance(stage.tuning, Lora):
        use = f"an adapter of {stage.model_name}: load it with peft, or export it merged"
    else:
        use = "whole weights: transformers and vLLM load the folder"
    return [f"model    {where.checkpoints / 'final'}", f"         {use}"]


def _taking(run: RunDir, where: StageDir) -> list[str]:
    """Commands that use the model elsewhere. A model of the user's own code has no other program."""
    if isinstance(read_record(where.stage, Stage).model, CustomModel):
        return []
    return [f"finefit chat {run.path}", f"finefit export {run.path} --to merged,gguf:q8_0"]


def _as_next(commands: Sequence[str]) -> list[str]:
    return [f"{'next' if at == 0 else '':9}{command}" for at, command in enumerate(commands)]


def status_of(run: RunDir) -> str:
    """A run that was killed had no time to record that it stopped."""
    recorded = read_record(run.run, Run).status
    return "stopped" if recorded == "running" and holder_of(run.lock) is None else recorded


def states_of(run: RunDir) -> list[StageState]:
    """A run that was killed had no time to record that it stopped."""
    states = read_record(run.state, PipelineState).stages
    is_held = holder_of(run.lock) is not None
    return [replace(one, status="stopped") if one.status == "running" and not is_held else one for one in states]


def done_of(run: RunDir, state: StageState) -> FinishedStage | None:
    path = StageDir(run.path / state.place).done
    return read_if_there(path, FinishedStage) if state.status == "done" else None


def _stages_table(run: RunDir) -> Table:
    table = Table(title="stages; memory in GiB", **PLAIN_TABLE)
    for column in ("stage", "kind", "status"):
        table.add_column(column, no_wrap=True)
    for column in ("time", "before", "loaded", "peak", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for state in states_of(run):
        done = done_of(run, state)
        time = "-" if done is None else clock(done.seconds)
        held = None if done is None else done.memory
        sizes = (held.before_bytes, held.loaded_bytes, held.peak_bytes, held.after_bytes) if held else (None,) * 4
        cells = ("-" if size is None else f"{size / 2**30:.2f}" for size in sizes)
        table.add_row(state.name, state.kind, state.status, time, *cells)
    return table


def _place_of(run: RunDir, state: StageState) -> str:
    """The folder of the stage's output, whichever run made it."""
    place = Path(os.path.normpath(run.path / state.place))
    return str(StageDir(place).output if StageDir(place).output.is_dir() else place)


def _next_steps(run: RunDir) -> list[str]:
    """Commands that make sense after what was done, and for what was not done."""
    states = states_of(run)
    pipeline = read_pipeline(run)
    done = {state.name: pipeline.stages[state.name] for state in states if state.status == "done"}
    trained = [name for name, stage in done.items() if stage.kind == "train" and stage.evaluate]
    scored = [name for name, stage in done.items() if stage.kind == "evaluate" and len(stage.models) > 1]
    found = [f"finefit run {run.path}"] if len(done) < len(states) else []
    found += [f"finefit compare {run.path / name}" for name in scored]
    if len(trained) > 1:
        found.append(f"finefit review {run.path / trained[-2]} {run.path / trained[-1]}")
    return _as_next(found)


class RunWatch:
    """Follows a run that another process works on: its training, or the stage in progress with its live view."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console
        self._shown: dict[str, str] = {}
        self._view: RunView | None = None

    def __enter__(self) -> "RunWatch":
        self.tick()
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()
        self._close()

    def tick(self) -> None:
        if not is_pipeline(self._run.path):
            return self._follow(self._run)
        for state in read_record(self._run.state, PipelineState).stages:
            if state.status != "waiting" and self._shown.get(state.name) != state.status:
                self._close()
                done = done_of(self._run, state)
                more = f"; {clock(done.seconds)}; {format_memory(done.memory)}" if done is not None else ""
                line = f"stage {state.name} ({state.kind}) is {state.status}: {state.reason}{more}"
                self._console.print(line, highlight=False, soft_wrap=True)
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


def show_change(run: RunDir, console: Console) -> None:
    """What a demo run changed: base against fine-tuned, with answers side by side."""
    where = run.stages()[0]
    result, evaluation = read_record(where.result, StageResult), read_record(where.stage, Stage).evaluate[0]
    base, tuned = (
        read_record(where.evaluation(evaluation.label, checkpoint, evaluation.limit).result, EvalResult)
        for checkpoint in ("base", str(result.checkpoint))
    )
    for line in result_lines(result):
        console.print(line)
    messages = [row.prompt[-1].content for row in read_items(where.prepared("test.jsonl"))]
    for table in change_tables(base, tuned, messages):
        console.print(table)
    console.print(f"run      {run.path}\nmodel    {where.checkpoints / 'final'}", soft_wrap=True)
    following = "(then put your own rows in, and: finefit run my-demo/spec.yaml)"
    for line in _as_next([*_taking(run, where), f"finefit recipes demo --to my-demo   {following}"]):
        console.print(line, soft_wrap=True)
