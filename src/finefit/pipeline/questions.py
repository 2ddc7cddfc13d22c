"""Rows that are to be answered and belong to no training: read, built and rendered as test rows are, and kept by content."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finefit.artifacts.trainings import Preparation
from finefit.data.cells import Fault
from finefit.data.looking import Looker
from finefit.data.read import open_source
from finefit.data.rows import BadRow, Row
from finefit.errors import DataError
from finefit.facts.files import FileFact
from finefit.pipeline.data import PreparedData, prepare_data
from finefit.pipeline.preparation import require_data, unreadable_references
from finefit.preflight.data import mend_or_drop
from finefit.spec.models import Full, ShapeModel
from finefit.spec.rows import Data, Source
from finefit.spec.schema import AdamW, Evaluation, Sft, Spec
from finefit.spec.tasks import Form, OwnTask
from finefit.step.custom_eye import Plain


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
            raise DataError("\n".join(fault.lines) + more, mend_or_drop(fault))
    if record.prompt_tokens is None:
        raise DataError(
            f"{path} holds no row that could be asked",
            "rows need a prompt and an answer; docs/data.md has the shapes that are known",
        )


def read_questions(source: Source, *, base: Path) -> list[Row]:
    """Without a tokenizer, for answers that are there already. Images are looked at as they are: no model is shown them."""
    look, rows = Looker(Plain("", None)), []
    for row in open_source(source, base, split="test").rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "mend or remove this row")
        try:
            rows.append(replace(row, pictures=look(row)))
        except Fault as fault:
            raise DataError(f"{row.place} {fault}", "mend or remove this row") from None
    return rows


def plain_spec(data: Data, *, seed: int, evaluations: tuple[Evaluation, ...] = ()) -> Spec:
    """Where there is none: only what questions depend on."""
    model = ShapeModel(kind="shape", config={})
    return Spec(
        name="questions",
        seed=seed,
        model=model,
        tuning=Full(kind="full"),
        data=data,
        optimizer=AdamW(lr=1.0),
        evaluate=evaluations,
    )


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
