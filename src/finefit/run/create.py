"""Finds or creates the run directory that a command means. A new one is filled under a hidden name and then renamed to
runs/<name>-<n>, so it is never seen half made.

The directory of a training holds its records, whether it is a run of its own (a flat spec) or a stage of a pipeline.
The directory of a pipeline holds its stages, each in a folder of its own."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from finefit import __version__
from finefit.artifacts.atomic import publish, report_disk_full, staged_folder, write_text
from finefit.artifacts.forecasts import Forecast, Plan
from finefit.artifacts.records import (
    Check,
    Facts,
    Inputs,
    PipelineState,
    Run,
    StageState,
    read_record,
    write_record,
)
from finefit.artifacts.rundir import RunDir, StageDir, newest_with_digest, put_in_place
from finefit.custom.inputs import processor_opener
from finefit.data.image_check import copy_processor_files, image_processor_of
from finefit.data.render import open_renderer
from finefit.errors import FindingError, SpecError
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_machine
from finefit.model.resolve_model import ResolvedModel, custom_source, resolve_start
from finefit.plan.prepared_data import PreparedData, find_sources, prepare_data
from finefit.plan.resolve import make_stage, resolve
from finefit.plan.target import nodes_of
from finefit.preflight import in_order, require_no_errors
from finefit.preflight.data import data_findings, require_data
from finefit.preflight.pipeline import training_findings
from finefit.preflight.training import forecast_here
from finefit.run.cache_inputs import outside_inputs, pinned, run_digest
from finefit.run.staleness import Stages, forecast_pending
from finefit.spec.load import spec_to_json
from finefit.spec.models import CustomModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import DeepSpeed, Engine, Evaluation, Spec
from finefit.spec.stages import MovePath, moved
from finefit.spec.tasks import CustomTask
from finefit.tasks.task_files import keep_model_file, keep_task_files, task_sha256

_RECORDS_BYTES = 1 << 20
"""What the records of a run take before its stages begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a command asks for, with the content of every file and model that it names."""

    pipeline: Pipeline
    base: Path
    """Where relative paths of the spec start."""
    spec_text: str
    overrides: tuple[str, ...] = ()
    inputs: dict[str, str]
    nodes: int = 1
    """That the ranks of a training run on."""

    @property
    def digest(self) -> str:
        """Equal digests are the same run, wherever its files lie."""
        return run_digest(self.pipeline, self.inputs, self.nodes)


def read_request(
    pipeline: Pipeline, base: Path, *, spec_text: str, overrides: tuple[str, ...] = (), nodes: int | None = None
) -> RunRequest:
    """`nodes`: that ranks were started on already; otherwise those of the launcher."""
    if pipeline.is_flat:
        find_sources(pipeline.flat_spec.data, base)  # before the model: every missing file is reported at once
        nodes = nodes or nodes_of(pipeline.flat_spec.launcher)
    return RunRequest(
        pipeline=pipeline,
        base=base,
        spec_text=spec_text,
        overrides=overrides,
        inputs=outside_inputs(pipeline, base),
        nodes=nodes or 1,
    )


def find_stages(request: RunRequest, *, runs: Path, new: bool) -> Stages:
    """The stages of a request, with the newest run that has the same digest, where there is one."""
    run = None if new else newest_with_digest(runs, request.pipeline.name, request.digest)
    pipeline = request.pipeline if run is None else in_order_of(run, request.pipeline)
    return Stages(pipeline=pipeline, base=request.base, runs=runs, run=run)


def in_order_of(run: RunDir, pipeline: Pipeline) -> Pipeline:
    """The stages in the order that numbers the folders of a run, in whichever order the spec names them now."""
    if pipeline.is_flat:
        return pipeline
    order = [state.name for state in read_record(run.state, PipelineState).stages]
    return pipeline.model_copy(update={"stages": {name: pipeline.stages[name] for name in order}})


def create_run(request: RunRequest, *, runs: Path, only: str | None = None, forced: Collection[str] = ()) -> RunDir:
    """A new run is planned and checked first: what does not fit, or cannot work, is refused before anything exists."""
    pipeline = request.pipeline
    if pipeline.is_flat:
        return _create_training(request, runs, lambda staging: put_in_place(staging, runs, pipeline.name))
    stages = Stages(pipeline=pipeline, base=request.base, runs=runs, run=None)
    forecasts, _ = forecast_pending(stages, only=only, forced=forced)
    with _staging(runs, pipeline.name, _RECORDS_BYTES) as staging:
        _fill_pipeline(RunDir(staging), request, forecasts)
        return RunDir(put_in_place(staging, runs, pipeline.name))


def create_stage_run(place: Path, request: RunRequest) -> RunDir:
    """The run directory of a training stage, where its pipeline wants it; nothing is there yet."""
    return _create_training(request, place.parent, lambda staging: publish(staging, place))


def _create_training(request: RunRequest, folder: Path, put: Callable[[Path], Path]) -> RunDir:
    spec = request.pipeline.flat_spec
    opened = read_training_inputs(spec, request.base, folder / spec.name)
    needed_bytes = sum(opened.prepared.path(name).stat().st_size for name in opened.prepared.record.files)
    with _staging(folder, spec.name, needed_bytes) as staging:
        _fill_training(RunDir(staging), request, opened)
        return RunDir(put(staging))


@contextmanager
def _staging(folder: Path, name: str, needed_bytes: int) -> Iterator[Path]:
    """A hidden directory as deep as the final one; after a failure it is gone."""
    with report_disk_full(folder / name, needed_bytes), staged_folder(folder, name) as staging:
        yield staging


def _write_run(run: RunDir, request: RunRequest, *, kind: Literal["train", "pipeline"]) -> None:
    """Last: only now is the directory a run."""
    record = Run(
        name=request.pipeline.name,
        digest=request.digest,
        finefit=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        kind=kind,
        status="prepared",
        overrides=request.overrides,
        inputs=request.inputs,
    )
    write_record(run.run, record)


# a pipeline


def _fill_pipeline(run: RunDir, request: RunRequest, forecasts: dict[str, Forecast]) -> None:
    pipeline = request.pipeline
    (run.path / "stages").mkdir()
    run.log.parent.mkdir()
    write_text(run.spec_yaml, request.spec_text)
    write_text(run.spec_json, spec_to_json(relocated(request, run)) + "\n")
    write_record(run.plan, Plan(stages={}, forecasts=forecasts))
    waiting = tuple(
        StageState(name=name, kind=pipeline.stages[name].kind, place=f"stages/{number}-{name}", status="waiting")
        for number, name in enumerate(pipeline.order(), 1)
    )
    write_record(run.state, PipelineState(stages=waiting))
    _write_run(run, request, kind="pipeline")


def relocated(request: RunRequest, run: RunDir) -> Pipeline:
    """With paths relative to the run directory, and branches of the hub pinned to today's commits."""
    return pinned(moved(request.pipeline, between(request.base.resolve(), run.path.resolve())))


def between(old: Path, new: Path) -> MovePath:
    """Rewrites a path that is relative to `old` into one that is relative to `new`."""
    return lambda path: Path(os.path.relpath(old / path, new)).as_posix()


# a training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """The model and the prepared rows of a training."""

    model: ResolvedModel
    prepared: PreparedData
    record: Inputs


def read_training_inputs(spec: Spec, base: Path, run: Path) -> TrainingInputs:
    """`base` is where the spec's relative paths start; recorded paths are relative to `run`."""
    model = resolve_start(spec.model, spec.tuning, base)
    prepared, move = prepare_data(spec, base, model.folder), between(base, run.resolve())
    record = Inputs(
        data={
            split: tuple(tuple(replace(fact, path=move(fact.path)) for fact in files) for files in sources)
            for split, sources in prepared.sources.items()
        },
        model=model.name,
        model_fingerprint=model.fingerprint,
        template_sha256=prepared.record.template_sha256,
        engine_sha256=engine_sha256(spec.engine, base),
        tasks_sha256=_tasks_sha256(spec, base),
        code_sha256=custom_source(spec.model, base).sha256 if isinstance(spec.model, CustomModel) else None,
        images_sha256=prepared.record.images_sha256,
    )
    return TrainingInputs(model=model, prepared=prepared, record=record)


def engine_sha256(engine: Engine, base: Path) -> str | None:
    """Of a DeepSpeed JSON that the user wrote."""
    if not isinstance(engine, DeepSpeed) or engine.config is None:
        return None
    try:
        return sha256_of(base / engine.config)
    except OSError as error:
        raise SpecError(
            f"engine.config: {engine.config} cannot be read: {error.strerror}", "its path is relative to the spec file"
        ) from None


def _tasks_sha256(spec: Spec, base: Path) -> tuple[str | None, ...]:
    """Of custom tasks, and of the one that rows are built with; empty where there are none."""
    form = [Evaluation(task=spec.data.task, name="form")] if isinstance(spec.data.task, CustomTask) else []
    found = tuple(task_sha256(evaluation, base) for evaluation in (*form, *spec.evaluate))
    return found if any(found) else ()


def _fill_training(run: RunDir, request: RunRequest, opened: TrainingInputs) -> None:
    asked, base, machine = request.pipeline.flat_spec, request.base, read_machine()
    found = data_findings(asked, base, opened.prepared)
    require_data(found)
    where = run.stage(1, asked.objective.kind)
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    spec = keep_model_file(keep_task_files(relocated(request, run).flat_spec, run.path, run.path), run.path)
    write_text(run.spec_yaml, request.spec_text)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    write_record(run.facts, Facts(machine=machine, inputs=opened.record))
    prepared = _copy_data(where, opened.prepared)
    _save_tokenizer(where, asked, base, opened.model.folder)
    lengths = opened.prepared.record.lengths
    assert lengths is not None  # otherwise there was a finding
    num_rows = lengths.num_rows
    assert num_rows is not None
    forecast = forecast_here(asked, base, lengths, machine, nodes=request.nodes)
    values = resolve(asked, overrides=request.overrides, machine=machine, num_rows=num_rows, forecast=forecast)
    findings = in_order((*training_findings(asked, forecast, machine, base, run.path), *found))
    require_no_errors(((None, finding) for finding in findings), FindingError)
    write_record(run.check, Check(findings=findings))
    stage = make_stage(spec, values, inputs=opened.record, forecast=forecast, num_rows=num_rows, prepared=prepared)
    write_record(run.plan, Plan(stages={stage.name: values}, forecasts={stage.name: forecast}))
    write_record(where.stage, stage)
    _write_run(run, request, kind="train")


def _save_tokenizer(where: StageDir, spec: Spec, base: Path, folder: Path) -> None:
    """With the settings that end an answer of this model."""
    data = spec.data
    processor = image_processor_of(processor_opener(spec.model, base, folder, data.images))
    renderer = open_renderer(folder, data.template, template_options=data.template_options, image_processor=processor)
    renderer.tokenizer.save_pretrained(where.tokenizer)
    copy_processor_files(folder, where.tokenizer)
    settings = folder / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, where.tokenizer / settings.name)


def _copy_data(where: StageDir, prepared: PreparedData) -> dict[str, str]:
    """A run directory needs neither the data files nor the cache again. Returns the sha256 of what the workers read."""
    for name in prepared.record.files:
        shutil.copyfile(prepared.path(name), where.ledger if name == where.ledger.name else where.prepared(name))
    return {name: sha256 for name, sha256 in prepared.record.files.items() if name != where.ledger.name}
