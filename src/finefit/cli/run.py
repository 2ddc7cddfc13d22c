"""`finefit run`: fine-tunes what a spec describes; the same command again resumes where it stopped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.console import (
    AsJson,
    New,
    Runs,
    Set,
    announce_code,
    open_console,
    planning,
    print_json,
    set_torch_variables,
)
from finefit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed.distributed_c10d import Store

    from finefit.artifacts.processes import RankEnv
    from finefit.artifacts.rundir import RunDir
    from finefit.run.command import RunArgs, RunCommand

_DETACH = "Keep running without this terminal; follow it with `finefit watch`."
_WEB = "Show the run on a local page as long as this command runs; `finefit watch RUN --web` shows it at any time."
_FROM = "Run this stage again, and all that depend on it."
_FORCE = "Run this stage again; `all` for all stages."


def run(
    target: Annotated[Path, typer.Argument(metavar="SPEC_OR_RUN", help="A spec file, or a run directory to continue.")],
    overrides: Set = None,
    new: New = False,
    detach: Annotated[bool, typer.Option("--detach", help=_DETACH)] = False,
    first: Annotated[str | None, typer.Option("--from", metavar="STAGE", help=_FROM)] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Run only this stage.")] = None,
    force: Annotated[list[str] | None, typer.Option("--force", metavar="STAGE", help=_FORCE)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which stages would run, and why.")] = False,
    web: Annotated[bool, typer.Option("--web", help=_WEB)] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune. The same command again resumes, bit for bit; finished stages of a pipeline are not repeated.

    Examples:

      finefit run spec.yaml

      finefit run spec.yaml --set optimizer.lr=1e-4 --new

      finefit run runs/orders-1 --set schedule.epochs=2

      finefit run medical.yaml --dry-run

      finefit run medical.yaml --from dpo

      torchrun --nproc-per-node 2 -m finefit run spec.yaml
    """
    from finefit.artifacts.processes import rank_env_of
    from finefit.artifacts.rundir import find_run
    from finefit.spec.load import load_pipeline

    if web and detach:
        raise UserError(
            "--web ends with this command, and --detach ends it at once", "finefit watch RUN --web follows it"
        )
    rank, target = rank_env_of(os.environ), find_run(target)
    # before torch is imported, so that a misspelt key is reported at once
    pipeline = None if target.is_dir() else load_pipeline(target, overrides or ())
    if rank is not None and rank.size > 1:
        set_torch_variables()
    from finefit.run.command import RunArgs, StageSelection, read_command

    selection = StageSelection(first=first, only=only, force=tuple(force or ()))
    args = RunArgs(target=target, overrides=tuple(overrides or ()), new=new, runs=runs, selection=selection)
    command, console = read_command(args, pipeline), open_console(as_json=as_json)
    if dry_run:
        return _show_decisions(command, console, as_json)
    if rank is not None:
        _require_rank(command, rank, detach=detach)
        if rank.size > 1:
            raise typer.Exit(run_rank(args, as_json=as_json, command=command))
    if command.pipeline.is_flat and command.pipeline.flat_spec.launcher.kind == "slurm":
        return _submit(command, console, as_json)
    place = open_place(command, console)
    if detach and _detach(command, place, console, as_json):
        return None
    with _page(place, as_json=as_json) if web else nullcontext():
        carry_out(command, place, console)
    return _show(place, console, as_json)


@contextmanager
def _page(place: "RunDir", *, as_json: bool) -> Iterator[None]:
    """The page is a process of its own, which ends with this one."""
    watch = ["finefit", "watch", str(place.path), "--web"]
    command = [sys.executable, "-P", "-m", "finefit.artifacts.processes", str(os.getpid()), *watch]
    page = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr if as_json else None)
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def open_place(command: "RunCommand", console: "Console", *, nodes: int | None = None) -> "RunDir":
    from finefit.artifacts.records import Run, read_record, read_spec
    from finefit.artifacts.rundir import other_version, runs_named
    from finefit.run.command import find_or_create

    if command.run is None or not command.pipeline.is_flat:
        announce_code(command.pipeline, command.base, console)
    else:  # a training keeps a copy of the user's code, which its own record names
        announce_code(read_spec(command.run), command.run.path, console)
    with planning("reading models and data, and planning every stage", console):
        place = find_or_create(command, nodes=nodes)
    if command.run is None and read_record(place.run, Run).status == "prepared":
        for run in runs_named(command.args.runs, command.pipeline.name):
            if other := other_version(run.path):
                console.print(f"{run.path} has {other}: it is not resumed", soft_wrap=True)
    return place


def carry_out(command: "RunCommand", place: "RunDir", console: "Console") -> None:
    from finefit.report.run import ConsoleProgress
    from finefit.run.command import carry_out as run_pending

    if run_pending(command, place, ConsoleProgress(place, console)):
        return
    remedy = "--new starts another run"
    if not command.pipeline.is_flat:
        remedy += ", --from STAGE runs a stage and all that depend on it again"
    elif command.run is not None:
        remedy = "--set schedule.epochs=N trains it further"
    console.print(f"{place.path} is already finished; {remedy}", soft_wrap=True)


def _show(place: "RunDir", console: "Console", as_json: bool) -> None:
    from finefit.report.run import run_document, show_end

    if as_json:
        print_json(run_document(place))
    else:
        show_end(place, console)


def _show_decisions(command: "RunCommand", console: "Console", as_json: bool) -> None:
    from finefit.report.run import decisions_document, decisions_table
    from finefit.run.command import dry_run

    with console.status("reading models and data"):
        stages, decisions = dry_run(command)
    run = None if stages.run is None else str(stages.run.path)
    if as_json:
        print_json({"run": run, "stages": decisions_document(stages.pipeline, decisions)})
    else:
        console.print(decisions_table(stages.pipeline, decisions))
        console.print(f"in       {run or 'a new run'}; nothing was started", soft_wrap=True)


def _detach(command: "RunCommand", place: "RunDir", console: "Console", as_json: bool) -> bool:
    """Returns False if nothing is left to do."""
    from finefit.run.command import detach

    pid = detach(command, place)
    if pid is None:
        return False
    if as_json:
        print_json({"run": str(place.path), "pid": pid, "status": "running"})
    else:
        text = f"process {pid} keeps running without this terminal\nnext     finefit watch {place.path}"
        console.print(text, highlight=False, soft_wrap=True)
    return True


def _submit(command: "RunCommand", console: "Console", as_json: bool) -> None:
    """The job runs this same command, with each of its tasks as a rank."""
    from finefit.run.command import amend_now
    from finefit.run.slurm import RankTask, require_inputs, require_scheduler, submit

    args, spec = command.args, command.pipeline.flat_spec
    require_scheduler()
    if command.run is not None:  # changes are applied now, so that forbidden ones are refused before the job waits
        for line in amend_now(command, command.run):
            console.print(line, soft_wrap=True)
        args = replace(args, overrides=())
    else:
        require_inputs(spec, command.base)
    args = replace(args, target=args.target.resolve(), runs=args.runs.resolve())
    task = RankTask(partial(run_rank, args), partial(run_rank, replace(args, new=False)))
    sent = submit(spec, task, folder=args.runs / "slurm")
    if as_json:
        return print_json({"job": sent.job, "status": "queued", "log": str(sent.log), "script": str(sent.script)})
    queued = f"{sent.job} is queued; it saves before its time is up, and is queued again until it is done"
    follow = f"next     squeue -j {sent.job}\n         tail -F {sent.log}"
    return console.print(f"job      {queued}\nscript   {sent.script}\n{follow}", soft_wrap=True)


def _require_rank(command: "RunCommand", rank: "RankEnv", *, detach: bool) -> None:
    from finefit.errors import RunError
    from finefit.run.external_launch import engine_overrides

    if not command.pipeline.is_flat:
        problem = f"has stages, but this process is rank {rank.rank} of {rank.size}, started from outside"
        remedy = "call `finefit run` directly: each stage starts its own ranks (engine.devices)"
        raise RunError(f"{command.args.target} {problem}", remedy)
    if rank.size == 1:  # the only rank that was started from outside starts no others
        engine_overrides(command.pipeline.flat_spec.engine, rank)
    elif detach:
        problem = f"--detach cannot be combined with ranks that were started from outside (WORLD_SIZE={rank.size})"
        raise RunError(problem, "detach the launcher that started them instead")


def run_rank(args: "RunArgs", *, as_json: bool = False, command: "RunCommand | None" = None) -> int:
    """Returns the exit code of a rank other than the first; an error of the first rank is raised. `command`: the parsed
    `args`, if they are parsed already."""
    from finefit.artifacts.processes import rank_env_of

    rank = rank_env_of(os.environ)
    assert rank is not None
    set_torch_variables()
    from finefit.report.run import ConsoleProgress
    from finefit.run.command import carry_out, read_command
    from finefit.run.external_launch import Rendezvous, engine_overrides, leave, train_as_first_rank
    from finefit.train.ranks import RENDEZVOUS_TIMEOUT, open_store

    store = open_store(rank, timeout=RENDEZVOUS_TIMEOUT)
    if rank.rank != 0:
        return _other_rank(rank, store)
    try:
        console = open_console(as_json=as_json)
        with Rendezvous(store=store) as rendezvous:
            command = command or read_command(args)
            if command.run is None and (more := engine_overrides(command.pipeline.flat_spec.engine, rank)):
                command = read_command(replace(args, overrides=(*args.overrides, *more)))
            place = open_place(command, console, nodes=rank.num_nodes)
            train = train_as_first_rank(rank, store, rendezvous)
            carry_out(command, place, ConsoleProgress(place, console), train=train)
        _show(place, console, as_json)
    finally:
        leave(store)
    return 0


def _other_rank(rank: "RankEnv", store: "Store") -> int:
    """Its failure is recorded in the run directory for rank 0, and summarised here."""
    from finefit.artifacts.records import Failure
    from finefit.artifacts.rundir import RunDir
    from finefit.errors import Interrupted
    from finefit.run.external_launch import await_run, leave_after_first, work_here

    found = await_run(store, rank)
    code = found.exit_code if isinstance(found, Failure) else 0
    if isinstance(found, RunDir):
        code = work_here(found, rank, store)
        if code not in (0, Interrupted.exit_code):
            typer.echo(f"rank {rank.rank} ended with code {code}: see {found.log_of(rank.rank)}", err=True)
    if code:
        leave_after_first(store)
    return code
