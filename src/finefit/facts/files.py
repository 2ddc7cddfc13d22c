"""Reads files, disks, caches and model folders without loading weights.

The fingerprint of a model folder covers what decides the model's answers: config, tokenizer, and of each weight file
its size, header, 64 evenly spaced blocks and the head of every tensor. The heads catch training that touched only small
tensors (a router, the norms), which are between the blocks.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finefit import bounded
from finefit.errors import FinefitError, ModelError, is_out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    path: str
    """Relative to a given folder, with POSIX separators, so that a copied tree has equal facts."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    use: str
    """What is written at `path`."""
    path: str
    free_bytes: int


def sha256_of(path: Path) -> str:
    """Of a regular file; of anything else an OSError, since it may never end."""
    with bounded.open_binary(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path, relative_to: Path) -> FileFact:
    """A missing or unreadable file is an OSError, since only the caller knows its purpose."""
    name = Path(os.path.relpath(path, relative_to)).as_posix()
    return FileFact(path=name, size_bytes=path.stat().st_size, sha256=sha256_of(path))


def free_bytes(path: Path) -> int:
    """The bytes that this user may still write at `path`, which need not exist yet."""
    absolute = path.resolve()
    disk = os.statvfs(next(folder for folder in (absolute, *absolute.parents) if folder.exists()))
    return disk.f_bavail * disk.f_frsize  # not f_bfree: that counts blocks reserved for root


def finefit_cache() -> Path:
    return _user_cache() / "finefit"


def hub_cache() -> Path:
    """The download cache of huggingface_hub, found by the same variables in the same order."""
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
"""The folder of named chat templates, such as those for tools."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUM_BLOCKS = 64
BLOCK_BYTES = 64 * 1024
HEAD_BYTES = 4 * 1024
MAX_HEADER_BYTES = 16 << 20
"""Of a hundred thousand tensors; published files have less than 1 MB."""
MAX_TEXT_BYTES = 64 << 20
"""Of a vocabulary or an index; the largest published tokenizer.json has 33 MB."""
_SETTINGS = frozenset({"config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"})
_SETTINGS |= {"preprocessor_config.json", "processor_config.json", "adapter_config.json", "chat_template.json"}
"""Files of at most `bounded.MAX_SETTINGS_BYTES`, as chat templates are."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16}
_BITS |= {"U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
"""Of an element, by safetensors' name of its type."""
COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of a tensor that old versions of transformers stored; a model computes it from its config."""
FETCH_AGAIN = "the file was not copied or downloaded to its end; fetch it again"
RESTORE = "restore the file from where the model came from"
_NEEDED = re.compile(
    r"requires the ([\w.-]+) library|packages? (?:that were )?not found in your environment: ([\w.-]+)"
)
"""The words with which transformers names a package that it needs."""
_MAX_WORDS = 300


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
    """Torch's name of the most frequent element type in the files; None without tensors."""


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


@contextmanager
def reading_model(what: str | Path, remedy: str = RESTORE) -> Iterator[None]:
    """The boundary to libraries that read a model's own files. These are the user's input, so whatever a library raises
    about them is an error of the user's. `what` names the file or folder."""
    try:
        yield
    except FinefitError:
        raise
    except ImportError as error:
        found = _NEEDED.search(str(error))
        package = error.name or (found and (found[1] or found[2]))
        command = f"pip install {package}" if package else "install the package that it names"
        raise ModelError(
            f"{what} needs a package that is not installed: {package or first_words(error)}", command
        ) from None
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of tokenizers, which is written in Rust
        if not (is_panic or isinstance(error, Exception)) or is_out_of_memory(error) or "CUDA" in str(error):
            raise
        words = first_words(error)
        reason = words if " " in words else f"{type(error).__name__} {words}".rstrip()
        raise ModelError(f"{what} cannot be read: {reason}", remedy) from error


def first_words(error: BaseException) -> str:
    """The text of an error in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RecursionError):
        words = "it is nested too deeply"
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + " ..."


def read_model_folder(path: Path) -> ModelHeader:
    try:
        require_folder(path)
        config = read_config(path)
        texts, weights = require_small_texts(path), [read_weight_file(path / name) for name in find_weight_files(path)]
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


def require_small_texts(path: Path) -> dict[str, Path]:
    """The files that `find_texts` finds. They must be small, because they are read into memory."""
    texts = find_texts(path)
    for text in texts.values():
        _require_small(text)
    return texts


def _limit_of(file: Path) -> int:
    is_settings = file.name in _SETTINGS or file.suffix == ".jinja"
    return bounded.MAX_SETTINGS_BYTES if is_settings else MAX_TEXT_BYTES


def _require_small(file: Path) -> None:
    if (size := file.stat().st_size) > (at_most := _limit_of(file)):
        problem = f"{file} has {size:,} bytes, more than the {at_most:,} that finefit reads of such a file"
        raise ModelError(problem, RESTORE)


def stored_dtypes(path: Path) -> tuple[str, ...]:
    """Torch's names, the most frequent first. Empty for missing or damaged weights; loading reports those."""
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
    return read_object(file)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in one of a model's files."""
    found = _read_json(file)
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds a {type(found).__name__}, not an object", RESTORE)
    return found


def find_weight_files(path: Path) -> tuple[str, ...]:
    """The files that transformers would choose: the single file, else the shards of the index."""
    if (path / WEIGHTS).is_file():
        return (WEIGHTS,)
    if (path / INDEX).is_file():
        index = _read_json(path / INDEX)
        try:
            shards = sorted(set(SHARDS.validate_python(index["weight_map"]).values()))
        except (KeyError, TypeError, ValidationError) as error:
            raise ModelError(f"{path / INDEX} has no weight_map of tensor and file names", FETCH_AGAIN) from error
        if outside := [name for name in shards if Path(name).name != name]:
            raise ModelError(f"{path / INDEX} names {outside[0]}, which is not a file of its folder", FETCH_AGAIN)
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
    with bounded.open_binary(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the weights", "run `git lfs pull` in its folder")
        if len(start) < 8 or header_bytes > size_bytes - 8:
            problem = f"{path} is truncated: {size_bytes:,} bytes do not hold its header of {header_bytes:,}"
            raise ModelError(problem, FETCH_AGAIN)
        if header_bytes > MAX_HEADER_BYTES:
            problem = f"{path} has a header of {header_bytes:,} bytes, and at most {MAX_HEADER_BYTES:,} are read"
            raise ModelError(problem, RESTORE)
        header = file.read(header_bytes)
    try:
        entries = bounded.parse_json(header)
        entries.pop("__metadata__", None)
        tensors = TENSORS.validate_python(entries)
    # not JSON, not an object, or not entries of tensors
    except (ValueError, AttributeError, TypeError) as error:
        problem = f"{path} has a header that is not safetensors', so its tensors are unknown"
        raise ModelError(problem, FETCH_AGAIN) from error
    expected = 8 + len(header) + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size_bytes < expected:
        raise ModelError(f"{path} is truncated: it has {size_bytes:,} of {expected:,} bytes", FETCH_AGAIN)
    if size_bytes > expected:
        raise ModelError(f"{path} has {size_bytes:,} bytes, its header describes {expected:,}", FETCH_AGAIN)
    _require_whole(path, tensors)
    return WeightFile(path=path, size_bytes=size_bytes, header=header, tensors=tensors)


def read_stored_json(file: WeightFile, name: str) -> Any:
    """A tensor whose bytes are JSON, as bitsandbytes stores how it packed a weight."""
    start, end = file.tensors[name].data_offsets
    if end - start > bounded.MAX_SETTINGS_BYTES:
        raise ModelError(f"{file.path}: {name} has {end - start:,} bytes, and settings are that of a few", RESTORE)
    with bounded.open_binary(file.path) as opened:
        opened.seek(8 + len(file.header) + start)
        return bounded.parse_json(opened.read(end - start))


def _require_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Requires each tensor to have the bytes of its shape, with no gap between tensors, as safetensors demands."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, end = tensor.data_offsets
        if tensor.dtype not in _BITS:
            problem = f"{path}: {name} has the unknown dtype {tensor.dtype}"
        elif any(size < 0 for size in tensor.shape):
            problem = f"{path}: {name} has a negative size in its shape {list(tensor.shape)}"
        elif start != at or end < start:
            problem = f"{path}: {name} is at bytes {start:,} to {end:,}, where byte {at:,} comes next"
        elif 8 * (end - start) != (needed := prod(tensor.shape) * _BITS[tensor.dtype]):
            shape = f"{list(tensor.shape)} in {tensor.dtype}"
            problem = f"{path}: {name} has {end - start:,} bytes, its shape {shape} needs {needed // 8:,}"
        else:
            at = end
            continue
        raise ModelError(problem, f"the header is damaged; {RESTORE}")


def fingerprint(texts: Mapping[str, Path], weights: Iterable[WeightFile]) -> str:
    digest = hashlib.sha256()
    for name, text in texts.items():
        _require_small(text)
        content = bounded.read_bytes(text, _limit_of(text))
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in weights:
        digest.update(f"{file.path.name} {file.size_bytes} {len(file.header)}\n".encode() + file.header)
        with bounded.open_binary(file.path) as opened:
            for start, length in _spans(file):
                opened.seek(start)
                digest.update(opened.read(length))
    return digest.hexdigest()


def _spans(file: WeightFile) -> list[tuple[int, int]]:
    """Starts and lengths in file order; the whole file if the blocks would cover it."""
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


def _with_special_float(found: dict[str, Any]) -> Any:
    """transformers writes an infinite number as an object, for example the time step's limit of Mamba 2."""
    words = found.get("__float__")
    return float(words) if isinstance(words, str) and len(found) == 1 else found


def _read_json(file: Path) -> Any:
    try:
        _require_small(file)
        content = bounded.read_bytes(file, _limit_of(file))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", "check that this user may read it") from None
    try:
        return bounded.parse_json(content, object_hook=_with_special_float)
    except bounded.TooManyValues as error:
        raise ModelError(f"{file}: {error}", RESTORE) from None
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
