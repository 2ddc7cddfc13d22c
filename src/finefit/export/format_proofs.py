"""The proof of each format: the program that loads it, and what in its files must be that of the training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from finefit.errors import FindingError, ModelError
from finefit.export import gguf, llama_cpp, merged, proof
from finefit.export.outputs import Outputs, Probe, write_probe
from finefit.export.structure import adapter_problems, folder_problems
from finefit.export.subject import ExportSubject
from finefit.facts.machine import read_version
from finefit.spec.exports import ExportFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Proving:
    """What an export is compared with, and where there is room for it."""

    subject: ExportSubject
    base: merged.MergeBase
    probe: Probe
    compute: proof.Compute | None
    """None: the model does not fit in memory, so only files are compared."""
    work: Path
    say: Callable[[str], None]

    def place(self, form: ExportFormat) -> Path:
        return self.work / f"asked-{form.kind}-{form.precision or 'own'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What another program says of a file, and what is wrong with it."""

    outputs: Outputs | None
    """None: no program has loaded it."""
    loaded_by: str
    problems: tuple[str, ...]
    template_is_equal: bool | None
    stops_are_equal: bool | None
    notes: tuple[str, ...] = ()


def prove(proving: Proving, form: ExportFormat, made: Path) -> Proved:
    """`made`: the file or folder."""
    match form.kind:
        case "adapter":
            found = _adapter(proving, form, made)
        case "merged":
            found = _merged(proving, form, made)
        case "gguf":
            found = _gguf(proving, form, made)
        case "gguf-lora":
            found = _gguf_lora(proving, form, made)
    return found if found.outputs is not None else replace(found, loaded_by="no program")


def _merged(proving: Proving, form: ExportFormat, folder: Path) -> Proved:
    """The structure first: a folder that cannot be loaded has a reason there."""
    problems = tuple(folder_problems(proving.subject, folder, proving.base, form.precision or "fp32"))
    outputs = None
    try:
        if proving.compute is not None:
            outputs = proof.ask_transformers(folder, proving.probe, proving.place(form), proving.compute)
    except ModelError as error:
        if problems:
            raise FindingError(f"{folder.name} is not the model that was trained: {'; '.join(problems)}") from error
        raise
    return Proved(
        outputs=outputs,
        loaded_by=_version("transformers"),
        problems=problems,
        template_is_equal=not any("template" in problem for problem in problems),
        stops_are_equal=not any("stop tokens" in problem for problem in problems),
    )


def _adapter(proving: Proving, form: ExportFormat, folder: Path) -> Proved:
    subject, outputs = proving.subject, None
    if proving.compute is not None:
        outputs = proof.ask_transformers(
            folder, proving.probe, proving.place(form), proving.compute, base=subject.base, bits=subject.bits
        )
    problems = tuple(adapter_problems(subject, folder))
    return Proved(
        outputs=outputs,
        loaded_by=f"{_version('transformers')}, {_version('peft')}",
        problems=problems,
        template_is_equal=not any("template" in problem for problem in problems),
        stops_are_equal=None,
    )


def _gguf(proving: Proving, form: ExportFormat, file: Path) -> Proved:
    subject = proving.subject
    outputs = _ask_llama_cpp(proving, form, file)
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
    return Proved(
        outputs=outputs,
        loaded_by=_llama_cpp("cyllama"),
        problems=tuple(problems),
        template_is_equal=has_template,
        stops_are_equal=subject.stop_tokens[0] in stops,
        notes=tuple(notes),
    )


def _gguf_lora(proving: Proving, form: ExportFormat, file: Path) -> Proved:
    """Over a GGUF of the base, which is made for the proof alone."""
    outputs: Outputs | None = None
    notes: tuple[str, ...] = ()
    if proving.compute is not None:
        bare = replace(proving.subject, adapter=None, bits=None)
        folder = proving.work / f"{bare.name}-base"
        merged.write_merged_folder(bare, merged.merge_base(bare, "original", proving.work), folder, "bf16")
        base = gguf.convert(folder, proving.work, "bf16", proving.say, name="base")
        outputs = _ask_llama_cpp(proving, form, base, lora=file)
        notes = ("proved over the base in bf16; template and stop tokens are those of the base that it is used with",)
    return Proved(
        outputs=outputs,
        loaded_by=_llama_cpp("xllamacpp"),
        problems=(),
        template_is_equal=None,
        stops_are_equal=None,
        notes=notes,
    )


def _ask_llama_cpp(proving: Proving, form: ExportFormat, file: Path, *, lora: Path | None = None) -> Outputs | None:
    if proving.compute is None:
        return None
    place = proving.place(form)
    place.mkdir()
    write_probe(place, proving.probe)
    return llama_cpp.outputs_of_gguf(file, place, lora=lora)


def _version(package: str) -> str:
    return f"{package} {read_version(package)}"


def _llama_cpp(package: str) -> str:
    return f"llama.cpp ({_version(package)})"
