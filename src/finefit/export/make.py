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
    ExportedAdapter,
    ExportedFormat,
    ExportReport,
    Onto,
    OntoCost,
)
from finefit.artifacts.records import write_record
from finefit.errors import FindingError, ModelError
from finefit.export import card, gguf, llama_cpp, merged, ollama, proof
from finefit.export.outputs import Outputs, Probe, write_probe
from finefit.export.requirements import parameters_of, require_as_trained, require_own, require_possible, require_room
from finefit.export.scores import beyond_score, scored_evaluation, task_score
from finefit.export.servable import servable
from finefit.export.structure import adapter_problems, folder_problems
from finefit.export.subject import MAX_ANSWER, PROMPTS, ExportSubject, Origin, PromptItem, held_out, probe_of
from finefit.facts.files import read_config, read_object
from finefit.facts.machine import read_version
from finefit.model.quantised import packed_weights
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.spec.exports import WIDE, ExportFormat

Say = Callable[[str], None]
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
    compute: proof.Compute
    trained: Outputs
    say: Say
    folders: dict[str, Path] = field(default_factory=dict)
    """Merged folders by precision, also those that only serve a conversion."""

    @property
    def base(self) -> merged.MergeBase:
        return merged.merge_base(self.subject, self.onto, self.work)

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
        computed_in=str(making.compute),
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
        trained=proof.trained_outputs(subject, probe, compute),
        say=say,
    )
    return making, origin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proved:
    """What another program says of a file, and what is wrong with it."""

    outputs: Outputs
    loaded_by: str
    problems: tuple[str, ...]
    template_is_equal: bool | None
    stops_are_equal: bool | None
    notes: tuple[str, ...] = ()


def _exported(making: _Making, form: ExportFormat) -> ExportedFormat:
    say, began = making.say, time.perf_counter()
    say(f"making {form}")
    before = set(_files(making.staging))
    with _peak() as peak:
        form, made = _make(making, form)
    made_at = time.perf_counter()
    say(f"proving {form}")
    bound = proof.bound_of(form, making.compute)
    proved = _prove(making, form, made)
    distance = proof.measure(making.trained, proved.outputs)
    vocabulary = proof.lost_tokens(making.subject, making.trained, proved.outputs)
    score = task_score(making.subject, making.items, making.trained, proved.outputs)
    worse = () if score is None else beyond_score(score)
    files = {name: size for name, size in _files(making.staging).items() if name not in before}
    return ExportedFormat(
        format=str(form),
        path=made.relative_to(making.staging).as_posix(),
        files=files,
        loaded_by=proved.loaded_by,
        distance=distance,
        bound=bound,
        template_is_equal=proved.template_is_equal,
        stops_are_equal=proved.stops_are_equal,
        answers=proof.side_by_side(making.subject, making.probe, making.trained, proved.outputs),
        score=score,
        problems=(*proved.problems, *vocabulary, *proof.beyond(distance, bound), *worse),
        notes=proved.notes,
        seconds=made_at - began,
        proof_seconds=time.perf_counter() - made_at,
        peak_bytes=peak[0],
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


def _prove(making: _Making, form: ExportFormat, made: Path) -> _Proved:
    place = making.work / f"asked-{form.kind}-{form.precision or 'own'}"
    match form.kind:
        case "adapter":
            return _prove_adapter(making, made, place)
        case "merged":
            return prove_merged(
                making.subject, making.base, made, form.precision or "fp32", making.probe, making.compute, place
            )
        case "gguf":
            return _prove_gguf(making, made, place)
        case "gguf-lora":
            return _prove_gguf_lora(making, made, place)


def prove_merged(
    subject: ExportSubject,
    base: merged.MergeBase,
    folder: Path,
    precision: str,
    probe: Probe,
    compute: proof.Compute,
    place: Path,
) -> _Proved:
    """The structure first: a folder that cannot be loaded has a reason there."""
    problems = tuple(folder_problems(subject, folder, base, precision))
    try:
        outputs = proof.ask_transformers(folder, probe, place, compute)
    except ModelError as error:
        if problems:
            raise FindingError(f"{folder.name} is not the model that was trained: {'; '.join(problems)}") from error
        raise
    return _Proved(
        outputs=outputs,
        loaded_by=_version("transformers"),
        problems=problems,
        template_is_equal=not any("template" in problem for problem in problems),
        stops_are_equal=not any("stop tokens" in problem for problem in problems),
    )


def _prove_adapter(making: _Making, folder: Path, place: Path) -> _Proved:
    subject = making.subject
    outputs = proof.ask_transformers(folder, making.probe, place, making.compute, base=subject.base, bits=subject.bits)
    problems = tuple(adapter_problems(subject, folder))
    return _Proved(
        outputs=outputs,
        loaded_by=f"{_version('transformers')}, {_version('peft')}",
        problems=problems,
        template_is_equal=not any("template" in problem for problem in problems),
        stops_are_equal=None,
    )


def _prove_gguf(making: _Making, file: Path, place: Path) -> _Proved:
    subject = making.subject
    place.mkdir()
    write_probe(place, making.probe)
    outputs = llama_cpp.outputs_of_gguf(file, place)
    template, stops = gguf.template_and_stops(file)
    problems, notes = [], []
    has_template = subject.template is None or template == subject.template
    if not has_template:
        problems.append("the chat template in the file is not the one that was trained")
    if subject.stop_tokens[0] not in stops:
        text = subject.stop_texts[0]
        named = ", ".join(map(str, stops)) or "none"
        problems.append(f"answers end with {text} ({subject.stop_tokens[0]}), and the file names {named} as its ends")
    if left := [
        text for text, token in zip(subject.stop_texts, subject.stop_tokens, strict=True) if token not in stops
    ]:
        notes.append(f"the file has no place for the stop tokens {', '.join(left)}; a Modelfile or --stop names them")
    return _Proved(
        outputs=outputs,
        loaded_by=_llama_cpp("cyllama"),
        problems=tuple(problems),
        template_is_equal=has_template,
        stops_are_equal=subject.stop_tokens[0] in stops,
        notes=tuple(notes),
    )


def _prove_gguf_lora(making: _Making, file: Path, place: Path) -> _Proved:
    """Over a GGUF of the base, which is made for the proof alone."""
    subject = making.subject
    bare = replace(subject, adapter=None, bits=None)
    folder = making.work / f"{subject.name}-base"
    merged.write_merged_folder(bare, merged.merge_base(bare, "original", making.work), folder, "bf16")
    base = gguf.convert(folder, making.work, "bf16", making.say, name="base")
    place.mkdir()
    write_probe(place, making.probe)
    return _Proved(
        outputs=llama_cpp.outputs_of_gguf(base, place, lora=file),
        loaded_by=_llama_cpp("xllamacpp"),
        problems=(),
        template_is_equal=None,
        stops_are_equal=None,
        notes=("proved over the base in bf16; template and stop tokens are those of the base that it is used with",),
    )


def _refusal(refused: Sequence[ExportedFormat]) -> FindingError:
    lines = [f"{one.format}: {problem}" for one in refused for problem in one.problems]
    what = "\n".join(f"  {line}" for line in lines)
    count = f"{len(refused)} export is" if len(refused) == 1 else f"{len(refused)} exports are"
    problem = f"{count} not the model that was trained, and nothing was published:\n{what}"
    return FindingError(problem, "take a wider format, or publish it all the same with --accept, which is recorded")


def _onto_costs(making: _Making) -> tuple[OntoCost, ...]:
    """Of an adapter that was trained on 4 or 8 bits: over either form of the base, without rounding the result."""
    subject = making.subject
    if subject.bits is None or subject.adapter is None or packed_weights(read_config(subject.base)) is not None:
        return ()
    found = []
    for onto in ("original", "trained"):
        making.say(f"measuring the adapter on the {onto} weights")
        outputs = proof.outputs_onto(subject, making.probe, making.compute, onto)
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
        notes = servable(subject.adapter, subject.base, named=subject.base_name)
    except ModelError as error:
        return {"vLLM": error.problem, "SGLang": error.problem}
    place = str(published or subject.adapter)
    commands: dict[str, str] = {
        note.server: note.command.replace(str(subject.adapter), place) for note in notes if note.accepted
    }
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


def _version(package: str) -> str:
    return f"{package} {read_version(package)}"


def _llama_cpp(package: str) -> str:
    return f"llama.cpp ({_version(package)})"


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The most resident memory of this process inside the block, above what it held at its start."""
    before, peak, done = proof.resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], proof.resident_bytes() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
