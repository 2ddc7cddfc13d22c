"""Going on in a run directory. What may change is changed, stated and recorded; everything else is refused with a diff."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from finefit.artifacts.atomic import write_text
from finefit.artifacts.checkpoint import list_checkpoints, step_of
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.journal import Journal
from finefit.artifacts.lock import run_lock
from finefit.artifacts.records import Amendment, Facts, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.trainings import Stage
from finefit.errors import DataError, ModelError, RunError
from finefit.facts.files import FileFact
from finefit.model.locate import Located, locate, with_adapter
from finefit.pipeline.create import stage_of
from finefit.pipeline.data import source_files
from finefit.pipeline.inputs import UNDIGESTED, between, engine_sha256, relocate
from finefit.pipeline.taskfiles import keep_model_file, keep_task_files, kept_paths, path_of, task_sha256
from finefit.plan.engine import nodes_of
from finefit.plan.resolve import Leaves, leaves, resolve
from finefit.spec.load import parse_spec, spec_from_json, spec_to_json
from finefit.spec.models import CustomModel, FolderModel, HubModel, Lora, Model, Tuning
from finefit.spec.rows import Source
from finefit.spec.schema import DeepSpeed, Engine, Evaluation, Spec
from finefit.spec.tasks import OwnTask
from finefit.step.engines.zero_config import FILE as DEEPSPEED_JSON
from finefit.step.schedule import learning_rate

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
_TASK_PATHS = ("path", "folder", "nli", "checkpoint")
"""Of a task, what may name a file or a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def amend(run: RunDir, overrides: tuple[str, ...]) -> list[str]:
    """Checks that the run stands on what it stood on, and takes over what may change. Returns lines that say what changed."""
    record = read_record(run.run, Run)
    before = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    asked = _written(run, (*record.overrides, *overrides))
    after = _with_paths(asked, before, overrides, run.path)
    changes = [c for c in _changes(leaves(before), leaves(after)) if not _is_move(c.key, before, after)]
    if refused := [*_edited_paths(run, record), *(c for c in changes if not _may_change(c, before, after))]:
        raise RunError(
            f"{run.path.name} cannot go on with another spec:\n" + "\n".join(f"  {c}" for c in refused),
            f"only {', '.join(key.rstrip('.') for key in CHANGEABLE)} may change, and of launcher not the nodes; "
            "`finefit run SPEC --new` starts another run",
        )
    _inputs_unchanged(run, after)
    if before == after:
        return []
    with run_lock(run.lock):
        return _take_over(
            run,
            record,
            asked,
            keep_model_file(keep_task_files(after, run.path, run.path), run.path),
            changes,
            overrides,
        )


def follow(run: RunDir, spec: Spec) -> list[str]:
    """What a spec file with the digest of this run may say otherwise now is taken over. Of a finished run nothing is left to be started or told."""
    before = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    changed = [key for key in UNDIGESTED if getattr(before, key) != getattr(spec, key)]
    if not changed or read_record(run.run, Run).status == "finished":
        return []
    document = json.loads(spec_to_json(spec))
    return amend(run, tuple(f"{key}={json.dumps(document[key])}" for key in changed))


def _may_change(change: Change, before: Spec, after: Spec) -> bool:
    """Another number of nodes is another number of ranks, which divide the rows of a step otherwise."""
    if change.key == "launcher.nodes":
        return nodes_of(before.launcher) == nodes_of(after.launcher)
    return change.key.startswith(CHANGEABLE)


def _written(run: RunDir, overrides: tuple[str, ...]) -> Spec:
    return parse_spec(run.spec_yaml.read_text(encoding="utf-8"), where=str(run.spec_yaml), overrides=overrides)


def _edited_paths(run: RunDir, record: Run) -> list[Change]:
    """Paths in the run's own spec.yaml that are not those it was planned with; `--set` is the way to say that files have moved."""
    (planned,) = read_record(run.plan, Plan).stages.values()
    old = ((key, resolved.value, True) for key, resolved in planned.items())
    return [c for c in _changes(old, leaves(_written(run, record.overrides))) if c.key.startswith(_PATHS)]


def _with_paths(asked: Spec, before: Spec, overrides: tuple[str, ...], run: Path) -> Spec:
    """Paths stay as the run knows them, except those given now, which are relative to the working directory."""

    def is_given(key: str) -> bool:
        given = [override.split("=", 1)[0] for override in overrides]
        return any(f"{key}.".startswith(f"{g}.") or g.startswith(f"{key}.") for g in given)

    fresh = relocate(asked, between(Path.cwd(), run.resolve()))
    data = {
        key: getattr((fresh if is_given(f"data.{key}") else before).data, key)
        for key in ("train", "validation", "test")
    }
    model = (
        before.model
        if _is_same_place(asked.model, before.model, is_given)
        else _same_files(fresh.model, before.model, is_given)
    )
    tuning = fresh.tuning if is_given("tuning.adapter") else _same_adapter(asked.tuning, before.tuning)
    engine = fresh.engine if is_given("engine.config") else _same_config(asked.engine, before.engine)
    if isinstance(asked.data.task, OwnTask) and isinstance(before.data.task, OwnTask):
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
            "model": model,
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


def _same_config(asked: Engine, before: Engine) -> Engine:
    match asked, before:
        case DeepSpeed(config=str()), DeepSpeed(config=str() as known):
            return asked.model_copy(update={"config": known})
    return asked


def _same_adapter(asked: Tuning, before: Tuning) -> Tuning:
    match asked, before:
        case Lora(adapter=str()), Lora(adapter=str() as known):
            return asked.model_copy(update={"adapter": known})
    return asked


def _is_same_place(asked: Model, before: Model, is_given: Callable[[str], bool]) -> bool:
    match asked, before:
        case FolderModel(), FolderModel():
            return not is_given("model.path")
        case HubModel(), HubModel():
            return asked.id == before.id and not is_given("model.revision")
    return False


def _same_files(fresh: Model, before: Model, is_given: Callable[[str], bool]) -> Model:
    """Of a model of the user's own the run has a copy of the file; where the rest lies stays too, unless it is given now."""
    if not isinstance(fresh, CustomModel) or not isinstance(before, CustomModel):
        return fresh
    is_new = {
        "weights": (fresh.weights is None) != (before.weights is None),
        "tokenizer": fresh.tokenizer.kind != before.tokenizer.kind,
    }
    known = {
        key: getattr(before, key)
        for key in ("file", "weights", "tokenizer")
        if not is_given(f"model.{key}") and not is_new.get(key)
    }
    return fresh.model_copy(update=known)


def _changes(before: Leaves, after: Leaves) -> Iterator[Change]:
    old, new = ({key: value for key, value, _ in side} for side in (before, after))
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield Change(key=key, old=old.get(key, "(none)"), new=new.get(key, "(none)"))


def _is_move(key: str, before: Spec, after: Spec) -> bool:
    """Only where something lies has changed; whether it is still the same is seen by its content."""
    old, new = ({k: value for k, value, _ in leaves(relocate(spec, lambda _: ""))} for spec in (before, after))
    return key.startswith(_PATHS) and (
        key in ("model.revision", "model.tokenizer.revision") or (key in old and key in new and old[key] == new[key])
    )


def _inputs_unchanged(run: RunDir, spec: Spec) -> None:
    """Data files may be gone: the prepared rows are in the run directory. Changed ones are refused."""
    inputs = read_record(run.facts, Facts).inputs
    changed = []
    for split, sources in spec.data.sources().items():
        for source, files in zip(sources, inputs.data.get(split, ()), strict=True):
            changed += _changed_files(run, source, split, files)
    located = with_adapter(_locate(spec, run.path), spec.tuning, run.path)
    if located.fingerprint != inputs.model_fingerprint:
        changed.append(
            f"  model {inputs.model}: fingerprint {inputs.model_fingerprint[:12]} -> {located.fingerprint[:12]}"
        )
    changed += _changed_config(run, spec.engine, inputs.engine_sha256)
    if changed:
        raise RunError(
            f"the inputs of {run.path.name} have changed since it began:\n" + "\n".join(changed),
            "put them back, or start another run with --new",
        )


def _changed_config(run: RunDir, engine: Engine, sha256: str | None) -> list[str]:
    """Once the stage has its own copy of what was made of it, the file may be gone."""
    if sha256 is None or not isinstance(engine, DeepSpeed) or engine.config is None:
        return []
    if not (run.path / engine.config).exists() and (stage_of(run).path / DEEPSPEED_JSON).exists():
        return []
    now = engine_sha256(engine, run.path)
    return [] if now is None or now == sha256 else [f"  engine.config: sha256 {sha256[:12]} -> {now[:12]}"]


def _changed_files(run: RunDir, source: Source, split: str, facts: tuple[FileFact, ...]) -> list[str]:
    if "://" in source.path:  # pinned by its commit
        return []
    try:
        now = source_files(source, run.path, split=split)
    except DataError:  # gone
        return []
    if len(now) != len(facts):
        return [f"  {source.path}: {len(facts)} files -> {len(now)}"]
    return [
        f"  {new.path}: sha256 {old.sha256[:12]} ({old.size_bytes:,} bytes) -> {new.sha256[:12]} ({new.size_bytes:,} bytes)"
        for old, new in zip(facts, now, strict=True)
        if old.sha256 != new.sha256
    ]


def _locate(spec: Spec, base: Path) -> Located:
    try:
        return locate(spec.model, base)
    except ModelError as error:
        if not isinstance(spec.model, FolderModel):
            raise
        raise ModelError(
            error.problem, "if it lies elsewhere now, name the place with --set model.path=FOLDER"
        ) from None


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
    """The plan with what has changed, paths as the user writes them; a key that its new choice does not have is gone, and one that
    only it has is there."""
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
