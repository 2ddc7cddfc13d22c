"""Files, disks, caches and model folders, read without loading weights.

The fingerprint of a model folder covers what decides the model's answers: config, tokenizer, and of each weight file
its size, header, 64 evenly spaced blocks and the head of every tensor. The heads catch training that touched only small
tensors (a router, the norms), which lie between the blocks."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finefit.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    path: str
    """Relative to a given folder, with POSIX separators, so that a copied tree has equal facts."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    use: str
    """What is written there."""
    path: str
    free_bytes: int


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path, relative_to: Path) -> FileFact:
    """An absent or unreadable file is an OSError, since only the caller knows its purpose."""
    name = Path(os.path.relpath(path, relative_to)).as_posix()
    return FileFact(path=name, size_bytes=path.stat().st_size, sha256=sha256_of(path))


def free_bytes(path: Path) -> int:
    """That this user may still write at `path`, which need not exist yet."""
    absolute = path.resolve()
    disk = os.statvfs(next(folder for folder in (absolute, *absolute.parents) if folder.exists()))
    return disk.f_bavail * disk.f_frsize  # not f_bfree: that counts blocks reserved for root


def finefit_cache() -> Path:
    return _user_cache() / "finefit"


def hub_cache() -> Path:
    """The download cache of huggingface_hub, by the same variables in the same order."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    return Path(os.environ.get("HF_HOME") or _user_cache() / "huggingface").expanduser() / "hub"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


TEXT_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""The small files of the fingerprint, if they exist."""
TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates, as for tools."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUM_BLOCKS = 64
BLOCK_BYTES = 64 * 1024
HEAD_BYTES = 4 * 1024
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of a tensor that old versions of transformers stored; a model computes it from its config."""
FETCH_AGAIN = "the file was not copied or downloaded to its end; fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    config: dict[str, Any]
    num_parameters: int | None
    """None for quantised weights, which pack several parameters into one element."""
    weight_bytes: int
    fingerprint: str
    files: tuple[str, ...]
    """Every file that the fingerprint covers."""
    dtype: str | None
    """Torch's name of the most frequent type of the stored elements; None without tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """First byte and the byte after the last, counted from the end of the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    path: Path
    size_bytes: int
    header: bytes
    tensors: dict[str, Tensor]


TENSORS = TypeAdapter(dict[str, Tensor])
SHARDS = TypeAdapter(dict[str, str])


def read_model_folder(path: Path) -> ModelHeader:
    try:
        require_folder(path)
        config = read_config(path)
        texts, weights = find_texts(path), [read_weight_file(path / name) for name in find_weight_files(path)]
        tensors = [tensor for file in weights for tensor in file.tensors.values()]
        return ModelHeader(
            config=config,
            num_parameters=None if "quantization_config" in config else sum(prod(tensor.shape) for tensor in tensors),
            weight_bytes=sum(end - start for start, end in (tensor.data_offsets for tensor in tensors)),
            fingerprint=fingerprint(texts, weights),
            files=(*texts, *(weight.path.name for weight in weights)),
            dtype=next(iter(_dtypes(tensors)), None),
        )
    except OSError as error:
        problem = f"{error.filename or path} cannot be read: {error.strerror}"
        raise ModelError(problem, "check that this user may read it") from error


def find_texts(path: Path) -> dict[str, Path]:
    """The existing small files of the fingerprint, by their names in the folder."""
    templates = sorted(f"{TEMPLATES}/{file.name}" for file in (path / TEMPLATES).glob("*.jinja"))
    return {name: path / name for name in (*TEXT_FILES, *templates) if (path / name).is_file()}


def stored_dtypes(path: Path) -> tuple[str, ...]:
    """Torch's names, the most frequent first. Empty for missing or damaged weights, which loading reports."""
    try:
        files = [read_weight_file(path / name) for name in find_weight_files(path)]
    except (ModelError, OSError):
        return ()
    return _dtypes(tensor for file in files for name, tensor in file.tensors.items() if not name.endswith(COMPUTED))


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        inside = [name for name in _folders(path) if (path / name / "config.json").is_file()]
        remedy = _suggest(path, inside[:3]) or "name a folder that transformers can load"
        if (path / "adapter_config.json").is_file():
            remedy = "it is an adapter: name the model that it was trained on, or merge the two first"
        raise ModelError(f"{path} has no config.json, so it is not a model folder", remedy)
    config = _read_json(file)
    if not isinstance(config, dict):
        problem = f"{file} holds a {type(config).__name__}, not an object"
        raise ModelError(problem, "restore the file from where the model came from")
    return config


def find_weight_files(path: Path) -> tuple[str, ...]:
    """As transformers chooses: the single file, else the shards of the index."""
    if (path / WEIGHTS).is_file():
        return (WEIGHTS,)
    if (path / INDEX).is_file():
        index = _read_json(path / INDEX)
        try:
            shards = sorted(set(SHARDS.validate_python(index["weight_map"]).values()))
        except (KeyError, TypeError, ValidationError) as error:
            raise ModelError(f"{path / INDEX} has no weight_map of tensor and file names", FETCH_AGAIN) from error
        if missing := [name for name in shards if not (path / name).is_file()]:
            problem = f"{path} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing)}"
            raise ModelError(problem, "fetch what is missing")
        return tuple(shards)
    if pickled := sorted(file.name for file in path.glob("*.bin") if file.name.startswith("pytorch_model")):
        problem = f"{path / pickled[0]} is pickled, which runs code when it is loaded; {path} has no {WEIGHTS}"
        remedy = "convert it to safetensors: load the model with transformers and call save_pretrained on it"
        raise ModelError(problem, remedy)
    problem = f"{path} has no weights: neither {WEIGHTS} nor {INDEX} is there"
    raise ModelError(problem, "fetch the weights, or name the folder that holds them")


def read_weight_file(path: Path) -> WeightFile:
    """Safetensors: 8 bytes of header length (little endian), the header in JSON, the data."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the weights", "run `git lfs pull` in its folder")
        if len(start) < 8 or header_bytes > size_bytes - 8:
            problem = f"{path} is truncated: {size_bytes:,} bytes do not hold its header of {header_bytes:,}"
            raise ModelError(problem, FETCH_AGAIN)
        header = file.read(header_bytes)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = TENSORS.validate_python(entries)
    except (ValueError, AttributeError, TypeError) as error:  # not JSON, not an object, or not entries of tensors
        problem = f"{path} has a header that is not safetensors', so its tensors are unknown"
        raise ModelError(problem, FETCH_AGAIN) from error
    expected = 8 + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size_bytes < expected:
        raise ModelError(f"{path} is truncated: it has {size_bytes:,} of {expected:,} bytes", FETCH_AGAIN)
    return WeightFile(path=path, size_bytes=size_bytes, header=header, tensors=tensors)


def fingerprint(texts: Mapping[str, Path], weights: Iterable[WeightFile]) -> str:
    digest = hashlib.sha256()
    for name, text in texts.items():
        content = text.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in weights:
        digest.update(f"{file.path.name} {file.size_bytes} {len(file.header)}\n".encode() + file.header)
        with file.path.open("rb") as opened:
            for start, length in _spans(file):
                opened.seek(start)
                digest.update(opened.read(length))
    return digest.hexdigest()


def _spans(file: WeightFile) -> list[tuple[int, int]]:
    """Starts and lengths, in the order of the file; the whole file if the blocks would cover it."""
    if file.size_bytes <= NUM_BLOCKS * BLOCK_BYTES:
        return [(0, file.size_bytes)]
    last = file.size_bytes - BLOCK_BYTES
    blocks = {(last * block // (NUM_BLOCKS - 1), BLOCK_BYTES) for block in range(NUM_BLOCKS)}
    data = 8 + len(file.header)
    offsets = (tensor.data_offsets for tensor in file.tensors.values())
    return sorted(blocks | {(data + start, min(HEAD_BYTES, end - start)) for start, end in offsets})


def _dtypes(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    num_elements: Counter[str] = Counter()
    for tensor in tensors:
        num_elements[tensor.dtype] += prod(tensor.shape)
    return tuple(DTYPES.get(dtype, dtype.lower()) for dtype, _ in num_elements.most_common())


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}", FETCH_AGAIN) from error


def require_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        problem = f"{path} is a file; a model is a folder with config.json and safetensors"
        raise ModelError(problem, f"name its folder: {path.parent}")
    siblings = _folders(path.parent) if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    remedy = _suggest(path.parent, near) or "paths are relative to the spec file"
    raise ModelError(f"the model folder {path} does not exist", remedy)


def _folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir() if folder.is_dir())


def _suggest(parent: Path, names: list[str]) -> str:
    return f"did you mean {' or '.join(str(parent / name) for name in names)}?" if names else ""
