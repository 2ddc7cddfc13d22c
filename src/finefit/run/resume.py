"""Resumes a training in its directory: permitted changes are applied and recorded, all others are refused with a
diff."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from finefit.artifacts.atomic import Journal, write_text
from finefit.artifacts.checkpoint import list_checkpoints, step_of
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.reading import read_text
from finefit.artifacts.records import Amendment, Facts, Run, read_record, read_spec, write_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import Stage
from finefit.errors import ModelError, RunError, SpecError
from finefit.plan.resolve import Leaves, leaves, resolve
from finefit.plan.target import nodes_of
from finefit.run.cache_inputs import outside_inputs
from finefit.run.create import between
from finefit.spec.load import parse_spec, spec_to_json
from finefit.spec.models import CustomModel, FolderModel, HubModel, Model
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import DeepSpeed, Spec
from finefit.spec.stages import moved, paths_of
from finefit.spec.tasks import CustomTask
from finefit.step.deepspeed import DEEPSPEED_FILE
from finefit.step.optimize import learning_rate
from finefit.tasks.custom import keep_model_file, keep_task_files, kept_paths, path_of, task_sha256

P = TypeVar("P", bound=BaseModel)
CHANGEABLE = ("schedule.epochs", "schedule.steps", "save.", "validate.", "on_nan.", "evaluate", "launcher.", "trackers")
"""Keys whose change does not affect the steps already done."""
_REVISIONS = ("model.revision", "model.tokenizer.revision")
_MODEL_PATHS = (*_REVISIONS, "model.path", "model.file", "model.weights", "model.tokenizer.path")
_DATA_PATHS = ("data.train", "data.validation.path", "data.validation.images_root", "data.test")
_PATHS = (*_MODEL_PATHS, *_DATA_PATHS, "tuning.adapter", "engine.config")


def amend(run: RunDir, overrides: tuple[str, ...], *, asked: Spec | None = None, dry: bool = False) -> list[str]:
    """Checks that a training's inputs are those with which it began, applies permitted changes, and returns lines that
    describe them. The caller holds the run's lock, unless `dry`, which writes nothing. `asked`: the parsed spec."""
    before = read_spec(run)
    asked = asked or parse_again(run, overrides)
    after = _with_paths(asked, before, overrides, run.path)
    old, new = ({key: value for key, value, _ in leaves(moved(spec, lambda _: ""))} for spec in (before, after))
    same = {key for key in old if key in new and old[key] == new[key]}
    changes = {  # if only the path has changed, the content is compared below
        key: line
        for key, line in _changes(leaves(before), leaves(after)).items()
        if not (key.startswith(_PATHS) and (key in same or key in _REVISIONS))
    }
    # paths in the run's own spec.yaml stay as they were planned; `--set` states that files have moved
    (planned,) = read_record(run.plan, Plan).stages.values()
    edited = _changes(((key, resolved.value, True) for key, resolved in planned.items()), leaves(parse_again(run)))
    refused = [line for key, line in edited.items() if key.startswith(_PATHS)]
    # another number of nodes means another number of ranks, which divide the rows of a step differently
    is_same_count = nodes_of(before.launcher) == nodes_of(after.launcher)
    may_change = {key: is_same_count if key == "launcher.nodes" else key.startswith(CHANGEABLE) for key in changes}
    refused += [line for key, line in changes.items() if not may_change[key]]
    if refused:
        problem = f"{run.path.name} cannot resume with another spec:\n" + "\n".join(f"  {line}" for line in refused)
        allowed = f"only {', '.join(key.rstrip('.') for key in CHANGEABLE)} may change, except launcher.nodes"
        raise RunError(problem, f"{allowed}; `finefit run SPEC --new` starts another run")
    require_unchanged(run, Pipeline.of(after))
    if before == after:
        return []
    if dry:
        return list(changes.values()) or ["files have moved"]
    spec = keep_model_file(keep_task_files(after, run.path, run.path), run.path)
    return _take_over(run, asked, spec, changes, overrides)


def parse_again(run: RunDir, overrides: tuple[str, ...] = ()) -> Spec:
    """Returns the spec with which a training was started, with all overrides since."""
    overrides = (*read_record(run.run, Run).overrides, *overrides)
    try:
        return parse_spec(read_text(run.spec_yaml), where=str(run.spec_yaml), overrides=overrides)
    except SpecError as error:
        raise SpecError(error.problem, error.remedy or "correct it, or restore it from a copy") from None


def follow(run: RunDir, spec: Spec) -> list[str]:
    """Applies what a spec with this training's digest says differently now: launcher, trackers, and the paths of its
    model and adapter. The paths of `spec` are relative to the run directory, whose lock the caller holds."""
    before = read_spec(run)
    if read_record(run.run, Run).status == "finished":
        return []
    document, keys = json.loads(spec_to_json(spec)), ("launcher", "trackers")
    changed = [f"{key}={json.dumps(document[key])}" for key in keys if getattr(before, key) != getattr(spec, key)]
    for part, name in (("model", "path"), ("model", "weights"), ("tuning", "adapter")):
        was, now = (getattr(getattr(one, part), name, None) for one in (before, spec))
        if isinstance(was, str) and isinstance(now, str) and was != now:
            changed.append(f"{part}.{name}={json.dumps(str((run.path / now).resolve()))}")
    return amend(run, tuple(changed)) if changed else []


def require_unchanged(run: RunDir, pipeline: Pipeline) -> None:
    """A run that is named by its directory resumes with its original inputs. `pipeline`: its paths are relative to the
    run."""
    before = read_record(run.run, Run).inputs
    if pipeline.is_flat:
        # evaluations may change, and the run has copies of their files and of a DeepSpeed JSON
        spec = pipeline.flat_spec.model_copy(update={"evaluate": ()})
        engine = spec.engine
        is_gone = isinstance(engine, DeepSpeed) and engine.config and not (run.path / engine.config).exists()
        if is_gone and (stage_of(run).path / DEEPSPEED_FILE).exists():
            spec = spec.model_copy(update={"engine": engine.model_copy(update={"config": None})})
        pipeline = Pipeline.of(spec)
    keyed = next(iter(pipeline.stages.values())) if pipeline.is_flat else pipeline.stages
    paths = {key: path for key, _, path in paths_of(keyed)}
    if pipeline.is_flat:
        before = {k: sha256 for k, sha256 in before.items() if k in paths or not k.startswith(("evaluate.", "engine."))}
    try:
        now = outside_inputs(pipeline, run.path.resolve(), known=before)
    except ModelError as error:
        model = pipeline.flat_spec.model if pipeline.is_flat else None
        if not isinstance(model, FolderModel) or (run.path / model.path).exists():
            raise
        remedy = "if it has moved, give its path with --set model.path=FOLDER"
        raise ModelError(error.problem, remedy) from None
    if changed := [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]:
        problem = f"the inputs of {run.path.name} have changed since it began:"
        for key in changed:
            place = f" ({paths[key]})" if key in paths else ""
            problem += f"\n  {key}{place}: {before.get(key, '(none)')[:12]} -> {now.get(key, '(none)')[:12]}"
        reused = "" if pipeline.is_flat else ", which reuses every stage that has not changed"
        raise RunError(problem, f"restore them, or give the spec file: it starts another run{reused}")


def _with_paths(asked: Spec, before: Spec, overrides: tuple[str, ...], run: Path) -> Spec:
    """Keeps the paths that the run knows, except those given now, which are relative to the working directory."""

    def is_given(key: str) -> bool:
        given = [override.split("=", 1)[0] for override in overrides]
        return any(f"{key}.".startswith(f"{g}.") or g.startswith(f"{key}.") for g in given)

    fresh = moved(asked, between(Path.cwd(), run.resolve()))
    splits = ("train", "validation", "test")
    data = {key: getattr((fresh if is_given(f"data.{key}") else before).data, key) for key in splits}
    if isinstance(asked.data.task, CustomTask) and isinstance(before.data.task, CustomTask):
        data["task"] = before.data.task  # the run has a copy of the file with which its rows were built
    evaluate = list(kept_paths((fresh if is_given("evaluate") else asked).evaluate, before.evaluate))
    for at, (now, known) in enumerate(zip(fresh.evaluate, evaluate, strict=True)):
        if any(is_given(f"evaluate.{at}.task.{key}") for key in ("path", "folder", "nli", "checkpoint")):
            sha256 = task_sha256(now, run)  # that of a file which the run may have copied
            has_copy = sha256 is not None and path_of(known.task) != path_of(now.task)
            evaluate[at] = known if has_copy and sha256 == task_sha256(known, run) else now
    tuning = fresh.tuning if is_given("tuning.adapter") else _with_known(asked.tuning, before.tuning, "adapter")
    engine = fresh.engine if is_given("engine.config") else _with_known(asked.engine, before.engine, "config")
    model = _model(asked.model, fresh.model, before.model, is_given)
    kept = {"model": model, "tuning": tuning, "engine": engine, "evaluate": tuple(evaluate)}
    return asked.model_copy(update={"data": asked.data.model_copy(update=data), **kept})


def _with_known(asked: P, before: BaseModel, key: str) -> P:
    """Keeps the path that the run knows, if both specs have one."""
    known = getattr(before, key, None)
    is_known = isinstance(getattr(asked, key, None), str) and isinstance(known, str)
    return asked.model_copy(update={key: known}) if is_known else asked


def _model(asked: Model, fresh: Model, before: Model, is_given: Callable[[str], bool]) -> Model:
    """`asked` is the spec as written, `fresh` has paths relative to the run directory."""
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


def _changes(before: Leaves, after: Leaves) -> dict[str, str]:
    """Describes each changed key in words."""
    old, new = ({key: value for key, value, _ in side} for side in (before, after))
    return {
        key: f"{key}: {old.get(key, '(none)')} -> {new.get(key, '(none)')}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    }


def _take_over(run: RunDir, asked: Spec, spec: Spec, changes: dict[str, str], overrides: tuple[str, ...]) -> list[str]:
    where, record = stage_of(run), read_record(run.run, Run)
    old, facts, plan = read_record(where.stage, Stage), read_record(run.facts, Facts), read_record(run.plan, Plan)
    done = max((step_of(p) for p in list_checkpoints(where.checkpoints)), default=0)
    values = resolve(
        spec, overrides=(), machine=facts.machine, num_rows=old.num_rows, forecast=plan.forecasts[old.name]
    )
    total = int(values["total_steps"].value) if any(key.startswith("schedule.") for key in changes) else old.total_steps
    if total < done:
        problem = f"{run.path.name} has done {done} steps, but {total} are requested now"
        raise RunError(problem, "request more steps, or start another run with --new")
    if spec.evaluate and "test.jsonl" not in old.prepared:
        remedy = "name them in the spec with data.test and run again with --new"
        raise RunError(f"{run.path.name} has no test rows to answer", remedy)
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
    # the plan with its changes, with paths as the user writes them; it has the keys of the new choices
    planned, given = plan.stages[stage.name], {key: value for key, value, _ in leaves(asked)}
    moves = {key for key, was in planned.items() if key.startswith(_PATHS) and was.value != given.get(key)}
    source, note = f"amended after step {done}", ""
    planned = {
        key: planned[key]
        if key in planned and key not in changes and key not in moves
        else Resolved(value=given[key], source=source)
        for key in values
    }
    if total != old.total_steps:
        note = _schedule_note(old, stage, done)
        planned["total_steps"] = Resolved(value=total, source=f"{values['total_steps'].source}, {source}")
        kept = "as before: the warm-up is not repeated" if done else values["warmup_steps"].source
        planned["warmup_steps"] = Resolved(value=warmup, source=kept)
    write_record(run.plan, replace(plan, stages={stage.name: planned}))
    write_record(where.stage, stage)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    if lines := list(changes.values()):
        amendment = Amendment(after_step=done, changes=tuple(lines), note=note)
        record = replace(record, amendments=(*record.amendments, amendment))
        with Journal(where.metrics) as metrics:
            metrics.write(event="amended", step=done, changes=lines, note=note)
    write_record(run.run, replace(record, status="stopped", overrides=(*record.overrides, *overrides)))
    return [*lines, *([note] if note else [])]


def _schedule_note(old: Stage, new: Stage, done: int) -> str:
    def rate(stage: Stage, step: int) -> float:
        peak, kind = stage.optimizer.lr, stage.schedule
        return learning_rate(step, peak=peak, kind=kind, total_steps=stage.total_steps, warmup_steps=stage.warmup_steps)

    spans = f"the {new.schedule} schedule now spans {new.total_steps} steps instead of {old.total_steps}"
    if not done:
        return spans
    rates = f"step {done} was taken at {rate(old, done - 1):.3g}, step {done + 1} is taken at {rate(new, done):.3g}"
    return f"{spans}, warm-up not repeated: {rates}"
