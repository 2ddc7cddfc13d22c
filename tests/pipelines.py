"""Pipelines of scripts, which cost no training, and of tiny trainings."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import FinishedStage, Run
from finefit.artifacts.rundir import RunDir
from finefit.run.command import RunArgs, StageSelection, amend_now, dry_run, find_or_create, read_command
from finefit.run.run_stages import View, run_stages
from finefit.run.staleness import StageDecision
from tests.conftest import make_project

ADD = """\
import sys
from pathlib import Path

source, target, *words = sys.argv[1:]
with open(Path(__file__).parent / "calls.txt", "a") as calls:
    calls.write(Path(target).name + "\\n")
Path(target).write_text(Path(source).read_text() + "".join(word + "\\n" for word in words))
"""
SCRIPTS = """\
name: chain
device: cpu
stages:
  first:
    kind: python
    script: add.py
    inputs: {raw: raw.txt}
    arguments: ["{raw}", "{output}/first.txt", one]
    outputs: [first.txt]
  second:
    kind: python
    script: add.py
    inputs: {before: stage://first/first.txt}
    arguments: ["{before}", "{output}/second.txt", two]
    outputs: [second.txt]
  third:
    kind: python
    script: add.py
    inputs: {before: stage://second/second.txt}
    arguments: ["{before}", "{output}/third.txt", three]
    outputs: [third.txt]
"""
TRAININGS = """\
name: chain
seed: 7
device: cpu
defaults:
  data: {train: [{path: train.jsonl}], test: {path: test.jsonl}}
  optimizer: {lr: 1e-2}
  global_batch: 4
  levers: {micro_batch: 2}
  save: {every: 2 steps, keep: 2}
stages:
  whole:
    kind: train
    model: {kind: folder, path: model}
    tuning: {kind: full}
  sft:
    kind: train
    model: {kind: stage, name: whole}
    tuning: {kind: lora, rank: 4, alpha: 8}
    schedule: {epochs: 10}
  more:
    kind: train
    model: {kind: stage, name: sft}
    tuning: {kind: lora, rank: 4, alpha: 8}
"""


def make_scripts(folder: Path, *, spec: str = SCRIPTS) -> Path:
    """A pipeline of three scripts, each adding a word to what the one before has written; every call is noted in
    calls.txt."""
    folder.mkdir(parents=True)
    (folder / "raw.txt").write_text("raw\n", encoding="utf-8")
    (folder / "add.py").write_text(ADD, encoding="utf-8")
    path = folder / "spec.yaml"
    path.write_text(spec, encoding="utf-8")
    return path


def make_trainings(folder: Path) -> Path:
    """Whole weights, then an adapter over them, then that adapter trained on."""
    return make_project(folder, spec=TRAININGS, rows=12)


def calls(folder: Path) -> list[str]:
    """What the scripts have been called for, and forgotten."""
    path = folder / "calls.txt"
    found = path.read_text(encoding="utf-8").split() if path.exists() else []
    path.unlink(missing_ok=True)
    return [name.removesuffix(".txt") for name in found]


class Heard:
    """What a run reports of its stages."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.said: list[str] = []

    def begin(self, decision: StageDecision, number: int, count: int) -> None:
        assert 1 <= number <= count
        self.begun.append(decision.name)

    def training(self, run: RunDir) -> AbstractContextManager[View]:
        raise AssertionError(f"nothing is trained here, and {run.path} would be")

    def say(self, line: str) -> None:
        self.said.append(line)

    def end(self, decision: StageDecision, done: FinishedStage) -> None:
        assert done.name == decision.name
        self.ended.append((decision.name, decision.action))


def _args(spec: Path, overrides: tuple[str, ...], *, new: bool = False, only: str | None = None) -> RunArgs:
    selection = StageSelection(only=only)
    return RunArgs(target=spec, overrides=overrides, new=new, runs=spec.parent / "runs", selection=selection)


def open_pipeline(
    spec: Path, *overrides: str, new: bool = False, only: str | None = None, runs: Path | None = None
) -> RunDir:
    """The run that `finefit run SPEC` would go on in, found or created."""
    args = _args(spec, overrides, new=new, only=only)
    command = read_command(args if runs is None else replace(args, runs=runs))
    run = find_or_create(command)
    amend_now(command, run)
    return run


def decisions(spec: Path, *overrides: str) -> dict[str, tuple[str, str]]:
    """What `finefit run SPEC --dry-run` says: action and reason of each stage."""
    _, found = dry_run(read_command(_args(spec, overrides)))
    return {decision.name: (decision.action, decision.reason) for decision in found}


def carry_out(run: RunDir, heard: Heard | None = None, *, forced: Collection[str] = (), only: str | None = None) -> Run:
    with run_lock(run.lock) as lock:
        return run_stages(run, heard or Heard(), lock=lock, forced=forced, only=only)
