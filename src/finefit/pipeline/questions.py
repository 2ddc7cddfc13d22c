"""Rows that are to be answered and belong to no training: read, built and rendered as test rows are, and kept by content."""

from collections.abc import Sequence
from pathlib import Path

from finefit.artifacts.trainings import Preparation
from finefit.data.read import open_source
from finefit.data.rows import BadRow, Row
from finefit.errors import DataError
from finefit.facts.files import FileFact
from finefit.pipeline.data import PreparedData, prepare_data
from finefit.pipeline.preparation import require_data, unreadable_references
from finefit.spec.models import Full, ShapeModel
from finefit.spec.rows import Data, Source
from finefit.spec.schema import AdamW, Evaluation, Sft, Spec
from finefit.spec.tasks import Form, OwnTask


def prepare_questions(source: Source, like: Spec, tokenizer: Path, *, base: Path) -> PreparedData:
    """`like`: the spec whose template, form and lengths they get; `base`: where the path of the source starts."""
    data = like.data.model_copy(update={"train": (), "validation": None, "test": source})
    prepared = prepare_data(like.model_copy(update={"data": data, "objective": Sft(kind="sft")}), base, tokenizer)
    _require_usable(prepared.record, like.data, source.path)
    return prepared


def _require_usable(record: Preparation, data: Data, path: str) -> None:
    for fault in record.faults:
        if fault.kind == "unusable" and fault.split == "test" and data.bad_rows == "error":
            more = f"\nand {fault.count - len(fault.lines)} more" if fault.count > len(fault.lines) else ""
            raise DataError("\n".join(fault.lines) + more, fault.remedy)
    if record.prompt_tokens is None:
        raise DataError(f"{path} holds no row that could be asked", "rows need a prompt and an answer; docs/data.md has the shapes that are known")


def read_questions(source: Source, *, base: Path) -> list[Row]:
    """Without a tokenizer, for answers that are there already."""
    rows = []
    for row in open_source(source.path, source.fields, base, split="test", where=source.where, images_root=source.images_root).rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "mend or remove this row")
        rows.append(row)
    return rows


def plain_spec(data: Data, *, seed: int, evaluations: tuple[Evaluation, ...] = ()) -> Spec:
    """Where there is none: only what questions depend on."""
    model = ShapeModel(kind="shape", config={})
    return Spec(name="questions", seed=seed, model=model, tuning=Full(kind="full"), data=data, optimizer=AdamW(lr=1.0), evaluate=evaluations)


def without_rows(data: Data, *, form_base: Path) -> Data:
    """What of `data` decides how a row is asked. A form of the user's own lies under `form_base`."""
    form = data.task
    if isinstance(form, OwnTask):
        form = form.model_copy(update={"path": str((form_base / form.path).resolve())})
    return data.model_copy(update={"train": (), "validation": None, "test": None, "task": form})


def require_answerable(rows: Sequence[Row], evaluations: list[Evaluation], *, form: Form | None, base: Path) -> None:
    """A reference that its task cannot read is told before anything is asked."""
    require_data(unreadable_references(evaluations, rows, form=form, base=base))


def file_facts(prepared: PreparedData) -> tuple[FileFact, ...]:
    return tuple(fact for files in prepared.sources["test"] for fact in files)
