"""The verbs of the command line as functions, which it calls itself. Nothing is printed and no process is ended:
results are returned, errors are those of `finefit.errors`, and progress goes to a callback.

Relative paths in a spec start from its file, all others from the current folder. Heavy packages are imported inside the
functions, so that `import finefit` is fast. `docs/api.md` shows them in use."""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finefit.errors import RunError, UserError
from finefit.progress import OnProgress, Progress
from finefit.results import Checked, Compared, Exported, OpenRun, Scores, SpecFile

if TYPE_CHECKING:
    from finefit.compare.records import Comparison
    from finefit.report.plan import RunPlan

AnySpec = SpecFile | Path | str
AnyRun = OpenRun | Path | str


def load_spec(path: Path | str, overrides: Sequence[str] = ()) -> SpecFile:
    """Reads and validates a spec file. Overrides are written as for `--set`: `optimizer.lr=1e-4`."""
    from finefit.spec.load import load_pipeline

    every = _each(overrides)
    return SpecFile(path=Path(path), overrides=every, pipeline=load_pipeline(Path(path), every))


def plan(spec: AnySpec, cards: Sequence[str] = (), *, progress: OnProgress | None = None) -> "RunPlan":
    """Predicts memory, time and changes that would make it fit, for each card; by default for that of the spec."""
    from finefit.facts.cards import parse_card
    from finefit.facts.files import free_bytes
    from finefit.plan.stage_costs import forecast_stages, is_this_machine
    from finefit.report.plan import RunPlan

    found = _spec_file(spec)
    asked = _each(cards) or (found.pipeline.card,)
    for card in asked:
        parse_card(card)  # a misspelt name is reported before anything is read
    _announce(found.pipeline.models(), found.base, progress)
    with _planning(progress):
        costs = forecast_stages(found.pipeline, found.base, cards=asked)
    free = tuple(free_bytes(Path("runs")) if is_this_machine(card) else None for card in asked)
    return RunPlan(name=found.pipeline.name, is_flat=found.pipeline.is_flat, costs=costs, free=free)


def apply_suggestion(spec: AnySpec, planned: "RunPlan", number: int) -> tuple[str, ...]:
    """Writes a suggestion of a plan into the spec file, by its number in the listing, and returns its changes."""
    from finefit.artifacts.atomic import write_text
    from finefit.spec.load import changed_text, load_any, parse_any, spec_text

    target, suggestions = _spec_file(spec).path, planned.suggestions()
    if not suggestions:
        fits = "there is nothing to apply: the plan fits as it is"
        raise UserError(fits if planned.fits() else "no change was found that would make it fit")
    if not 0 < number <= len(suggestions):
        count = len(suggestions)
        raise UserError(f"there are {count} suggestions, not {number}", f"--apply 1 to --apply {count}")
    changes = suggestions[number - 1].changes
    text = changed_text(spec_text(target), changes)
    if parse_any(text, where=str(target)) != load_any(target, changes):
        problem = f"{', '.join(changes)} would have a different effect in {target} because of its base"
        raise UserError(problem, "change the base, or write the keys by hand")
    write_text(target, text)
    return changes


def check(spec: AnySpec, *, runs: Path | str = "runs", progress: OnProgress | None = None) -> Checked:
    """Proves what can be known before the first step. Problems are findings of the result, not exceptions."""
    from finefit.run.check_stages import check_pipeline

    found = _spec_file(spec)
    _announce(found.pipeline.models(), found.base, progress)
    with _planning(progress):
        return Checked(found=check_pipeline(found.pipeline, found.base, Path(runs)))


def run(
    target: AnySpec | OpenRun,
    overrides: Sequence[str] = (),
    *,
    new: bool = False,
    first: str | None = None,
    only: str | None = None,
    force: Sequence[str] = (),
    runs: Path | str = "runs",
    progress: OnProgress | None = None,
) -> OpenRun:
    """Fine-tunes what a spec describes, or goes on with a run; a finished one is returned as it is. `first`, `only` and
    `force` choose stages as `--from`, `--only` and `--force` do."""
    from finefit.report.callback import CallbackProgress
    from finefit.run.command import RunArgs, StageSelection, carry_out, find_or_create, read_command

    _require_one_process()
    selection, overrides = StageSelection(first=first, only=only, force=_each(force)), _each(overrides)
    known = target if isinstance(target, SpecFile) else None
    path = target.path if isinstance(target, (SpecFile, OpenRun)) else Path(target)
    if known is not None and overrides:
        known = load_spec(path, (*known.overrides, *overrides))
    every = overrides if known is None else known.overrides
    args = RunArgs(target=path, overrides=every, new=new, runs=Path(runs), selection=selection)
    command = read_command(args, None if known is None else known.pipeline)
    if command.pipeline.is_flat and command.pipeline.flat_spec.launcher.kind == "slurm":
        raise RunError(f"{path} asks for SLURM, and this call trains here", f"submit it with `finefit run {path}`")
    if command.run is None:
        _announce(command.pipeline.models(), command.base, progress)
    with _planning(progress):
        place = find_or_create(command)
    carry_out(command, place, CallbackProgress(place, progress or _nothing))
    return OpenRun(place.path)


def evaluate(
    target: AnyRun | None = None,
    *,
    checkpoint: str | int = "final",
    tasks: Sequence[str] = (),
    data: Path | str | None = None,
    limit: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    base: str | None = None,
    max_new_tokens: int | None = None,
    batch: int | None = None,
    answers: Path | str | None = None,
    server: str | None = None,
    runs: Path | str = "runs",
    progress: OnProgress | None = None,
) -> Scores:
    """Scores a run's checkpoints, any model, answers in a file, or those of a server, as `finefit eval` does. `server`:
    its URL, or its settings in YAML."""
    from finefit.report.callback import CallbackView
    from finefit.run.eval_args import EvalArgs
    from finefit.run.evaluation import evaluate_all, open_evaluation

    args = EvalArgs(
        target=None if target is None else str(_path_of(target)),
        checkpoint=str(checkpoint),
        tasks=_each(tasks),
        data=None if data is None else str(data),
        limit=limit,
        device=device,
        base=base,
        max_new_tokens=max_new_tokens,
        batch=batch,
        answers=None if answers is None else Path(answers),
        server=server,
        runs=Path(runs),
    )
    with _planning(progress):
        requests = open_evaluation(args)
        _announce((request.subject.model for request in requests.requests), requests.run.path, progress)
        with CallbackView(requests.run, progress or _nothing, log=requests.run.log, evaluates=True) as view:
            results = evaluate_all(requests, tick=view.tick, say=view.say)
    return Scores(run=requests.run, results=tuple(results))


def compare(
    *targets: AnyRun,
    checkpoint: str | None = None,
    task: str | None = None,
    varies: Sequence[str] = (),
    show: int = 3,
) -> Compared:
    """Compares runs on the same items. A target is a run, `RUN:CHECKPOINT`, or a stage of a pipeline; one run alone is
    compared with its base."""
    found = comparisons(targets, checkpoint=checkpoint, task=task, varies=varies, show=show)
    return Compared(record=only_comparison(targets, found))


def comparisons(
    targets: Sequence[AnyRun],
    *,
    checkpoint: str | None = None,
    task: str | None = None,
    varies: Sequence[str] = (),
    show: int = 3,
) -> "tuple[Comparison, ...]":
    """Those that a pipeline has made are returned unchanged, and may be several; anything else is compared now."""
    from finefit.compare.comparison import compare as compare_runs
    from finefit.compare.sides import expand_targets, stored_comparisons

    named = [str(_path_of(target)) for target in targets]
    if not (checkpoint or task or varies) and (stored := stored_comparisons(named)):
        return stored
    models = expand_targets(named)
    return (compare_runs(models, checkpoint=checkpoint, task=task, declared=_each(varies), show=show),)


def only_comparison(targets: Sequence[AnyRun], found: "Sequence[Comparison]") -> "Comparison":
    if len(found) > 1:
        name = _path_of(targets[0])
        problem = f"{name} has {len(found)} comparisons, but only one can be written"
        raise UserError(problem, f"name one of its compare stages: {name}/STAGE")
    return found[0]


def export(
    target: AnyRun,
    to: Sequence[str] | str,
    out: Path | str | None = None,
    *,
    checkpoint: str | None = None,
    onto: Literal["original", "trained"] = "original",
    base: str | None = None,
    prompts: int = 16,
    with_modelfile: bool = False,
    accept: bool = False,
    progress: OnProgress | None = None,
) -> Exported:
    """Makes a model for other programs and proves it equal to what was trained. `to` has the formats of `--to`, such as
    `merged` or `gguf:q4_k_m`; `out` is exports/NAME by default."""
    from finefit.spec.exports import parse_formats

    try:
        formats = parse_formats(list(_each(to)))
    except ValueError as error:
        raise UserError(f"--to: {error}") from None
    from finefit.export.make import export as make_export
    from finefit.export.subject import open_subject
    from finefit.model.load import quiet_inside
    from finefit.run.export_target import model_folder

    if prompts < 1:
        raise UserError(f"prompts is {prompts}, and an export is compared on at least 1")
    name, tell = str(_path_of(target)), progress or _nothing
    with quiet_inside():
        subject = open_subject(model_folder(name, checkpoint), target=name, base=base)
        place = Path("exports", subject.name) if out is None else Path(out)
        report = make_export(
            subject,
            formats,
            place,
            onto=onto,
            prompts=prompts,
            with_modelfile=with_modelfile,
            accept=accept,
            say=lambda line: tell(Progress(subject="export", words=line)),
        )
    return Exported(out=place, report=report)


def open_run(path: Path | str) -> OpenRun:
    """Opens a run directory, or `runs/medical-1/sft` for a stage of a pipeline."""
    from finefit.artifacts.rundir import open_any_run

    return OpenRun(open_any_run(Path(path)).path)


def _spec_file(spec: AnySpec) -> SpecFile:
    return spec if isinstance(spec, SpecFile) else load_spec(spec)


def _path_of(target: AnyRun) -> Path | str:
    return target.path if isinstance(target, OpenRun) else target


def _each(given: Sequence[str] | str) -> tuple[str, ...]:
    """A text is one of what may be several, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def _nothing(_: Progress) -> None:
    """Without a callback, nobody is told."""


def _announce(models: Iterable[object], base: Path, progress: OnProgress | None) -> None:
    """The code of custom models is about to run."""
    if progress is not None:
        from finefit.model.resolve_model import code_notices

        for line in code_notices(models, base):
            progress(Progress(subject="news", words=line))


def _planning(progress: OnProgress | None) -> AbstractContextManager[None]:
    """Without a callback, an observer of the caller's stays."""
    if progress is None:
        return nullcontext()
    from finefit.artifacts.forecasts import PlanningProgress
    from finefit.plan.client import observed_planning

    def observe(now: PlanningProgress) -> None:
        progress(Progress(subject="planning", words=f"planning for {now.card}: {now.doing}"))

    return observed_planning(observe)


def _require_one_process() -> None:
    from finefit.artifacts.processes import rank_env_of

    rank = rank_env_of(os.environ)
    if rank is not None and rank.size > 1:
        problem = f"this process is rank {rank.rank} of {rank.size}, and finefit.run starts its ranks itself"
        raise RunError(problem, "start `finefit run SPEC` with the launcher, or call this without one")
