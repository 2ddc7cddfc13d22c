"""Whose answers are scored: a checkpoint of a training run, an external model, or answers in a file. The last two get a
run directory of their own, with an eval.json where a training run has its stage.json."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

import torch

from finefit import __version__
from finefit.artifacts.atomic import publish, staged_folder
from finefit.artifacts.checkpoint import MANIFEST, list_checkpoints
from finefit.artifacts.records import Facts, Inputs, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir, newest_with_digest, put_in_place, stage_holding, stage_of
from finefit.artifacts.stage_records import EvalStage, ModelSetup, Stage, Subject
from finefit.custom.inputs import processor_opener
from finefit.data.image_check import ImageArchive, copy_processor_files
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import IMAGE_ARCHIVE, item_line, read_items
from finefit.errors import RunError
from finefit.evaluate.external_model import ExternalModel
from finefit.facts.files import sha256_of
from finefit.facts.machine import read_machine
from finefit.plan.prepared_data import PreparedData
from finefit.plan.resolve import precision_on
from finefit.run.eval_rows import ITEMS, NO_ITEMS, file_facts, prepare_eval_rows, read_eval_rows
from finefit.run.external_answers import answers_name
from finefit.spec.data import Data, Source
from finefit.spec.models import FolderModel, Full, ShapeModel
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask
from finefit.tasks.task_files import keep_form

Device = Literal["cpu", "cuda"]
EARLIER = ".earlier-"
"""How the name of a run directory begins that was set aside."""
_ALIASES = ("final", "best")


# Checkpoints of a run


def run_subject(where: StageDir, checkpoint: str) -> Subject:
    """The subject of a run that only evaluates, or a checkpoint of a training run."""
    if where.eval_stage.exists():
        return read_record(where.eval_stage, EvalStage).subject
    stage, is_base = read_record(where.stage, Stage), checkpoint == "base"
    folder = where.checkpoints / checkpoint
    return Subject(
        **{field.name: getattr(stage, field.name) for field in fields(ModelSetup)},
        weights=None if is_base else str(folder.relative_to(where.run)),
        manifest_sha256=None if is_base else sha256_of(folder / MANIFEST),
        items_sha256=stage.prepared.get(ITEMS, NO_ITEMS),
    )


def checkpoints_of(run: RunDir, asked: str) -> list[str]:
    """`all` means the base and every checkpoint that is kept."""
    where = stage_of(run)
    if where.eval_stage.exists():
        return [read_record(where.eval_stage, EvalStage).name]
    if asked == "all":
        return ["base", *(path.name for path in list_checkpoints(where.checkpoints))]
    return [resolve_checkpoint(where, asked)]


def resolve_checkpoint(where: StageDir, checkpoint: str) -> str:
    """`final` and `best` become the checkpoint that they name."""
    if checkpoint == "base" or where.eval_stage.exists():
        return checkpoint
    name = f"checkpoint-{checkpoint}" if checkpoint.isdigit() else checkpoint
    aliases = [alias for alias in _ALIASES if (where.checkpoints / alias).is_dir()]
    known = [*aliases, *(path.name for path in list_checkpoints(where.checkpoints))]
    if name not in known:
        remedy = f"there are base, {', '.join(known)}" if known else "there is only base so far"
        raise RunError(f"{where.run.name} has no checkpoint {checkpoint}", remedy)
    return (where.checkpoints / name).resolve().name if name in _ALIASES else name


# Run directories that only evaluate


def open_eval_run(
    runs: Path,
    name: str,
    digest: str,
    fill: Callable[[RunDir], None],
    *,
    is_numbered: bool = True,
    status: Literal["prepared", "finished"] = "prepared",
) -> RunDir:
    """The newest run of the same content, or a new one, which `fill` gets under a hidden name. `is_numbered`: it is
    runs/<name>-<n>; otherwise it is runs/<name>, and whatever else lies there is set aside."""
    place = runs / name
    if found := newest_with_digest(runs, name, digest) if is_numbered else _run_with_digest(place, digest):
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


def _run_with_digest(place: Path, digest: str) -> RunDir | None:
    """None where there is no run, or one of another content or version, or a damaged one."""
    try:
        return RunDir(place) if read_record(RunDir(place).run, Run).digest == digest else None
    except RunError:
        return None


# External models


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnRows:
    """An external model with the rows that it answers, as they are rendered for it."""

    external: ExternalModel
    prepared: PreparedData
    base: Path
    """Where the paths of the rows start."""
    device: Device
    precision: Literal["bf16", "fp16", "fp32"]

    def digest(self) -> str:
        external, record = self.external, self.prepared.record
        prompts, images = external.prompts, [] if record.images_sha256 is None else [record.images_sha256]
        settings = [self.device, self.precision, prompts.seed, external.max_prompt_tokens, *_content(prompts.data)]
        files = [fact.sha256 for fact in file_facts(self.prepared)]
        content = [external.fingerprint, files, record.template_sha256, settings, *images]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def open(self, runs: Path, *, is_numbered: bool = True) -> RunDir:
        return open_eval_run(runs, self.external.name, self.digest(), self._fill, is_numbered=is_numbered)

    def _fill(self, run: RunDir) -> None:
        where, record = run.stage(1, "eval"), self.prepared.record
        for name in (ITEMS, IMAGE_ARCHIVE):
            if name in record.files:
                shutil.copyfile(self.prepared.path(name), where.prepared(name))
        shutil.copyfile(self.prepared.path("ledger.jsonl"), where.ledger)
        self._take_tokenizer(where.tokenizer)
        subject = self._subject(where)
        stage = EvalStage(
            name=self.external.label,
            subject=subject,
            prompt_tokens=record.prompt_tokens or 1,
            prompt_grids=record.prompt_grids,
            num_items=len(read_items(where.prepared(ITEMS))),
        )
        write_record(where.eval_stage, stage)
        files = (replace(fact, path=_relative(self.base / fact.path, run.path)) for fact in file_facts(self.prepared))
        inputs = Inputs(
            data={"test": (tuple(files),)},
            model=subject.model_name,
            model_fingerprint=subject.model_fingerprint,
            template_sha256=subject.template_sha256,
        )
        write_record(run.facts, Facts(machine=read_machine(), inputs=inputs))

    def _take_tokenizer(self, folder: Path) -> None:
        model_folder = self.external.resolved.folder
        folder.mkdir()
        self._renderer(self.external.tokenizer).tokenizer.save_pretrained(folder)
        copy_processor_files(model_folder, folder)
        if (settings := model_folder / "generation_config.json").is_file():
            shutil.copyfile(settings, folder / settings.name)

    def _renderer(self, tokenizer: Path) -> Renderer:
        external, data = self.external, self.external.prompts.data
        processor = processor_opener(external.model, Path.cwd(), external.resolved.folder, data.images)()
        return open_renderer(
            tokenizer, data.template, template_options=data.template_options, image_processor=processor
        )

    def _subject(self, where: StageDir) -> Subject:
        external, data, weights = self.external, self.external.prompts.data, self.external.weights
        manifest = None if weights is None else weights / MANIFEST
        return Subject(
            model=moved(external.model, lambda path: _relative(Path(path), where.run)),
            model_name=_shown_name(external),
            model_fingerprint=external.resolved.fingerprint,
            weights=None if weights is None else _relative(weights, where.run),
            manifest_sha256=sha256_of(manifest) if manifest and manifest.is_file() else None,
            tuning=external.tuning,
            device=self.device,
            precision=self.precision,
            threads=torch.get_num_threads(),
            seed=external.prompts.seed,
            template=data.template,
            template_options=data.template_options,
            template_sha256=self._renderer(where.tokenizer).sha256(),
            images=data.images,
            max_prompt_tokens=external.max_prompt_tokens,
            form=keep_form(data.task, Path.cwd(), where.run),
            items_sha256=self.prepared.record.files[ITEMS],
        )


def open_model_run(external: ExternalModel, data: str, *, device: Device | None, runs: Path) -> RunDir:
    """The run directory of an external model on the rows of `data`."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    prompts = external.prompts.model_copy(update={"model": external.model})  # which knows its image processor
    prepared = prepare_eval_rows(Source(path=data), prompts, external.tokenizer, base=Path.cwd())
    precision = precision_on(device)
    found = ModelOnRows(external=external, prepared=prepared, base=Path.cwd(), device=device, precision=precision)
    return found.open(runs)


def _content(data: Data) -> list[Any]:
    """The settings that rows are rendered with; a user's own task file counts by its content, not its place."""
    if not isinstance(data.task, CustomTask):
        return [data.model_dump(mode="json")]
    form = data.task.model_copy(update={"path": ""})
    settings = data.model_copy(update={"task": form}).model_dump(mode="json")
    return [settings, sha256_of(Path(data.task.path))]


def _shown_name(external: ExternalModel) -> str:
    """What a stage of a pipeline made has the name of the stage."""

    def called(folder: Path) -> str:
        return stage_holding(folder) or folder.name

    is_folder = isinstance(external.model, FolderModel)
    name = called(Path(external.resolved.name)) if is_folder else external.resolved.name
    return name if external.weights is None else f"{name} + {called(external.weights)}"


def _relative(path: Path, run: Path) -> str:
    """Run directories are copied, and what lies beside them is often copied too."""
    return Path(relpath(path.resolve(), run.resolve())).as_posix()


# Answers in a file


def open_answers_run(answers: Path, data: str, *, runs: Path) -> RunDir:
    """The run directory of answers that were made elsewhere: it holds the rows, and has no model and no tokenizer."""
    rows = read_eval_rows(Source(path=data), base=Path.cwd())
    name, lines = answers_name(answers), "".join(map(item_line, rows))
    sha256 = sha256_of(answers)
    subject = Subject(
        model=ShapeModel(kind="shape", config={}),
        model_name=f"answers of {answers.name}",
        model_fingerprint=sha256,
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

    digest = hashlib.sha256(json.dumps([lines, sha256]).encode()).hexdigest()
    return open_eval_run(runs, f"eval-{name}", digest, fill)
