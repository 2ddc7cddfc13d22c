"""Finds or creates the run directory that a command means. A new one is filled under a hidden name and then renamed to
runs/<name>-<n>, so it is never seen half made. That of a pipeline holds its stages, each in a folder of its own."""

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
from finefit.errors import FindingError, SpecError
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_machine
from finefit.model.resolve_model import ResolvedModel, custom_source
from finefit.plan.prepared_data import PreparedData, find_sources, prepare_data
from finefit.plan.resolve import make_stage, resolve
from finefit.plan.target import nodes_of
from finefit.preflight import in_order, require_no_errors
from finefit.preflight.data import data_findings, require_data
from finefit.preflight.model import require_model
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
from finefit.tasks.custom import keep_model_file, keep_task_files, task_sha256

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
    """`place`: where a pipeline wants its stage, and nothing is yet; otherwise the next number in `folder`."""
    spec = request.pipeline.flat_spec
    model, prepared, inputs = read_training_inputs(spec, request.base, folder / spec.name)
    needed_bytes = sum(prepared.path(name).stat().st_size for name in prepared.record.files)
    with report_disk_full(folder / spec.name, needed_bytes), staged_folder(folder, spec.name) as staging:
        _fill_training(RunDir(staging), request, model, prepared, inputs)
        return RunDir(put_in_place(staging, folder, spec.name) if place is None else publish(staging, place))


def _write_run(run: RunDir, request: RunRequest) -> None:
    """Last: only now is the directory a run."""
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
    """With paths relative to the run directory, and branches of the hub pinned to today's commits."""
    return pinned(moved(request.pipeline, between(request.base.resolve(), run.path.resolve())))


def between(old: Path, new: Path) -> MovePath:
    """Rewrites a path that is relative to `old` into one that is relative to `new`."""
    return lambda path: Path(os.path.relpath(old / path, new)).as_posix()


def read_training_inputs(spec: Spec, base: Path, run: Path) -> tuple[ResolvedModel, PreparedData, Inputs]:
    """The model, its prepared rows and their record. Relative paths start in `base`, recorded ones in `run`."""
    model = require_model(spec.model, spec.tuning, base)
    prepared, move = prepare_data(spec, base, model.folder), between(base, run.resolve())
    form = [Evaluation(task=spec.data.task, name="form")] if isinstance(spec.data.task, CustomTask) else []
    tasks = tuple(task_sha256(evaluation, base) for evaluation in (*form, *spec.evaluate))
    record = Inputs(
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
    return model, prepared, record


def engine_sha256(engine: Engine, base: Path) -> str | None:
    """Of a DeepSpeed JSON that the user wrote."""
    if not isinstance(engine, DeepSpeed) or engine.config is None:
        return None
    try:
        return sha256_of(base / engine.config)
    except OSError as error:
        problem = f"engine.config: {engine.config} cannot be read: {error.strerror}"
        raise SpecError(problem, "its path is relative to the spec file") from None


def _fill_training(
    run: RunDir, request: RunRequest, model: ResolvedModel, prepared: PreparedData, inputs: Inputs
) -> None:
    asked, base, machine, data = request.pipeline.flat_spec, request.base, read_machine(), prepared.record
    found = data_findings(asked, base, prepared)
    require_data(found)
    where = run.stage(1, asked.objective.kind)
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    spec = keep_model_file(keep_task_files(relocated(request, run).flat_spec, run.path, run.path), run.path)
    write_text(run.spec_yaml, request.spec_text)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    write_record(run.facts, Facts(machine=machine, inputs=inputs))
    for name in data.files:  # a run directory needs neither the data files nor the cache again
        shutil.copyfile(prepared.path(name), where.ledger if name == where.ledger.name else where.prepared(name))
    read = {name: sha256 for name, sha256 in data.files.items() if name != where.ledger.name}  # by the workers
    template, options = asked.data.template, asked.data.template_options
    processor = image_processor_of(processor_opener(asked.model, base, model.folder, asked.data.images))
    renderer = open_renderer(model.folder, template, template_options=options, image_processor=processor)
    save_tokenizer(renderer, model.folder, where.tokenizer)
    assert data.lengths is not None  # otherwise there was a finding
    num_rows = data.lengths.num_rows
    assert num_rows is not None
    forecast = forecast_here(asked, base, data.lengths, machine, nodes=request.nodes)
    values = resolve(asked, overrides=request.overrides, machine=machine, num_rows=num_rows, forecast=forecast)
    findings = in_order((*training_findings(asked, forecast, machine, base, run.path), *found))
    require_no_errors(((None, finding) for finding in findings), FindingError)
    write_record(run.check, Check(findings=findings))
    stage = make_stage(spec, values, inputs=inputs, forecast=forecast, num_rows=num_rows, prepared=read)
    write_record(run.plan, Plan(stages={stage.name: values}, forecasts={stage.name: forecast}))
    write_record(where.stage, stage)
    _write_run(run, request)


def save_tokenizer(renderer: Renderer, model: Path, place: Path) -> None:
    """With the settings that end an answer of this model."""
    renderer.tokenizer.save_pretrained(place)
    copy_processor_files(model, place)
    if (settings := model / "generation_config.json").is_file():
        shutil.copyfile(settings, place / settings.name)
