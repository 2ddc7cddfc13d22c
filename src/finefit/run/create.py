"""Finds or creates the run directory that a command refers to. A new one is filled under a hidden name and then renamed
to runs/<name>-<n>, so it is never seen incomplete. The directory of a pipeline holds each stage in a folder of its
own."""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from finefit import __version__
from finefit.artifacts.atomic import publish, report_disk_full, staged_folder, write_text
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Check, Facts, Inputs, PipelineState, Run, StageState, read_record, write_record
from finefit.artifacts.rundir import RunDir, newest_with_digest, put_in_place
from finefit.custom.inputs import processor_opener
from finefit.data.image_check import copy_processor_files, image_processor_of
from finefit.data.render import Renderer, open_renderer
from finefit.errors import SpecError
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_machine
from finefit.model.resolve_model import ResolvedModel, custom_source
from finefit.plan.prepared_data import PreparedData, find_sources
from finefit.plan.resolve import make_stage, resolve
from finefit.plan.target import nodes_of
from finefit.preflight import require_no_errors
from finefit.preflight.data import require_data
from finefit.preflight.model import require_model
from finefit.run.cache_inputs import outside_inputs, pinned, run_digest
from finefit.run.check_stages import CheckedPipeline, check_pipeline
from finefit.run.staleness import Stages, forecast_pending
from finefit.spec.load import spec_to_json
from finefit.spec.models import CustomModel
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import DeepSpeed, Engine, Evaluation, Spec
from finefit.spec.stages import MovePath, moved
from finefit.spec.tasks import CustomTask
from finefit.tasks.custom import keep_model_file, keep_task_files, task_sha256

_RECORDS_BYTES = 1 << 20
"""Size of a run's records before its stages begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A command's request, with the content of every file and model that it names."""

    pipeline: Pipeline
    base: Path
    """The folder that relative paths in the spec start from."""
    spec_text: str
    overrides: tuple[str, ...] = ()
    inputs: dict[str, str]
    nodes: int = 1
    """Number of nodes that the ranks run on."""

    @property
    def digest(self) -> str:
        """Requests with equal digests are the same run, wherever their files are stored."""
        return run_digest(self.pipeline, self.inputs, self.nodes)


def read_request(
    pipeline: Pipeline, base: Path, *, spec_text: str, overrides: tuple[str, ...] = (), nodes: int | None = None
) -> RunRequest:
    """`nodes`: the number of nodes on which ranks were already started; by default that of the launcher."""
    if pipeline.is_flat:
        find_sources(pipeline.flat_spec.data, base)  # before the model, so that all missing files are reported at once
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
    """Returns the stages of a request, with the newest run that has the same digest, if there is one."""
    run = None if new else newest_with_digest(runs, request.pipeline.name, request.digest)
    pipeline = request.pipeline if run is None else in_order_of(run, request.pipeline)
    return Stages(pipeline=pipeline, base=request.base, runs=runs, run=run)


def in_order_of(run: RunDir, pipeline: Pipeline) -> Pipeline:
    """Returns the stages in the order by which the run's folders are numbered, whatever their order in the spec is
    now."""
    if pipeline.is_flat:
        return pipeline
    order = [state.name for state in read_record(run.state, PipelineState).stages]
    return pipeline.model_copy(update={"stages": {name: pipeline.stages[name] for name in order}})


def create_run(request: RunRequest, *, runs: Path, only: str | None = None, forced: Collection[str] = ()) -> RunDir:
    """A new run is planned and checked first: what does not fit or cannot work is rejected before anything is
    created."""
    pipeline = request.pipeline
    if pipeline.is_flat:
        return create_training(request, runs)
    stages = Stages(pipeline=pipeline, base=request.base, runs=runs, run=None)
    forecasts, _ = forecast_pending(stages, only=only, forced=forced)
    waiting = tuple(
        StageState(name=name, kind=pipeline.stages[name].kind, place=f"stages/{number}-{name}", status="waiting")
        for number, name in enumerate(pipeline.order(), 1)
    )
    with report_disk_full(runs / pipeline.name, _RECORDS_BYTES), staged_folder(runs, pipeline.name) as staging:
        run = RunDir(staging)
        (run.path / "stages").mkdir()
        run.log.parent.mkdir()
        write_text(run.spec_yaml, request.spec_text)
        write_text(run.spec_json, spec_to_json(relocated(request, run)) + "\n")
        write_record(run.plan, Plan(stages={}, forecasts=forecasts))
        write_record(run.state, PipelineState(stages=waiting))
        _write_run(run, request)
        return RunDir(put_in_place(staging, runs, pipeline.name))


def create_training(request: RunRequest, folder: Path, place: Path | None = None) -> RunDir:
    """`place`: the path of a pipeline's stage, which must not exist yet; by default the next number in `folder`."""
    spec = request.pipeline.flat_spec
    model = require_model(spec.model, spec.tuning, request.base)  # `check` fetches no weights
    found = check_pipeline(request.pipeline, request.base, folder, nodes=request.nodes)
    (checked,) = found.stages.values()
    require_data(checked.rows)
    require_no_errors(((None, finding) for _, finding in found.findings), found.refusal)
    prepared = checked.prepared
    assert prepared is not None  # otherwise there was a finding
    needed_bytes = sum(prepared.path(name).stat().st_size for name in prepared.record.files)
    with report_disk_full(folder / spec.name, needed_bytes), staged_folder(folder, spec.name) as staging:
        _fill_training(RunDir(staging), request, model, found)
        return RunDir(put_in_place(staging, folder, spec.name) if place is None else publish(staging, place))


def _write_run(run: RunDir, request: RunRequest) -> None:
    """Writes run.json last: only then is the directory a run."""
    record = Run(
        name=request.pipeline.name,
        digest=request.digest,
        finefit=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        kind="train" if request.pipeline.is_flat else "pipeline",
        status="prepared",
        overrides=request.overrides,
        inputs=request.inputs,
    )
    write_record(run.run, record)


def relocated(request: RunRequest, run: RunDir) -> Pipeline:
    """Makes paths relative to the run directory, and pins branches of the hub to their current commits."""
    return pinned(moved(request.pipeline, between(request.base.resolve(), run.path.resolve())))


def between(old: Path, new: Path) -> MovePath:
    """Returns a function that turns a path relative to `old` into one relative to `new`."""
    return lambda path: Path(os.path.relpath(old / path, new)).as_posix()


def training_inputs(spec: Spec, base: Path, run: Path, model: ResolvedModel, prepared: PreparedData) -> Inputs:
    """Relative paths start in `base`, recorded ones in `run`."""
    move = between(base, run.resolve())
    form = [Evaluation(task=spec.data.task, name="form")] if isinstance(spec.data.task, CustomTask) else []
    tasks = tuple(task_sha256(evaluation, base) for evaluation in (*form, *spec.evaluate))
    return Inputs(
        data={
            split: tuple(tuple(replace(fact, path=move(fact.path)) for fact in files) for files in sources)
            for split, sources in prepared.sources.items()
        },
        model=model.name,
        model_fingerprint=model.fingerprint,
        template_sha256=prepared.record.template_sha256,
        engine_sha256=engine_sha256(spec.engine, base),
        tasks_sha256=tasks if any(tasks) else (),
        code_sha256=custom_source(spec.model, base).sha256 if isinstance(spec.model, CustomModel) else None,
        images_sha256=prepared.record.images_sha256,
    )


def engine_sha256(engine: Engine, base: Path) -> str | None:
    """Returns the digest of the user's DeepSpeed JSON, if there is one."""
    if not isinstance(engine, DeepSpeed) or engine.config is None:
        return None
    try:
        return sha256_of(base / engine.config)
    except OSError as error:
        problem = f"engine.config: {engine.config} cannot be read: {error.strerror}"
        raise SpecError(problem, "its path is relative to the spec file") from None


def _fill_training(run: RunDir, request: RunRequest, model: ResolvedModel, found: CheckedPipeline) -> None:
    """`found`: without errors."""
    asked, base, machine = request.pipeline.flat_spec, request.base, read_machine()
    (checked,) = found.stages.values()
    prepared, forecast = checked.prepared, checked.forecast
    assert prepared is not None
    assert forecast is not None
    data, inputs = prepared.record, training_inputs(asked, base, run.path, model, prepared)
    where = run.stage(1, asked.objective.kind)
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    spec = keep_model_file(keep_task_files(relocated(request, run).flat_spec, run.path, run.path), run.path)
    write_text(run.spec_yaml, request.spec_text)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    write_record(run.facts, Facts(machine=machine, inputs=inputs))
    for name in data.files:  # a run directory needs neither the data files nor the cache afterwards
        shutil.copyfile(prepared.path(name), where.ledger if name == where.ledger.name else where.prepared(name))
    read = {name: sha256 for name, sha256 in data.files.items() if name != where.ledger.name}  # for the workers
    template, options = asked.data.template, asked.data.template_options
    processor = image_processor_of(processor_opener(asked.model, base, model.folder, asked.data.images))
    renderer = open_renderer(model.folder, template, template_options=options, image_processor=processor)
    save_tokenizer(renderer, model.folder, where.tokenizer)
    assert data.lengths is not None  # otherwise there is a finding
    num_rows = data.lengths.num_rows
    assert num_rows is not None
    values = resolve(asked, overrides=request.overrides, machine=machine, num_rows=num_rows, forecast=forecast)
    write_record(run.check, Check(findings=tuple(finding for _, finding in found.findings)))
    stage = make_stage(spec, values, inputs=inputs, forecast=forecast, num_rows=num_rows, prepared=read)
    write_record(run.plan, Plan(stages={stage.name: values}, forecasts={stage.name: forecast}))
    write_record(where.stage, stage)
    _write_run(run, request)


def save_tokenizer(renderer: Renderer, model: Path, place: Path) -> None:
    """Saves the tokenizer with the settings that end an answer of this model."""
    renderer.tokenizer.save_pretrained(place)
    copy_processor_files(model, place)
    if (settings := model / "generation_config.json").is_file():
        shutil.copyfile(settings, place / settings.name)
