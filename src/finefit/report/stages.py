"""The stages of a pipeline: what would run and why, what is in hand, and what came of it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from finefit.artifacts.lock import holder_of
from finefit.artifacts.pipelines import Done, PipelineState, StageMemory, StageState
from finefit.artifacts.records import Run, read_record
from finefit.artifacts.rundir import RunDir, StageDir, find_run, is_run
from finefit.artifacts.trainings import StageResult
from finefit.pipeline.making.kinds import lines_of
from finefit.pipeline.stage_choice import Choice
from finefit.report.board import boards
from finefit.report.ledger import ledger_lines
from finefit.report.live import RunView
from finefit.report.run import evals_of, result_lines
from finefit.report.units import clock, gib
from finefit.spec.load import pipeline_from_json
from finefit.spec.stages import Pipeline, needs

_ACTIONS = {"run": "would run", "done": "done", "reused": "reused"}


class StagesTeller:
    """Tells a terminal of the stages as they come; a training has its usual view."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console

    def begin(self, choice: Choice, number: int, count: int) -> None:
        self.say("")
        self.say(f"stage {number}/{count}  {choice.name} ({choice.kind}): {choice.reason}")

    def training(self, run: RunDir) -> RunView:
        for line in ledger_lines(run.stages()[0]):
            self.say(line)
        return RunView(run, self._console, log=run.log)

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def end(self, choice: Choice, done: Done) -> None:
        if choice.action != "run":
            self.say(f"stage {choice.name} ({choice.kind}) is {choice.action}: {choice.reason}")
            return
        if done.kind == "train":
            self._trained(RunDir(find_run(self._run.path / done.name)))
        for line in lines_of(done.kind, done.summary):
            self.say(f"  {line}")
        self.say(f"  {clock(done.seconds)}; {memory_words(done.memory)}")

    def _trained(self, run: RunDir) -> None:
        where = run.stages()[0]
        for line in result_lines(read_record(where.result, StageResult)):
            self.say(f"  {line}")
        if results := evals_of(where):
            self._console.print(boards(results, run))


def memory_words(memory: StageMemory | None) -> str:
    if memory is None:
        return "memory was not measured"
    where = "on the card" if memory.device == "cuda" else "in its processes"
    loaded = "" if memory.loaded_bytes is None else f"loaded {gib(memory.loaded_bytes)}, "
    peak = "" if memory.peak_bytes is None else f"peak {gib(memory.peak_bytes)}, "
    return f"memory {where}: before {gib(memory.before_bytes)}, {loaded}{peak}after {gib(memory.after_bytes)}"


def choices_table(pipeline: Pipeline, choices: Sequence[Choice]) -> Table:
    """The graph, and what would happen to each stage."""
    table = Table(title=f"stages of {pipeline.name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "kind", "stands on", "", "why"):
        table.add_column(column, overflow="fold")
    for choice in choices:
        below = ", ".join(needs(pipeline.stages[choice.name])) or "-"
        table.add_row(choice.name, choice.kind, below, _ACTIONS[choice.action], choice.reason)
    return table


def choices_document(pipeline: Pipeline, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {
            "stage": choice.name,
            "kind": choice.kind,
            "needs": list(needs(pipeline.stages[choice.name])),
            "action": choice.action,
            "why": choice.reason,
        }
        for choice in choices
    ]


def states_of(run: RunDir) -> list[StageState]:
    """A run that was killed had no time to say that it stopped."""
    states = read_record(run.state, PipelineState).stages
    is_held = holder_of(run.lock) is not None
    return [replace(one, status="stopped") if one.status == "running" and not is_held else one for one in states]


def done_of(run: RunDir, state: StageState) -> Done | None:
    path = StageDir(run.path / state.place).done
    return read_record(path, Done) if state.status == "done" and path.exists() else None


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


def _memory_cells(done: Done | None) -> list[str]:
    if done is None or done.memory is None:
        return ["-"] * 4
    values = (done.memory.before_bytes, done.memory.loaded_bytes, done.memory.peak_bytes, done.memory.after_bytes)
    return ["-" if value is None else f"{value / 2**30:.2f}" for value in values]


def _shown_place(run: RunDir, state: StageState) -> str:
    """As the user would type it: a stage of this run by its name."""
    return str(run.path / state.name) if state.place.startswith("stages/") else os.path.normpath(run.path / state.place)


def stages_document(run: RunDir) -> dict[str, Any]:
    """What `--json` prints of a pipeline's run."""
    record = read_record(run.run, Run)
    return {
        "run": str(run.path),
        "kind": record.kind,
        "status": record.status,
        "failure": None
        if record.failure is None
        else {k: getattr(record.failure, k) for k in ("kind", "problem", "remedy", "exit_code")},
        "stages": [_stage_document(run, state) for state in states_of(run)],
    }


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
    memory = done.memory and {
        key: getattr(done.memory, key)
        for key in ("device", "before_bytes", "loaded_bytes", "peak_bytes", "after_bytes")
    }
    return found | {
        "key": done.key,
        "output_digest": done.output_digest,
        "seconds": done.seconds,
        "memory": memory,
        "summary": done.summary,
    }


def show_stages_end(run: RunDir, console: Console) -> None:
    console.print()
    console.print(stages_table(run))
    for line in next_steps(run):
        console.print(line, highlight=False, soft_wrap=True)


def next_steps(run: RunDir) -> list[str]:
    """What there is to do with what was made, and with what was not."""
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


class StagesView:
    """A pipeline seen from another terminal: the stage in hand, with the usual view where it trains."""

    def __init__(self, run: RunDir, console: Console) -> None:
        self._run, self._console = run, console
        self._shown: dict[str, str] = {}
        self._view: RunView | None = None

    def __enter__(self) -> "StagesView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        self._close()

    def tick(self) -> None:
        for state in read_record(self._run.state, PipelineState).stages:
            if state.status != "waiting" and self._shown.get(state.name) != state.status:
                self._close()
                self._console.print(_state_line(self._run, state), highlight=False, soft_wrap=True)
                self._shown[state.name] = state.status
            if state.status == "running" and state.kind == "train":
                self._follow(RunDir(self._run.path / state.place))

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
    more = f"; {clock(done.seconds)}; {memory_words(done.memory)}" if done is not None else ""
    return f"stage {state.name} ({state.kind}) is {state.status}: {state.reason}{more}"
