"""Determines whose answers are scored: a checkpoint of a training run, an external model, or answers in a file. The
last two get a run directory of their own, with an eval.json in place of a training run's stage.json."""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

from finefit import __version__
from finefit.artifacts.atomic import publish, staged_folder
from finefit.artifacts.checkpoint import MANIFEST, list_checkpoints, manifest_sha256
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Facts, Inputs, Run, read_if_there, read_record, write_record
from finefit.artifacts.rundir import (
    RunDir,
    StageDir,
    is_run,
    newest_with_digest,
    put_in_place,
    runs_named,
    stage_holding,
    stage_of,
)
from finefit.artifacts.stage_records import EvalStage, ModelSetup, Stage, Subject
from finefit.custom.inputs import processor_opener, raw_image_processor
from finefit.data.columns import RecordError
from finefit.data.image_check import ImageArchive, ImageChecker
from finefit.data.render import open_renderer
from finefit.data.rows import IMAGE_ARCHIVE, BadRow, item_line, read_items
from finefit.data.sources import open_source
from finefit.errors import DataError, RunError
from finefit.evaluate.external_model import ExternalModel
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_machine
from finefit.plan.prepared_data import PreparedData
from finefit.plan.resolve import precision_on
from finefit.run.create import save_tokenizer
from finefit.run.eval_rows import ITEMS, NO_ITEMS, answers_name, file_facts, prepare_eval_rows
from finefit.spec.data import Source
from finefit.spec.load import load_pipeline
from finefit.spec.models import FolderModel, Full, ShapeModel
from finefit.spec.served import Server
from finefit.spec.stages import TrainStage, moved
from finefit.spec.tasks import CustomTask
from finefit.tasks.custom import keep_form

Device = Literal["cpu", "cuda"]
EARLIER = ".earlier-"
"""Prefix of a run directory that was set aside."""
_ALIASES = ("final", "best")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9]+")
"""The form in which `finefit run` names a run directory."""


def refuse_what_has_not_run(target: str, runs: Path) -> None:
    """Refuses a spec file, or a run directory that does not exist: only runs can be scored."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        pipeline = load_pipeline(path)
        trained = [name for name, stage in pipeline.stages.items() if isinstance(stage, TrainStage)]
        made = [str(run.path) for run in runs_named(runs, pipeline.name)]
        if not pipeline.is_flat:  # only one of several stages can be meant
            made = [f"{run}/{stage}" for run in made for stage in trained]
        problem = f"{target} is a spec, but `eval` scores runs"
        if len(made) == 1:
            raise RunError(problem, f"give `finefit eval {made[0]}`")
        if made:
            raise RunError(problem, f"give `finefit eval RUN` with one of: {', '.join(made)}")
        problem += f", and {runs} has no run called {pipeline.name} yet"
        raise RunError(problem, f"run `finefit run {target}` first")
    if not path.exists() and (path.parent.name == runs.name or _RUN_NAME.fullmatch(target)):
        there = ", ".join(sorted(found.name for found in runs.iterdir() if is_run(found))) if runs.is_dir() else ""
        remedy = "create it with `finefit run SPEC`" + (f"; {runs} has {there}" if there else "")
        raise RunError(f"the run {target} does not exist yet", remedy)


def run_subject(where: StageDir, checkpoint: str) -> Subject:
    """Returns the subject of an evaluation-only run, or a checkpoint of a training run."""
    if is_there(where.eval_stage):
        return read_record(where.eval_stage, EvalStage).subject
    stage, is_base = read_record(where.stage, Stage), checkpoint == "base"
    folder = where.checkpoints / checkpoint
    return Subject(
        **{field.name: getattr(stage, field.name) for field in fields(ModelSetup)},
        weights=None if is_base else str(folder.relative_to(where.run)),
        manifest_sha256=None if is_base else manifest_sha256(folder),
        items_sha256=stage.prepared.get(ITEMS, NO_ITEMS),
    )


def without_model(subject: Subject, name: str, fingerprint: str) -> Subject:
    """Returns the subject for existing answers: no model is asked."""
    nothing = ShapeModel(kind="shape", config={})
    known = replace(subject, model=nothing, model_name=name, model_fingerprint=fingerprint)
    return replace(known, weights=None, manifest_sha256=None)


def server_subject(subject: Subject, server: Server) -> Subject:
    """Returns the subject for a server's answers to the same rows. Two servers are the same subject if their address,
    model and endpoint are."""
    found = without_model(subject, _shown_server(server), _server_fingerprint(server))
    return replace(found, tuning=Full(kind="full"))


def _shown_server(server: Server) -> str:
    return f"{server.model} at {server.url}"


def _server_fingerprint(server: Server) -> str:
    content = [server.url.rstrip("/"), server.model, server.endpoint]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def server_name(server: Server) -> str:
    """Returns the name under which the scores of a server are stored."""
    model = PurePosixPath(server.model).name
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "-" for c in model).strip("-._")
    return f"server-{kept[:40] or 'model'}-{_server_fingerprint(server)[:8]}"


def checkpoints_of(run: RunDir, asked: str) -> list[str]:
    """`all` stands for the base and every checkpoint that is kept."""
    where = stage_of(run)
    if is_there(where.eval_stage):
        return [read_record(where.eval_stage, EvalStage).name]
    if asked == "all":
        return ["base", *(path.name for path in list_checkpoints(where.checkpoints))]
    return [resolve_checkpoint(where, asked)]


def resolve_checkpoint(where: StageDir, checkpoint: str) -> str:
    """`final` and `best` are resolved to the checkpoint that they refer to."""
    if checkpoint == "base" or is_there(where.eval_stage):
        return checkpoint
    name = f"checkpoint-{checkpoint}" if checkpoint.isdigit() else checkpoint
    aliases = [alias for alias in _ALIASES if (where.checkpoints / alias).is_dir()]
    known = [*aliases, *(path.name for path in list_checkpoints(where.checkpoints))]
    if name not in known:
        remedy = f"choose from base, {', '.join(known)}" if known else "there is only base so far"
        raise RunError(f"{where.run.name} has no checkpoint {checkpoint}", remedy)
    return (where.checkpoints / name).resolve().name if name in _ALIASES else name


def open_eval_run(
    runs: Path,
    name: str,
    digest: str,
    fill: Callable[[RunDir], None],
    *,
    is_numbered: bool = True,
    status: Literal["prepared", "finished"] = "prepared",
) -> RunDir:
    """Returns the newest run of the same content, or a new one, which `fill` receives under a hidden name.
    `is_numbered`: the run is runs/<name>-<n>; otherwise it is runs/<name>, and anything else at that path is set
    aside."""
    place = runs / name
    if is_numbered:
        found = newest_with_digest(runs, name, digest)
    else:
        there = read_if_there(RunDir(place).run, Run)
        found = RunDir(place) if there is not None and there.digest == digest else None
    if found is not None:
        return found
    with staged_folder(runs, name) as staging:
        run = RunDir(staging)
        for folder in (run.stage(1, "eval").path / "data", run.log.parent):
            folder.mkdir(parents=True)
        run.log.touch()
        fill(run)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = Run(name=name, digest=digest, finefit=__version__, created=now, kind="eval", status=status)
        write_record(run.run, record)
        if is_numbered:
            return RunDir(put_in_place(staging, runs, name))
        if place.exists():
            place.rename(place.with_name(f"{EARLIER}{name}-{time.time_ns()}"))
        return RunDir(publish(staging, place))


def open_rows_run(
    external: ExternalModel,
    prepared: PreparedData,
    *,
    base: Path,
    device: Device,
    precision: Literal["bf16", "fp16", "fp32"],
    runs: Path,
    is_numbered: bool = True,
) -> RunDir:
    """Opens the run of an external model on rows that were rendered for it. `base`: the folder that the rows' paths are
    relative to."""
    record, facts, data = prepared.record, file_facts(prepared), external.prompts.data
    rendered: list[Any] = [data.model_dump(mode="json")]  # the settings that rows are rendered with
    if isinstance(data.task, CustomTask):  # a user's own task file counts by its content, not by its path
        form = data.task.model_copy(update={"path": ""})
        rendered = [data.model_copy(update={"task": form}).model_dump(mode="json"), sha256_of(Path(data.task.path))]
    settings = [device, precision, external.prompts.seed, external.max_prompt_tokens, *rendered]
    images = [] if record.images_sha256 is None else [record.images_sha256]
    content = [external.fingerprint, [fact.sha256 for fact in facts], record.template_sha256, settings, *images]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def fill(run: RunDir) -> None:
        where = run.stage(1, "eval")
        for name in (ITEMS, IMAGE_ARCHIVE):
            if name in record.files:
                shutil.copyfile(prepared.path(name), where.prepared(name))
        shutil.copyfile(prepared.path("ledger.jsonl"), where.ledger)
        processor = processor_opener(external.model, Path.cwd(), external.resolved.folder, data.images)()
        open_with = partial(open_renderer, template_options=data.template_options, image_processor=processor)
        where.tokenizer.mkdir()
        save_tokenizer(open_with(external.tokenizer, data.template), external.resolved.folder, where.tokenizer)
        weights = external.weights
        manifest = None if weights is None else weights / MANIFEST
        subject = Subject(
            model=moved(external.model, lambda path: _relative(Path(path), run.path)),
            model_name=_shown_name(external),
            model_fingerprint=external.resolved.fingerprint,
            weights=None if weights is None else _relative(weights, run.path),
            manifest_sha256=sha256_of(manifest) if manifest and manifest.is_file() else None,
            tuning=external.tuning,
            device=device,
            precision=precision,
            threads=torch.get_num_threads(),
            seed=external.prompts.seed,
            template=data.template,
            template_options=data.template_options,
            template_sha256=open_with(where.tokenizer, data.template).sha256(),
            images=data.images,
            max_prompt_tokens=external.max_prompt_tokens,
            form=keep_form(data.task, Path.cwd(), run.path),
            items_sha256=record.files[ITEMS],
        )
        stage = EvalStage(
            name=external.label,
            subject=subject,
            prompt_tokens=record.prompt_tokens or 1,
            prompt_grids=record.prompt_grids,
            num_items=len(read_items(where.prepared(ITEMS))),
        )
        write_record(where.eval_stage, stage)
        inputs = Inputs(
            data={"test": (tuple(replace(fact, path=_relative(base / fact.path, run.path)) for fact in facts),)},
            model=subject.model_name,
            model_fingerprint=subject.model_fingerprint,
            template_sha256=subject.template_sha256,
        )
        write_record(run.facts, Facts(machine=read_machine(), inputs=inputs))

    return open_eval_run(runs, external.name, digest, fill, is_numbered=is_numbered)


def open_model_run(external: ExternalModel, data: str, *, device: Device | None, runs: Path) -> RunDir:
    """Returns the run directory of an external model on the rows of `data`."""
    device, base = device or ("cuda" if torch.cuda.is_available() else "cpu"), Path.cwd()
    prompts = external.prompts.model_copy(update={"model": external.model})  # the model knows its image processor
    prepared = prepare_eval_rows(Source(path=data), prompts, external.tokenizer, base=base)
    return open_rows_run(external, prepared, base=base, device=device, precision=precision_on(device), runs=runs)


def _shown_name(external: ExternalModel) -> str:
    """Returns the display name; a model made by a stage is named after the stage."""
    name, weights = external.resolved.name, external.weights
    if isinstance(external.model, FolderModel):
        name = stage_holding(Path(name)) or Path(name).name
    return name if weights is None else f"{name} + {stage_holding(weights) or weights.name}"


def _relative(path: Path, run: Path) -> str:
    """Paths are relative because run directories are copied, often together with the files beside them."""
    return Path(relpath(path.resolve(), run.resolve())).as_posix()


def open_answers_run(answers: Path, data: str, *, runs: Path) -> RunDir:
    about = {"name": answers_name(answers), "shown": f"answers of {answers.name}", "fingerprint": sha256_of(answers)}
    return _open_run_without_model(data, runs=runs, **about)


def open_server_run(server: Server, data: str, *, runs: Path) -> RunDir:
    about = {"name": server_name(server), "shown": _shown_server(server), "fingerprint": _server_fingerprint(server)}
    return _open_run_without_model(data, runs=runs, **about)


def _open_run_without_model(data: str, *, runs: Path, name: str, shown: str, fingerprint: str) -> RunDir:
    """The run holds the rows but no model and no tokenizer. Images are checked but not processed, because no model sees
    them."""
    check_images, rows = ImageChecker(raw_image_processor()), []
    for row in open_source(Source(path=data), Path.cwd(), split="test").rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "fix or remove this row")
        try:
            rows.append(replace(row, image_refs=check_images(row)))
        except RecordError as fault:
            raise DataError(f"{row.place} {fault}", "fix or remove this row") from None
    lines = "".join(map(item_line, rows))
    subject = Subject(
        model=ShapeModel(kind="shape", config={}),
        model_name=shown,
        model_fingerprint=fingerprint,
        tuning=Full(kind="full"),
        device="cpu",
        precision="fp32",
        threads=1,
        seed=0,
        template="plain",
        template_sha256=NO_ITEMS,
        items_sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )

    def fill(run: RunDir) -> None:
        where = run.stage(1, "eval")
        where.prepared(ITEMS).write_text(lines, encoding="utf-8")
        with ImageArchive(where.path / "data") as archive:
            for row in rows:
                archive.keep(row.images, row.image_refs)
        write_record(where.eval_stage, EvalStage(name=name, subject=subject, prompt_tokens=1, num_items=len(rows)))

    digest = hashlib.sha256(json.dumps([lines, fingerprint]).encode()).hexdigest()
    return open_eval_run(runs, f"eval-{name}", digest, fill)
