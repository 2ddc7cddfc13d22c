"""The rows of an evaluation: a run's own test rows, or other ones that are read, built and rendered in the same way."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import EvalStage, Stage, Subject
from finefit.custom.inputs import RawImageProcessor
from finefit.data.columns import RecordError
from finefit.data.image_check import ImageChecker, ModelProcessor
from finefit.data.rows import IMAGE_ARCHIVE, BadRow, Row, read_items
from finefit.data.sources import open_source
from finefit.errors import DataError, RunError
from finefit.evaluate.external_model import without_rows
from finefit.facts.files import FileFact, sha256_of
from finefit.model.resolve_model import resolve_model
from finefit.plan.client import Grids
from finefit.plan.prepared_data import PreparedData, prepare_data
from finefit.preflight.data import fix_or_drop, require_data, unreadable_references
from finefit.spec.data import ImageLimits, Source
from finefit.spec.load import spec_from_json
from finefit.spec.models import CustomModel, Model
from finefit.spec.schema import Evaluation, Sft, Spec
from finefit.spec.stages import moved

ITEMS = "test.jsonl"
NO_ITEMS = hashlib.sha256(b"").hexdigest()
"""The digest of the items of a run without test rows; tasks of lm-eval bring their own items."""
_DEFAULT_PROMPT_TOKENS = 4096
"""For a run that was planned without a forecast."""
_MAX_STEM = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRows:
    """A file of items among the prepared ones."""

    file: str = ITEMS
    sha256: str
    suffix: str = ""
    """Added to the labels of its evaluations: scores of other rows are other scores. Empty for a run's own rows."""
    prompt_tokens: int
    """Of the longest prompt."""
    prompt_grids: Grids = ()
    """Of the images of the prompt with the most pixels."""


def own_rows(run: RunDir) -> EvalRows:
    """A run's own test rows, as long as the plan found them; without a forecast, as long as a row may be."""
    where = stage_of(run)
    if where.eval_stage.exists():
        stage = read_record(where.eval_stage, EvalStage)
        file, sha256 = stage.subject.items, stage.subject.items_sha256
        return EvalRows(file=file, sha256=sha256, prompt_tokens=stage.prompt_tokens, prompt_grids=stage.prompt_grids)
    lengths = [forecast.lengths for forecast in read_record(run.plan, Plan).forecasts.values()]
    return EvalRows(
        sha256=read_record(where.stage, Stage).prepared.get(ITEMS, NO_ITEMS),
        prompt_tokens=max((found.prompt or found.longest for found in lengths), default=_DEFAULT_PROMPT_TOKENS),
        prompt_grids=next((found.grids if found.prompt is None else found.prompt_grids for found in lengths), ()),
    )


def other_rows(run: RunDir, data: str) -> EvalRows:
    """Rows of another file, prepared with the run's template, form and lengths, and copied into the run."""
    where = stage_of(run)
    if where.eval_stage.exists():
        remedy = "score the model itself with --data, which makes another run directory"
        raise RunError(f"{run.path.name} belongs to its own rows", remedy)
    spec = spec_from_json(run.spec_json.read_text(encoding="utf-8"))
    model = moved(spec.model, lambda path: str((run.path / path).resolve()))
    like = spec.model_copy(update={"model": model, "data": without_rows(spec.data, form_base=run.path)})
    prepared = prepare_eval_rows(Source(path=data), like, _tokenizer(where, model), base=Path.cwd())
    content = [*(fact.sha256 for fact in file_facts(prepared)), prepared.record.images_sha256 or ""]
    digest = hashlib.sha256("".join(content).encode()).hexdigest()[:8]
    place = _copied(where, prepared, digest)
    stem = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(data).stem)[:_MAX_STEM]
    return EvalRows(
        file=str(place.relative_to(where.prepared(""))),
        sha256=sha256_of(place),
        suffix=f"{stem}-{digest}",
        prompt_tokens=prepared.record.prompt_tokens or 1,
        prompt_grids=prepared.record.prompt_grids,
    )


def prepare_eval_rows(source: Source, like: Spec, tokenizer: Path, *, base: Path) -> PreparedData:
    """`like`: the spec whose template, form and lengths they get. `base`: where the source's path starts."""
    data = like.data.model_copy(update={"train": (), "validation": None, "test": source})
    prepared = prepare_data(like.model_copy(update={"data": data, "objective": Sft(kind="sft")}), base, tokenizer)
    for fault in prepared.record.problems:
        if fault.kind == "unusable" and fault.split == "test" and data.bad_rows == "error":
            more = f"\nand {fault.count - len(fault.lines)} more" if fault.count > len(fault.lines) else ""
            raise DataError("\n".join(fault.lines) + more, fix_or_drop(fault))
    if prepared.record.prompt_tokens is None:
        remedy = "rows need a prompt and an answer; docs/data.md lists the known shapes"
        raise DataError(f"{source.path} holds no row with a prompt", remedy)
    return prepared


def read_eval_rows(source: Source, *, base: Path) -> list[Row]:
    """Without a tokenizer, for answers that exist already. Images are checked and not processed: no model sees
    them."""
    check_images, rows = ImageChecker(RawImageProcessor("", None)), []
    for row in open_source(source, base, split="test").rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "fix or remove this row")
        try:
            rows.append(replace(row, image_refs=check_images(row)))
        except RecordError as fault:
            raise DataError(f"{row.place} {fault}", "fix or remove this row") from None
    return rows


def rows_of(run: RunDir, subject: Subject) -> list[Row]:
    return read_items(stage_of(run).verified(subject.items, {subject.items: subject.items_sha256}))


def require_readable(run: RunDir, subject: Subject, evaluations: Sequence[Evaluation]) -> None:
    """A reference that its task cannot read is reported before a model answers anything."""
    if subject.items_sha256 != NO_ITEMS:
        rows = rows_of(run, subject)
        require_data(unreadable_references(evaluations, rows, form=subject.form, base=run.path))


def file_facts(prepared: PreparedData) -> tuple[FileFact, ...]:
    return tuple(fact for files in prepared.sources["test"] for fact in files)


def _tokenizer(where: StageDir, model: Model) -> Path:
    """The run's own; for a vision-language model the model's folder, which has its config and processor."""
    if isinstance(model, CustomModel):
        return where.tokenizer
    folder = resolve_model(model, where.run).folder
    return where.tokenizer if ModelProcessor(folder, folder / "config.json", ImageLimits())() is None else folder


def _copied(where: StageDir, prepared: PreparedData, digest: str) -> Path:
    """Images that came as bytes lie beside their items, which then have a folder of their own."""
    has_images = IMAGE_ARCHIVE in prepared.record.files
    place = where.prepared(f"items-{digest}/{ITEMS}" if has_images else f"items-{digest}.jsonl")
    place.parent.mkdir(exist_ok=True)
    images = ((IMAGE_ARCHIVE, place.with_name(IMAGE_ARCHIVE)),) if has_images else ()
    for name, target in (*images, (ITEMS, place)):
        temporary = target.with_suffix(".tmp")
        shutil.copyfile(prepared.path(name), temporary)
        temporary.replace(target)
    return place
