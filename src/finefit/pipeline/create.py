"""A run directory comes into being whole: filled under a hidden name, then renamed to runs/<name>-<n>."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from finefit import __version__
from finefit.artifacts.atomic import full_disk_named, write_text
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import Check, Facts, Run, write_record
from finefit.artifacts.rundir import RunDir, StageDir, next_number
from finefit.data.looking import eye_of, keep_processor
from finefit.data.render import open_renderer
from finefit.errors import RunError
from finefit.facts.machine import read_machine
from finefit.pipeline.data import PreparedData
from finefit.pipeline.inputs import Opened, between, pinned, relocate
from finefit.pipeline.preparation import data_findings, findings_of, foresee, require_data, require_sound
from finefit.pipeline.taskfiles import keep_model_file, keep_task_files
from finefit.plan.resolve import make_stage, resolve
from finefit.preflight.findings import in_order
from finefit.spec.load import spec_to_json


def create_run(opened: Opened, *, spec_text: str, overrides: tuple[str, ...], base: Path, runs: Path) -> RunDir:
    """`base` is where the spec's relative paths start."""
    with _staged(opened, spec_text, overrides, base, runs) as staging:
        return RunDir(put_in_place(staging, runs, opened.spec.name))


def create_run_at(place: Path, opened: Opened, *, spec_text: str, base: Path) -> RunDir:
    """The run of one stage, where its pipeline wants it; nothing is there yet."""
    with _staged(opened, spec_text, (), base, place.parent) as staging:
        return RunDir(staging.rename(place))


@contextmanager
def _staged(opened: Opened, spec_text: str, overrides: tuple[str, ...], base: Path, folder: Path) -> Iterator[Path]:
    """A whole run directory under a hidden name, as deep as it will lie; what is not moved away is gone after a failure."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".staging-{opened.spec.name}-", dir=folder))
    try:
        needed_bytes = sum(opened.prepared.path(name).stat().st_size for name in opened.prepared.record.files)
        with full_disk_named(folder / opened.spec.name, needed_bytes):
            _fill(RunDir(staging), opened, spec_text, overrides, base)
        staging.chmod(0o755)
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def put_in_place(staging: Path, runs: Path, name: str) -> Path:
    while True:
        final = runs / f"{name}-{next_number(runs, name)}"
        try:
            staging.rename(final)
        except OSError:
            if not final.exists():
                raise
        else:
            return final  # otherwise another process took the number: the next one then


def _fill(run: RunDir, opened: Opened, spec_text: str, overrides: tuple[str, ...], base: Path) -> None:
    spec = pinned(relocate(opened.spec, between(base.resolve(), run.path.resolve())), opened.located)
    found = data_findings(opened.spec, base, opened.prepared)
    require_data(found)
    where = run.stage(1, spec.objective.kind)
    for folder in (where.path / "data", where.tokenizer, run.log.parent):
        folder.mkdir(parents=True)
    spec = keep_model_file(keep_task_files(spec, run.path, run.path), run.path)
    write_text(run.spec_yaml, spec_text)
    write_text(run.spec_json, spec_to_json(spec) + "\n")
    machine = read_machine()
    write_record(run.facts, Facts(machine=machine, inputs=opened.inputs))
    files = _take_data(where, opened.prepared)
    _take_tokenizer(where, opened, base)
    lengths = opened.prepared.record.lengths
    assert lengths is not None  # else there was a finding
    assert lengths.num_rows is not None
    foretold = foresee(opened.spec, base, lengths, machine, nodes=opened.nodes)
    values = resolve(opened.spec, overrides=overrides, machine=machine, num_rows=lengths.num_rows, forecast=foretold)
    findings = in_order(
        (*findings_of(opened.spec, foretold, machine, base, run.path, values["total_steps"].value), *found)
    )
    require_sound(findings)
    write_record(run.check, Check(findings=findings))
    stage = make_stage(spec, values, inputs=opened.inputs, forecast=foretold, num_rows=lengths.num_rows, prepared=files)
    write_record(run.plan, Plan(stages={stage.name: values}, forecasts={stage.name: foretold}))
    write_record(where.stage, stage)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_record(
        run.run,
        Run(
            name=spec.name,
            digest=opened.digest,
            finefit=__version__,
            created=now,
            status="prepared",
            overrides=overrides,
        ),
    )


def _take_tokenizer(where: StageDir, opened: Opened, base: Path) -> None:
    """With what the model's own settings end an answer by."""
    from finefit.step.custom_eye import see_of  # peft comes with it

    folder, data = opened.located.folder, opened.spec.data
    eye = eye_of(see_of(opened.spec.model, base, folder, data.images))
    open_renderer(folder, data.template, template_options=data.template_options, eye=eye).tokenizer.save_pretrained(
        where.tokenizer
    )
    keep_processor(folder, where.tokenizer)
    settings = folder / "generation_config.json"
    if settings.is_file():
        shutil.copyfile(settings, where.tokenizer / settings.name)


def _take_data(where: StageDir, prepared: PreparedData) -> dict[str, str]:
    """A run directory needs neither the data files nor the cache again. Returns the sha256 of what the workers read."""
    for name in prepared.record.files:
        shutil.copyfile(prepared.path(name), where.ledger if name == where.ledger.name else where.prepared(name))
    return {name: sha256 for name, sha256 in prepared.record.files.items() if name != where.ledger.name}


def stage_of(run: RunDir) -> StageDir:
    """The only one of a run that is no pipeline."""
    match run.stages():
        case [where]:
            return where
        case found:
            there = ", ".join(where.path.name for where in found) or "none"
            raise RunError(
                f"{run.path / 'stages'} should hold one stage and holds {there}: it was changed by hand",
                "start again with --new",
            )
