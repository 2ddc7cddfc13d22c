"""Exports a model in several formats: each is made, loaded by another program, compared with the trained model, and
published together with the others, or not at all."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from finefit import __version__, bounded
from finefit.artifacts.atomic import claimed_folder, publish, replace_folder, report_disk_full
from finefit.artifacts.export_records import (
    EXPORT,
    Answers,
    Distance,
    ExportedAdapter,
    ExportedFormat,
    ExportReport,
    Onto,
    OntoCost,
    TaskScore,
)
from finefit.artifacts.records import write_record
from finefit.errors import FindingError, ModelError
from finefit.export import card, gguf, merged, ollama, proof
from finefit.export.format_proofs import Proving, prove
from finefit.export.outputs import Outputs, Probe
from finefit.export.requirements import (
    parameters_of,
    require_as_trained,
    require_memory,
    require_own,
    require_possible,
    require_room,
)
from finefit.export.scores import beyond_score, scored_evaluation, task_score
from finefit.export.servable import servable
from finefit.export.subject import MAX_ANSWER, PROMPTS, ExportSubject, Origin, PromptItem, held_out, probe_of
from finefit.facts.files import read_config, read_object
from finefit.facts.machine import read_version
from finefit.model.quantised import packed_weights
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.spec.exports import WIDE, ExportFormat

Say = Callable[[str], None]
NOT_COMPARED = "it does not fit in memory, so no program has loaded it: its files alone were compared"
_CARD = "README.md"
_MAX_SCORED = 160
"""New tokens of a greedy answer that a task scores."""
_PACKAGES = ("torch", "transformers", "peft", "safetensors", "cyllama", "xllamacpp", "gguf", "bitsandbytes")
_LICENSE = re.compile(r"^license:\s*([\w.+-]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Making:
    """One export while it is made."""

    subject: ExportSubject
    staging: Path
    work: Path
    """Inside the staging folder; removed before it is published."""
    onto: Onto
    alone: bool
    """One format: its files lie in the export itself."""
    items: list[PromptItem]
    probe: Probe
    compute: proof.Compute | None
    trained: Outputs | None
    """None, as `compute` is, where the model does not fit in memory."""
    say: Say
    folders: dict[str, Path] = field(default_factory=dict)
    """Merged folders by precision, also those that only serve a conversion."""

    @property
    def base(self) -> merged.MergeBase:
        return merged.merge_base(self.subject, self.onto, self.work)

    @property
    def proving(self) -> Proving:
        return Proving(
            subject=self.subject,
            base=self.base,
            probe=self.probe,
            compute=self.compute,
            work=self.work,
            say=self.say,
        )

    def place(self, form: ExportFormat) -> Path:
        return self.staging if self.alone or form.folder is None else self.staging / form.folder


def export(
    subject: ExportSubject,
    formats: Sequence[ExportFormat],
    out: Path,
    *,
    onto: Onto = "original",
    prompts: int = PROMPTS,
    with_modelfile: bool = False,
    accept: bool = False,
    say: Say = lambda _: None,
) -> ExportReport:
    """Fills `out`, which must not exist or hold an earlier export of the same. What is worse than its bound is a
    FindingError, and nothing is published, unless `accept`."""
    require_possible(subject, formats, with_modelfile=with_modelfile)
    is_again = require_own(out, subject, formats)
    require_room(subject, formats, out.parent, onto=onto)
    remedy = "free some space, then give the same command again"
    with report_disk_full(out, remedy=remedy), claimed_folder(out) as staging:
        report = export_into(
            subject,
            formats,
            staging,
            onto=onto,
            prompts=prompts,
            with_modelfile=with_modelfile,
            accept=accept,
            say=say,
            published=out,
        )
        say(f"publishing {out}")
        if is_again:
            replace_folder(staging, out)
        else:
            publish(staging, out)
    return report


def export_into(
    subject: ExportSubject,
    formats: Sequence[ExportFormat],
    staging: Path,
    *,
    onto: Onto,
    prompts: int,
    with_modelfile: bool,
    accept: bool,
    say: Say,
    published: Path | None = None,
) -> ExportReport:
    """The whole export in an empty folder that nobody sees yet. `published`: the name that it will get."""
    began = time.perf_counter()
    require_possible(subject, formats, with_modelfile=with_modelfile)
    require_as_trained(subject)
    if not accept:
        require_memory(subject)
    making, origin = _begin(subject, staging, onto, prompts, len(formats) == 1, say)
    exports = [_exported(making, form) for form in formats]
    if refused := [one for one in exports if one.problems and not accept]:
        raise _refusal(refused)
    costs = _onto_costs(making)
    made_modelfile = with_modelfile and _write_modelfile(making, exports)
    shutil.rmtree(making.work)
    if made_modelfile:
        say("wrote a Modelfile for ollama")
    report = ExportReport(
        finefit=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=subject.name,
        target=subject.target,
        checkpoint=subject.checkpoint,
        base=subject.base_name,
        base_license=license_of(subject.base),
        adapter=adapter_facts(subject),
        parameters=parameters_of(subject),
        bits=subject.bits,
        onto=onto if subject.bits is not None else None,
        onto_costs=costs,
        template=subject.template,
        stop_tokens=dict(zip(subject.stop_texts, subject.stop_tokens, strict=True)),
        prompts=len(making.items),
        prompts_from=origin,
        answer_tokens=sum(map(len, making.probe.answers)),
        computed_in=None if making.compute is None else str(making.compute),
        exports=tuple(exports),
        accepted=tuple(one.format for one in exports if one.problems),
        serving=_serving(subject, _adapter_in(published, exports)),
        versions={"finefit": __version__, **_versions()},
        seconds=time.perf_counter() - began,
    )
    write_record(staging / EXPORT, report)
    (staging / _CARD).write_text(card.model_card(report, subject.run, subject), encoding="utf-8")
    return report


def _begin(
    subject: ExportSubject, staging: Path, onto: Onto, prompts: int, alone: bool, say: Say
) -> tuple[_Making, Origin]:
    work = staging / ".work"
    work.mkdir()
    items, origin = held_out(subject, prompts)
    scored = scored_evaluation(subject) if origin == "test" else None
    longest = MAX_ANSWER if scored is None else max(MAX_ANSWER, min(scored.max_new_tokens, _MAX_SCORED))
    probe = probe_of(subject, items, max_new_tokens=longest)
    compute = proof.compute_for(parameters_of(subject))
    if compute is not None:
        say(f"asking the trained model {len(items)} {origin} prompts, in {compute}")
    making = _Making(
        subject=subject,
        staging=staging,
        work=work,
        onto=onto,
        alone=alone,
        items=items,
        probe=probe,
        compute=compute,
        trained=None if compute is None else proof.trained_outputs(subject, probe, compute),
        say=say,
    )
    return making, origin


def _exported(making: _Making, form: ExportFormat) -> ExportedFormat:
    say, began = making.say, time.perf_counter()
    say(f"making {form}")
    before = set(_files(making.staging))
    with _peak() as peak:
        form, made = _make(making, form)
    made_at = time.perf_counter()
    say(f"proving {form}")
    proved = prove(making.proving, form, made)
    compared = _compared(making, form, proved.outputs)
    files = {name: size for name, size in _files(making.staging).items() if name not in before}
    return ExportedFormat(
        format=str(form),
        path=made.relative_to(making.staging).as_posix(),
        files=files,
        loaded_by=proved.loaded_by,
        distance=compared.distance,
        bound=proof.bound_of(form, making.compute),
        template_is_equal=proved.template_is_equal,
        stops_are_equal=proved.stops_are_equal,
        answers=compared.answers,
        score=compared.score,
        problems=(*proved.problems, *compared.problems),
        notes=proved.notes,
        seconds=made_at - began,
        proof_seconds=time.perf_counter() - made_at,
        peak_bytes=peak[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What was computed of an export, beside the trained model."""

    problems: tuple[str, ...]
    distance: Distance | None = None
    answers: tuple[Answers, ...] = ()
    score: TaskScore | None = None


def _compared(making: _Making, form: ExportFormat, said: Outputs | None) -> _Compared:
    if making.trained is None or said is None:
        return _Compared(problems=(NOT_COMPARED,))
    subject, bound = making.subject, proof.bound_of(form, making.compute)
    distance = proof.measure(making.trained, said)
    vocabulary = proof.lost_tokens(subject, making.trained, said)
    score = task_score(subject, making.items, making.trained, said)
    worse = () if score is None else beyond_score(score)
    return _Compared(
        problems=(*vocabulary, *proof.beyond(distance, bound), *worse),
        distance=distance,
        answers=proof.side_by_side(subject, making.probe, making.trained, said),
        score=score,
    )


def _make(making: _Making, form: ExportFormat) -> tuple[ExportFormat, Path]:
    """The format with its precision, and the file or folder."""
    subject = making.subject
    match form.kind:
        case "adapter":
            place = making.place(form)
            merged.copy_adapter(subject, place)
            return form, place
        case "merged":
            place = making.place(form)
            precision = merged.precision_of(subject, form.precision)
            merged.write_merged_folder(subject, making.base, place, precision)
            making.folders[precision] = place
            return replace(form, precision=precision), place
        case "gguf":
            assert form.precision is not None
            source = _merged_for(making, "fp32" if form.precision in WIDE else "bf16")
            return form, gguf.convert(source, making.staging, form.precision, making.say, name=subject.name)
        case "gguf-lora":
            assert subject.adapter is not None
            return form, gguf.convert_adapter(subject.base, subject.adapter, making.staging, name=subject.name)


def _merged_for(making: _Making, precision: str) -> Path:
    """A merged folder to convert, in a hidden place unless it is exported itself."""
    if precision not in making.folders:
        place = making.work / making.subject.name / f"merged-{precision}"
        making.say(f"merging in {precision}")
        merged.write_merged_folder(making.subject, making.base, place, precision)
        making.folders[precision] = place
    return making.folders[precision]


def _refusal(refused: Sequence[ExportedFormat]) -> FindingError:
    lines = [f"{one.format}: {problem}" for one in refused for problem in one.problems]
    what = "\n".join(f"  {line}" for line in lines)
    count = f"{len(refused)} export is" if len(refused) == 1 else f"{len(refused)} exports are"
    problem = f"{count} not the model that was trained, and nothing was published:\n{what}"
    return FindingError(problem, "take a wider format, or publish it all the same with --accept, which is recorded")


def _onto_costs(making: _Making) -> tuple[OntoCost, ...]:
    """Of an adapter that was trained on 4 or 8 bits: over either form of the base, without rounding the result."""
    subject, compute = making.subject, making.compute
    if compute is None or making.trained is None or subject.bits is None or subject.adapter is None:
        return ()
    if packed_weights(read_config(subject.base)) is not None:
        return ()
    found = []
    for onto in ("original", "trained"):
        making.say(f"measuring the adapter on the {onto} weights")
        outputs = proof.outputs_onto(subject, making.probe, compute, onto)
        found.append(OntoCost(onto=onto, distance=proof.measure(making.trained, outputs)))
    return tuple(found)


def _write_modelfile(making: _Making, exports: Sequence[ExportedFormat]) -> bool:
    files = [one.path for one in exports if one.format.startswith("gguf:")]
    if not files:
        return False
    subject = making.subject
    ollama.write_modelfile(making.staging / files[-1], making.staging, subject.template, subject.stop_texts)
    return True


def _adapter_in(published: Path | None, exports: Sequence[ExportedFormat]) -> Path | None:
    found = [one.path for one in exports if one.format == "adapter"]
    return None if published is None or not found else published / found[0]


def _serving(subject: ExportSubject, published: Path | None) -> dict[str, str]:
    """`published`: where the adapter will lie, if it is exported."""
    if subject.adapter is None:
        return {}
    try:
        notes = servable(subject.adapter, subject.base, name=subject.name, named=subject.base_name, place=published)
    except ModelError as error:
        return {"vLLM": error.problem, "SGLang": error.problem}
    commands: dict[str, str] = {note.server: note.command for note in notes if note.accepted}
    return commands | {note.server: f"not as an adapter: {note.reason}" for note in notes if not note.accepted}


def adapter_facts(subject: ExportSubject) -> ExportedAdapter | None:
    if subject.adapter is None:
        return None
    config = read_object(subject.adapter / ADAPTER_CONFIG)
    targets = config.get("target_modules") or ()
    return ExportedAdapter(
        rank=int(config.get("r") or 0),
        alpha=float(config.get("lora_alpha") or 0),
        targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        dora=bool(config.get("use_dora")),
        rank_stabilised=bool(config.get("use_rslora")),
        trained_modules=tuple(config.get("modules_to_save") or ()),
    )


def license_of(base: Path) -> str | None:
    """Returns the license that the base's own card states."""
    try:
        card_text = bounded.read_bytes(base / _CARD, bounded.MAX_SETTINGS_BYTES).decode(errors="replace")
    except OSError:  # no card, or nothing that could be one
        return None
    found = _LICENSE.search(card_text.partition("\n---")[0])
    return None if found is None else found[1]


def _files(folder: Path) -> dict[str, int]:
    inside = ((path.relative_to(folder), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return {name.as_posix(): path.stat().st_size for name, path in inside if name.parts[0] != ".work"}


def _versions() -> dict[str, str]:
    found = {name: read_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The most resident memory inside the block, of this process and its programs, above what was held at its start."""
    before, peak, done = proof.resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], proof.resident_bytes() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
