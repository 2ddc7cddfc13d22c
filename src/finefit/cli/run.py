"""`finefit run`: fine-tune what a spec describes; the same command again goes on where it stopped."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finefit.cli.code import tell_code
from finefit.cli.console import open_console
from finefit.cli.options import AsJson, New, Runs, Set
from finefit.cli.run_stages import (
    Call,
    Wish,
    has_stages,
    open_place,
    refuse_changes,
    refuse_for_one,
    refuse_ranks,
    run_stages,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed.distributed_c10d import Store

    from finefit.artifacts.launcher import Place
    from finefit.artifacts.rundir import RunDir
    from finefit.pipeline.execute import Train
    from finefit.spec.schema import Spec

_TICK_SECONDS = 0.5


def run(
    target: Annotated[Path, typer.Argument(metavar="SPEC_OR_RUN", help="A spec file, or a run directory to go on in.")],
    overrides: Set = None,
    new: New = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on without this terminal; follow with `finefit watch`.")
    ] = False,
    first: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Make this stage again, and all that stand on it.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Carry out this stage alone.")] = None,
    force: Annotated[
        list[str] | None, typer.Option("--force", metavar="STAGE", help="Make this stage again; `all` for every one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell which stages would run, and why.")] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Fine-tune. The same command again resumes, bit for bit; of several stages those that are done are not repeated.

    Examples:

      finefit run spec.yaml

      finefit run spec.yaml --set optimizer.lr=1e-4 --new

      finefit run runs/orders-1 --set schedule.epochs=2

      finefit run medical.yaml --dry-run

      finefit run medical.yaml --from dpo

      torchrun --nproc-per-node 2 -m finefit run spec.yaml
    """
    from finefit.artifacts.launcher import find_place
    from finefit.artifacts.records import Run, read_record
    from finefit.artifacts.rundir import find_run

    at, target = find_place(os.environ), find_run(target)
    call = Call(
        target=target,
        overrides=tuple(overrides or ()),
        new=new,
        runs=runs,
        as_json=as_json,
        wish=Wish(first=first, only=only, force=tuple(force or ()), dry_run=dry_run),
    )
    if has_stages(call):
        return _run_stages(call, at, detach=detach)
    refuse_for_one(call.wish)
    refuse_changes(call)
    if at is not None and at.size > 1:
        return _as_rank(at, target, tuple(overrides or ()), new=new, detach=detach, runs=runs, as_json=as_json)
    if _is_for_slurm(target, tuple(overrides or ())):
        return _submit(target, tuple(overrides or ()), new=new, runs=runs, as_json=as_json)
    if at is not None:
        _require_one(target, tuple(overrides or ()), at)
    console = open_console(as_json=as_json)
    place = open_or_create(target, tuple(overrides or ()), new=new, runs=runs, console=console)
    if read_record(place.run, Run).status == "finished":
        remedy = "--set schedule.epochs=N trains it further" if target.is_dir() else "--new starts another run"
        console.print(f"{place.path} is finished already; {remedy}", soft_wrap=True)
    elif detach:
        return _detach(place, console, as_json)
    else:
        carry_out(place, console)
    _show(place, console, as_json)
    return None


def _run_stages(call: Call, at: "Place | None", *, detach: bool) -> None:
    refuse_ranks(call, at)
    if not detach or call.wish.dry_run:
        return run_stages(call)
    console = open_console(as_json=call.as_json)
    place = open_place(call, console)
    return _detach(place, console, call.as_json, call.wish.arguments())


def _show(place: "RunDir", console: "Console", as_json: bool) -> None:
    from finefit.report.run import evals_of, run_document, show_end

    if as_json:
        typer.echo(json.dumps(run_document(place), indent=2))
        return
    show_end(place, console)
    if evals_of(place.stages()[0]):
        console.print(f"next     finefit eval {place.path} --checkpoint all", soft_wrap=True)


def open_or_create(
    target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console", nodes: int | None = None
) -> "RunDir":
    """The run that this command means: the directory itself, the newest with the same digest, or a new one. `nodes`: that ranks were started on
    already."""
    if target.is_dir():
        return _from_run(target, overrides, new=new, console=console)
    return _from_spec(target, overrides, new=new, runs=runs, console=console, nodes=nodes)


def _from_run(target: Path, overrides: tuple[str, ...], *, new: bool, console: "Console") -> "RunDir":
    from finefit.artifacts.rundir import open_run
    from finefit.errors import RunError
    from finefit.spec.load import spec_from_json

    place = open_run(target)
    if new:
        raise RunError(
            "--new starts from a spec file, not from a run directory",
            f"give the spec file that {target} was started from",
        )
    tell_code(spec_from_json(place.spec_json.read_text(encoding="utf-8")), place.path, console)
    with console.status("comparing model and data with what the run began with"):
        from finefit.pipeline.resume import amend

        lines = amend(place, overrides)
    for line in lines:
        console.print(line, soft_wrap=True)
    return place


def _from_spec(
    target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, console: "Console", nodes: int | None
) -> "RunDir":
    from finefit.artifacts.rundir import newest_with_digest
    from finefit.spec.load import load_spec, whole_text

    spec = load_spec(target, overrides)  # before the heavy rooms: a misspelt key is told at once
    base = target.resolve().parent
    tell_code(spec, base, console)
    with console.status("reading model and data"):
        from finefit.pipeline.create import create_run
        from finefit.pipeline.inputs import open_inputs
        from finefit.pipeline.resume import follow

        opened = open_inputs(spec, base, (runs / spec.name).resolve(), nodes=nodes)
        earlier = None if new else newest_with_digest(runs, spec.name, opened.digest)
        if earlier is None:
            return create_run(opened, spec_text=whole_text(target), overrides=overrides, base=base, runs=runs)
        lines = follow(earlier, spec)
    for line in lines:
        console.print(line, soft_wrap=True)
    return earlier


def carry_out(place: "RunDir", console: "Console", *, train: "Train | None" = None) -> None:
    from finefit.artifacts.forecasts import Plan
    from finefit.artifacts.lock import run_lock
    from finefit.artifacts.records import read_record
    from finefit.pipeline.execute import execute
    from finefit.report.ledger import ledger_lines
    from finefit.report.live import RunView
    from finefit.report.run import plan_view

    with run_lock(place.lock):  # a run that another process works on is refused before anything is shown
        console.print(f"run      {place.path}", soft_wrap=True)
        console.print(plan_view(read_record(place.plan, Plan)))
        for line in ledger_lines(place.stages()[0]):
            console.print(line, soft_wrap=True)
    with RunView(place, console, log=place.log) as view:
        execute(place, tick=view.tick, warn=view.say, train=train)


def _as_rank(
    at: "Place", target: Path, overrides: tuple[str, ...], *, new: bool, detach: bool, runs: Path, as_json: bool
) -> None:
    """One of several ranks that torchrun, accelerate or SLURM has started: the first one speaks, the others follow it."""
    from finefit.errors import RunError

    if detach:
        raise RunError(
            f"--detach does not go with ranks that were started from outside (WORLD_SIZE={at.size})",
            "let what started them go on alone",
        )
    if code := be_rank(target, overrides, new=new, runs=runs, as_json=as_json):
        raise typer.Exit(code)


def be_rank(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, as_json: bool = False) -> int:
    """The exit code of a rank that follows; what stops the first is raised."""
    from finefit.artifacts.launcher import chosen_variables, find_place

    at = find_place(os.environ)
    assert at is not None
    for name, value in chosen_variables(os.environ, deterministic=False).items():
        os.environ.setdefault(name, value)  # before torch is imported
    from finefit.pipeline.outside import leave
    from finefit.train.meeting import PATIENCE
    from finefit.train.ranks import open_store

    store = open_store(at, patience=PATIENCE)
    if at.rank != 0:
        return _other_rank(at, store)
    try:
        _first_rank(at, store, target, overrides, new=new, runs=runs, as_json=as_json)
    finally:
        leave(store)
    return 0


def _require_one(target: Path, overrides: tuple[str, ...], at: "Place") -> None:
    """The only rank that was started from outside starts no others of its own."""
    from finefit.pipeline.outside import engine_overrides

    engine_overrides(_spec_of(target, overrides).engine, at)


def _is_for_slurm(target: Path, overrides: tuple[str, ...]) -> bool:
    return _spec_of(target, overrides).launcher.kind == "slurm"


def _spec_of(target: Path, overrides: tuple[str, ...]) -> "Spec":
    """As it is asked for now; of a run directory with all that it was asked before."""
    from finefit.artifacts.records import Run, read_record
    from finefit.artifacts.rundir import open_run
    from finefit.errors import RunError
    from finefit.spec.load import load_spec

    if not target.is_dir():
        return load_spec(target, overrides)
    place = open_run(target)
    record = read_record(place.run, Run)
    if record.kind == "eval":
        raise RunError(
            f"{target.name} holds an evaluation and nothing to train", f"`finefit eval {target}` goes on with it"
        )
    return load_spec(place.spec_yaml, (*record.overrides, *overrides))


def _submit(target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, as_json: bool) -> None:
    """The job gives this same command, each of its tasks as a rank."""
    from functools import partial

    from finefit.pipeline.slurm import RankTask, require_inputs, require_scheduler, submit

    spec, console = _spec_of(target, overrides), open_console(as_json=as_json)
    require_scheduler()
    if target.is_dir():  # what may change is taken over now, so that what may not is refused before it waits
        _from_run(target, overrides, new=new, console=console)
        overrides = ()
    else:
        require_inputs(spec, target.resolve().parent)
    call, again = (
        partial(be_rank, target.resolve(), overrides, new=is_new, runs=runs.resolve()) for is_new in (new, False)
    )
    sent = submit(spec, RankTask(call, again), folder=runs.resolve() / "slurm")
    if as_json:
        typer.echo(
            json.dumps(
                {"job": sent.job, "status": "queued", "log": str(sent.log), "script": str(sent.script)}, indent=2
            )
        )
        return
    console.print(
        f"job      {sent.job} is queued; it saves before its time is up, and is queued again until it is done",
        soft_wrap=True,
    )
    console.print(f"script   {sent.script}", soft_wrap=True)
    console.print(f"next     squeue -j {sent.job}\n         tail -F {sent.log}", soft_wrap=True)


def _first_rank(
    at: "Place", store: "Store", target: Path, overrides: tuple[str, ...], *, new: bool, runs: Path, as_json: bool
) -> None:
    from finefit.artifacts.records import Run, read_record
    from finefit.pipeline.outside import Invitation, engine_overrides, first_of_all
    from finefit.spec.load import load_spec

    console = open_console(as_json=as_json)
    with Invitation(store=store) as invitation:
        if not target.is_dir():
            overrides = (*overrides, *engine_overrides(load_spec(target, overrides).engine, at))
        place = open_or_create(target, overrides, new=new, runs=runs, console=console, nodes=at.num_nodes)
        if read_record(place.run, Run).status != "finished":
            carry_out(place, console, train=first_of_all(at, store, invitation))
    _show(place, console, as_json)


def _other_rank(at: "Place", store: "Store") -> int:
    """Its failure goes to the first rank through the run directory, and in short to whoever reads this terminal."""
    from finefit.errors import Interrupted
    from finefit.pipeline.outside import await_invitation, leave_after_first, work_here

    word = await_invitation(store, at)
    code = word.failure.exit_code if word.failure is not None else 0
    if word.run is not None:
        code = work_here(word.run, at, store)
        if code not in (0, Interrupted.exit_code):
            typer.echo(f"rank {at.rank} ended with code {code}: see {word.run.log_of(at.rank)}", err=True)
    if code:
        leave_after_first(store)
    return code


def _detach(place: "RunDir", console: "Console", as_json: bool, arguments: Sequence[str] = ()) -> None:
    from finefit.artifacts.lock import run_lock

    with run_lock(place.lock):  # one that is being worked on is refused here, not in a log that nobody reads
        pass
    with (place.log.parent / "detached.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "finefit", "run", str(place.path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _wait_until_it_works(process, place)
    if as_json:
        typer.echo(json.dumps({"run": str(place.path), "pid": process.pid, "status": "running"}, indent=2))
    else:
        console.print(
            f"process {process.pid} goes on without this terminal\nnext     finefit watch {place.path}",
            highlight=False,
            soft_wrap=True,
        )


def _wait_until_it_works(process: "subprocess.Popen[bytes]", place: "RunDir") -> None:
    """Until then `finefit watch` would find nobody at work."""
    from finefit.artifacts.lock import holder_of
    from finefit.errors import WorkerDied

    while holder_of(place.lock) != process.pid:
        if process.poll():
            reason = f"its reason is in {place.log.parent / 'detached.log'}"
            raise WorkerDied(f"the detached process ended at once, with code {process.returncode}", reason)
        if process.returncode == 0:
            return
        time.sleep(_TICK_SECONDS)
