"""Resuming a training in its run directory. What may change is changed, reported and recorded; everything else is
refused with a diff."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from finefit.artifacts.atomic import Journal, write_text
from finefit.artifacts.checkpoint import list_checkpoints, step_of
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.records import Amendment, Facts, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import ModelError, RunError
from finefit.plan.resolve import Leaves, leaves, resolve
from finefit.plan.target import nodes_of
from finefit.run.cache_inputs import outside_inputs
from finefit.run.create import between
from finefit.spec.load import parse_spec, spec_from_json, spec_to_json
from finefit.spec.models import CustomModel, FolderModel, HubModel, Model
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import DeepSpeed, Evaluation, Spec
from finefit.spec.stages import moved, paths_of
from finefit.spec.tasks import CustomTask
from finefit.step.deepspeed import DEEPSPEED_FILE
from finefit.step.optimize import learning_rate
from finefit.tasks.task_files import keep_model_file, keep_task_files, kept_paths, path_of, task_sha256

P = TypeVar("P", bound=BaseModel)
CHANGEABLE = ("schedule.epochs", "schedule.steps", "save.", "validate.", "on_nan.", "evaluate", "launcher.", "trackers")
"""Keys that leave the steps already done as they were."""
_PATHS = (
    "model.path",
    "model.revision",
    "model.file",
    "model.weights",
    "model.tokenizer.path",
    "model.tokenizer.revision",
    "tuning.adapter",
    "engine.config",
    "data.train",
    "data.validation.path",
    "data.test",
    "data.validation.images_root",
)
_FREE = ("launcher", "trackers")
"""Keys that say where a run is started and who tracks it, not what it does."""
_TASK_PATHS = ("path", "folder", "nli", "checkpoint")
"""Keys of a task that may name a file or a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def amend(run: RunDir, overrides: tuple[str, ...], *, asked: Spec | None = None, dry: bool = False) -> list[str]:
    """Checks that the inputs of a training are those that it began with, and takes over what may change. The caller
    holds the run's lock, unless `dry`: nothing is written then. Returns lines that say what has changed. `asked`: the
    spec with the overrides, where it is parsed already."""
    record = read_record(run.run, Run)
    before = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    asked = asked or parse_again(run, overrides)
    after = _with_paths(asked, before, overrides, run.path)
    changes = [c for c in _changes(leaves(before), leaves(after)) if not _is_move(c.key, before, after)]
    if refused := [*_edited_paths(run), *(c for c in changes if not _may_change(c, before, after))]:
        raise RunError(
            f"{run.path.name} cannot go on with another spec:\n" + "\n".join(f"  {c}" for c in refused),
            f"only {', '.join(key.rstrip('.') for key in CHANGEABLE)} may change, and of launcher not the nodes; "
            "`finefit run SPEC --new` starts another run",
        )
    require_unchanged(run, Pipeline.of(after))
    if before == after:
        return []
    if dry:
        return [str(change) for change in changes] or ["files lie elsewhere"]
    spec = keep_model_file(keep_task_files(after, run.path, run.path), run.path)
    return _take_over(run, record, asked, spec, changes, overrides)


def parse_again(run: RunDir, overrides: tuple[str, ...] = ()) -> Spec:
    """The spec that a training was started with, with all overrides since."""
    overrides = (*read_record(run.run, Run).overrides, *overrides)
    return parse_spec(run.spec_yaml.read_text(encoding="utf-8"), where=str(run.spec_yaml), overrides=overrides)


def follow(run: RunDir, spec: Spec) -> list[str]:
    """Takes over what a spec with the digest of this training says differently now: who starts it, who tracks it, and
    where its model and adapter lie. The paths of `spec` are relative to the run directory, whose lock the caller
    holds."""
    before = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    if read_record(run.run, Run).status == "finished":
        return []
    document = json.loads(spec_to_json(spec))
    changed = [f"{key}={json.dumps(document[key])}" for key in _FREE if getattr(before, key) != getattr(spec, key)]
    for key, old, new in (
        ("model.path", before.model, spec.model),
        ("model.weights", before.model, spec.model),
        ("tuning.adapter", before.tuning, spec.tuning),
    ):
        was, now = (getattr(part, key.rpartition(".")[2], None) for part in (old, new))
        if isinstance(was, str) and isinstance(now, str) and was != now:
            changed.append(f"{key}={json.dumps(str((run.path / now).resolve()))}")
    return amend(run, tuple(changed)) if changed else []


def require_unchanged(run: RunDir, pipeline: Pipeline) -> None:
    """A run that is named by its directory goes on with the inputs that it began with. `pipeline`: its spec, with paths
    relative to the run directory."""
    before = read_record(run.run, Run).inputs
    if pipeline.is_flat:
        pipeline = Pipeline.of(_without_copies(pipeline.flat_spec, run))
        named = {key for key, _, _ in paths_of(_keyed(pipeline))}
        before = {k: sha256 for k, sha256 in before.items() if k in named or not k.startswith(("evaluate.", "engine."))}
    try:
        now = outside_inputs(pipeline, run.path.resolve(), known=before)
    except ModelError as error:
        model = pipeline.flat_spec.model if pipeline.is_flat else None
        if not isinstance(model, FolderModel) or (run.path / model.path).exists():
            raise
        remedy = "if it lies elsewhere now, name the place with --set model.path=FOLDER"
        raise ModelError(error.problem, remedy) from None
    changed = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
    if not changed:
        return
    paths = {key: path for key, _, path in paths_of(_keyed(pipeline))}
    lines = (
        f"  {key}{f' ({paths[key]})' if key in paths else ''}: "
        f"{before.get(key, '(none)')[:12]} -> {now.get(key, '(none)')[:12]}"
        for key in changed
    )
    raise RunError(
        f"the inputs of {run.path.name} have changed since it began:\n" + "\n".join(lines),
        "put them back, or give the spec file: it starts another run"
        + ("" if pipeline.is_flat else ", which takes over every stage that has not changed"),
    )


def _without_copies(spec: Spec, run: RunDir) -> Spec:
    """Evaluations may change, and the run has copies of their files; a DeepSpeed JSON may be gone once the stage has
    its own."""
    spec = spec.model_copy(update={"evaluate": ()})
    engine = spec.engine
    if not isinstance(engine, DeepSpeed) or engine.config is None or (run.path / engine.config).exists():
        return spec
    has_copy = (stage_of(run).path / DEEPSPEED_FILE).exists()
    return spec.model_copy(update={"engine": engine.model_copy(update={"config": None})}) if has_copy else spec


def _keyed(pipeline: Pipeline) -> object:
    """What the names of inputs start in."""
    return next(iter(pipeline.stages.values())) if pipeline.is_flat else pipeline.stages


def _may_change(change: Change, before: Spec, after: Spec) -> bool:
    """Another number of nodes is another number of ranks, which divide the rows of a step differently."""
    if change.key == "launcher.nodes":
        return nodes_of(before.launcher) == nodes_of(after.launcher)
    return change.key.startswith(CHANGEABLE)


def _edited_paths(run: RunDir) -> list[Change]:
    """Paths in the run's own spec.yaml that are not those it was planned with; `--set` is the way to say that files
    have moved."""
    (planned,) = read_record(run.plan, Plan).stages.values()
    old = ((key, resolved.value, True) for key, resolved in planned.items())
    return [c for c in _changes(old, leaves(parse_again(run))) if c.key.startswith(_PATHS)]


def _with_paths(asked: Spec, before: Spec, overrides: tuple[str, ...], run: Path) -> Spec:
    """Paths stay as the run knows them, except those given now, which are relative to the working directory."""

    def is_given(key: str) -> bool:
        given = [override.split("=", 1)[0] for override in overrides]
        return any(f"{key}.".startswith(f"{g}.") or g.startswith(f"{key}.") for g in given)

    fresh = moved(asked, between(Path.cwd(), run.resolve()))
    data = {
        key: getattr((fresh if is_given(f"data.{key}") else before).data, key)
        for key in ("train", "validation", "test")
    }
    tuning = fresh.tuning if is_given("tuning.adapter") else _with_known(asked.tuning, before.tuning, "adapter")
    engine = fresh.engine if is_given("engine.config") else _with_known(asked.engine, before.engine, "config")
    if isinstance(asked.data.task, CustomTask) and isinstance(before.data.task, CustomTask):
        data["task"] = before.data.task  # the run has a copy, which its rows were built with
    kept = kept_paths((fresh if is_given("evaluate") else asked).evaluate, before.evaluate)
    given = [any(is_given(f"evaluate.{at}.task.{key}") for key in _TASK_PATHS) for at in range(len(kept))]
    evaluate = tuple(
        _named_now(now, known, run) if is_now else known
        for now, known, is_now in zip(fresh.evaluate, kept, given, strict=True)
    )
    return asked.model_copy(
        update={
            "data": asked.data.model_copy(update=data),
            "model": _model(asked.model, fresh.model, before.model, is_given),
            "tuning": tuning,
            "engine": engine,
            "evaluate": evaluate,
        }
    )


def _named_now(fresh: Evaluation, kept: Evaluation, run: Path) -> Evaluation:
    """A task as it is given now, unless the run has a copy of the same file."""
    now = task_sha256(fresh, run)
    is_same = now is not None and path_of(kept.task) != path_of(fresh.task) and now == task_sha256(kept, run)
    return kept if is_same else fresh


def _with_known(asked: P, before: BaseModel, key: str) -> P:
    """With the path that the run knows, where both name one."""
    known = getattr(before, key, None)
    is_known = isinstance(getattr(asked, key, None), str) and isinstance(known, str)
    return asked.model_copy(update={key: known}) if is_known else asked


def _model(asked: Model, fresh: Model, before: Model, is_given: Callable[[str], bool]) -> Model:
    """`asked` as it is written, `fresh` with paths relative to the run directory."""
    match asked, fresh, before:
        case FolderModel(), _, FolderModel() if not is_given("model.path"):
            return before
        case HubModel(), _, HubModel() if asked.id == before.id and not is_given("model.revision"):
            return before
        case _, CustomModel(), CustomModel():  # the run has a copy of its file
            is_new = {
                "weights": (fresh.weights is None) != (before.weights is None),
                "tokenizer": fresh.tokenizer.kind != before.tokenizer.kind,
            }
            keys = ("file", "weights", "tokenizer")
            kept = (key for key in keys if not is_given(f"model.{key}") and not is_new.get(key))
            return fresh.model_copy(update={key: getattr(before, key) for key in kept})
    return fresh


def _changes(before: Leaves, after: Leaves) -> Iterator[Change]:
    old, new = ({key: value for key, value, _ in side} for side in (before, after))
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield Change(key=key, old=old.get(key, "(none)"), new=new.get(key, "(none)"))


def _is_move(key: str, before: Spec, after: Spec) -> bool:
    """Whether only the place has changed; the content is compared elsewhere."""
    old, new = ({k: value for k, value, _ in leaves(moved(spec, lambda _: ""))} for spec in (before, after))
    return key.startswith(_PATHS) and (
        key in ("model.revision", "model.tokenizer.revision") or (key in old and key in new and old[key] == new[key])
    )


def _take_over(
    run: RunDir, record: Run, asked: Spec, spec: Spec, changes: list[Change], overrides: tuple[str, ...]
) -> list[str]:
    where = stage_of(run)
    old, facts, plan = read_record(where.stage, Stage), read_record(run.facts, Facts), read_record(run.plan, Plan)
    done = max((step_of(p) for p in list_checkpoints(where.checkpoints)), default=0)
    values = resolve(
        spec, overrides=(), machine=facts.machine, num_rows=old.num_rows, forecast=plan.forecasts[old.name]
    )
    total = int(values["total_steps"].value) if any(c.key.startswith("schedule.") for c in changes) else old.total_steps
    if total < done:
        raise RunError(
            f"{run.path.name} has done {done} steps, {total} are asked for now",
            "ask for more steps, or start another run with --new",
        )
    if spec.evaluate and "test.jsonl" not in old.prepared:
        raise RunError(
            f"{run.path.name} has no test rows to answer",
            "name them in the spec with data.test and run again with --new",
        )
    warmup = old.warmup_steps if done else int(values["warmup_steps"].value)
    stage = replace(
        old,
        warmup_steps=warmup,
        total_steps=total,
        model=spec.model,
        tuning=spec.tuning,
        trackers=spec.trackers,
        save=spec.save,
        validate_every=spec.validation.every,
        on_nan=spec.on_nan,
        evaluate=spec.evaluate,
    )
    lines = [str(c) for c in changes]
    note = _schedule_note(old, stage, done) if total != old.total_steps else ""
    planned = _amended(plan.stages[stage.name], values, asked, changes, f"amended after step {done}")
    if total != old.total_steps:
        planned["total_steps"] = Resolved(
            value=total, source=f"{values['total_steps'].source}, amended after step {done}"
        )
        source = "as before: the warm-up is not repeated" if done else values["warmup_steps"].source
        planned["warmup_steps"] = Resolved(value=warmup, source=source)
    write_record(run.plan, replace(plan, stages={stage.name: planned}))
    write_record(where.stage, stage)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    if lines:
        record = replace(
            record, amendments=(*record.amendments, Amendment(after_step=done, changes=tuple(lines), note=note))
        )
        with Journal(where.metrics) as metrics:
            metrics.write(event="amended", step=done, changes=lines, note=note)
    write_record(run.run, replace(record, status="stopped", overrides=(*record.overrides, *overrides)))
    return [*lines, *([note] if note else [])]


def _amended(
    planned: dict[str, Resolved], values: dict[str, Resolved], asked: Spec, changes: list[Change], source: str
) -> dict[str, Resolved]:
    """The plan with what has changed, and paths as the user writes them; it has the keys of the new choices."""
    given = {key: value for key, value, _ in leaves(asked)}
    changed = {c.key for c in changes} | {
        key for key, old in planned.items() if key.startswith(_PATHS) and old.value != given.get(key)
    }
    return {
        key: Resolved(value=given[key], source=source) if key in changed or key not in planned else planned[key]
        for key in values
    }


def _schedule_note(old: Stage, new: Stage, done: int) -> str:
    def rate(stage: Stage, step: int) -> float:
        peak, kind = stage.optimizer.lr, stage.schedule
        return learning_rate(step, peak=peak, kind=kind, total_steps=stage.total_steps, warmup_steps=stage.warmup_steps)

    spans = f"the {new.schedule} schedule now spans {new.total_steps} steps instead of {old.total_steps}"
    if not done:
        return spans
    return (
        f"{spans}, warm-up not repeated: "
        f"step {done} was taken at {rate(old, max(done - 1, 0)):.3g}, step {done + 1} is taken at {rate(new, done):.3g}"
    )
