"""What an export needs before it starts: formats that this model has, packages, a place of its own, room on disk."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

from finefit.artifacts.atomic import disk_full
from finefit.artifacts.checkpoint import problems
from finefit.artifacts.export_records import EXPORT, ExportReport, Onto
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import read_if_there, read_record
from finefit.artifacts.stage_records import Stage
from finefit.errors import FindingError, ModelError, RunError
from finefit.export import gguf, merged, proof
from finefit.export.subject import ExportSubject
from finefit.facts.files import free_bytes, read_config
from finefit.facts.machine import MEMORY_LIMITS, read_free_memory_bytes
from finefit.model.load import starting_adapter
from finefit.model.quantised import packed_weights
from finefit.model.saved_weights import spans_in
from finefit.spec.exports import ExportFormat, export_bytes
from finefit.spec.stages import moved

SLACK_BYTES = 64 << 20


def require_possible(subject: ExportSubject, formats: Sequence[ExportFormat], *, with_modelfile: bool) -> None:
    needing = [str(form) for form in formats if form.kind in ("adapter", "gguf-lora")]
    if needing and subject.adapter is None:
        problem = f"{subject.target} has no adapter to export as {', '.join(needing)}: it is a whole model"
        raise ModelError(problem, "take --to merged or --to gguf")
    if with_modelfile and not any(form.kind == "gguf" for form in formats):
        raise ModelError("a Modelfile is for a GGUF file, and none is exported", "add gguf to --to")
    if any(form.kind == "gguf" for form in formats):
        gguf.require_packages("cyllama")
    if any(form.kind == "gguf-lora" for form in formats):
        gguf.require_packages("xllamacpp")


def require_as_trained(subject: ExportSubject) -> None:
    """The proof compares with the weights that are here, so they must be those of the training. Another base that the
    user names is theirs to answer for."""
    where, external = subject.where, subject.external
    if where is None:
        return
    checkpoint = external.weights or external.resolved.folder
    if found := problems(checkpoint, with_state=False):
        raise RunError(f"{checkpoint.name} does not verify: {'; '.join(found)}", "name another checkpoint")
    stage = read_record(where.stage, Stage)
    base = moved(stage.model, lambda path: str((where.run / path).resolve()))
    if external.weights is None or external.model != base or starting_adapter(stage.tuning, where.run) is not None:
        return  # the recorded fingerprint of a training that went on from an adapter covers that adapter too
    if external.resolved.fingerprint != stage.model_fingerprint:
        problem = f"{subject.base_name} has changed since {subject.name} was trained on it"
        raise RunError(problem, "restore it, or name the model that it was trained on with --base")


def require_memory(subject: ExportSubject) -> None:
    """Merging goes tensor by tensor; other programs load a model whole."""
    if proof.compute_for(parameters_of(subject)) is None:
        needed, free = 2 * parameters_of(subject), read_free_memory_bytes(MEMORY_LIMITS)
        problem = f"the proof loads {subject.name} whole: {needed:,} bytes in bf16, and {free:,} of memory are free"
        remedy = (
            "close other programs, or publish it with --accept: then its files are compared, and nothing is computed"
        )
        raise FindingError(problem, remedy)


def require_own(out: Path, subject: ExportSubject, formats: Sequence[ExportFormat]) -> bool:
    """Whether `out` holds an earlier export of the same, which may be replaced."""
    if not is_there(out):
        return False
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
        return False
    before = read_if_there(out / EXPORT, ExportReport) if out.is_dir() else None
    if before is None:
        raise RunError(f"{out} exists and is not an export", "name a folder that does not exist yet")
    wanted = [(form.kind, form.precision) for form in formats]
    there = [tuple(one.format.partition(":")[::2]) for one in before.exports]
    is_same = len(wanted) == len(there) and all(
        kind == has[0] and precision in (None, has[1] or None)
        for (kind, precision), has in zip(wanted, there, strict=True)
    )
    if before.name != subject.name or not is_same:
        named = ", ".join(one.format for one in before.exports)
        raise RunError(f"{out} holds another export: {before.name} as {named}", "name another folder, or remove it")
    return True


def require_room(subject: ExportSubject, formats: Sequence[ExportFormat], place: Path, *, onto: Onto) -> None:
    needed = needed_bytes(subject, formats)
    if onto == "trained" and packed_weights(read_config(subject.base)) is not None:
        needed += 2 * parameters_of(subject)  # its unpacked copy
    parent = next(path for path in (place, *place.resolve().parents) if path.exists())
    if (free := free_bytes(parent)) < needed:
        raise disk_full(place, needed, free, remedy="free some space, or name fewer formats or another disk")


def needed_bytes(subject: ExportSubject, formats: Sequence[ExportFormat]) -> int:
    """On disk while it is made: all formats, and what conversions start from."""
    count = parameters_of(subject)
    precision = merged.precision_of(subject, None)
    return export_bytes(formats, count, stored_bits=32.0 if precision == "fp32" else 16.0) + SLACK_BYTES


def parameters_of(subject: ExportSubject) -> int:
    """Of the whole model. Packed weights count by the values that are packed in them."""
    packed = packed_weights(read_config(subject.base))
    factor = {None: 1, 4: 2, 8: 1}[None if packed is None else packed.bits]
    spans = spans_in(subject.base).values()
    return sum(prod(span.shape) * (factor if span.dtype == "U8" else 1) for span in spans)
