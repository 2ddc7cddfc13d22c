"""Frozen weights of a model in the files that it was loaded from. What is computed with may be rounded; a checkpoint of a part of a model has all
else as its base stores it, so that the two differ in what was trained and in nothing else.

Bytes go from file to file, a block at a time: no memory is needed for what is frozen. The format is that of safetensors.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit.errors import FinefitError, ModelError, RunError
from finefit.facts.model import INDEX, WEIGHTS, find_weight_files, read_config, read_weight_file
from finefit.model.stored import Stored

_SHARD_BYTES = 50 * 10**9
"""Of one file at most; as transformers has it."""
_BLOCK_BYTES = 16 << 20
_ALIGNED = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Of what is trained, and of buffers; what is frozen may be in any."""


class Source(Protocol):
    """A tensor's bytes, wherever they are."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def blocks(self) -> Iterator[bytes | memoryview]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """In a file."""

    path: Path
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def blocks(self) -> Iterator[bytes | memoryview]:
        left = self.num_bytes
        with self.path.open("rb") as file:
            file.seek(self.start)
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise RunError(
                        f"{self.path} ends before its last tensor", "fetch the model again, then go on with the run"
                    )
                left -= len(block)
                yield block


class _Held:
    """On the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.dtype, self.shape, self.num_bytes = _DTYPES[tensor.dtype], tuple(tensor.shape), self._bytes.numel()

    def blocks(self) -> Iterator[bytes | memoryview]:
        yield self._bytes.numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    base: Path
    spans: Mapping[str, Span]
    """By the names that frozen tensors are to be stored under."""
    stamps: Mapping[Path, tuple[int, int]]
    """Size and time of each of the base's files when the model was loaded."""

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans.values())


def kept_of(model: nn.Module, base: Path) -> Kept | None:
    """None where the weights that are saved are all trained: a whole model, an adapter. To be asked before anything is divided."""
    if not isinstance(model, PreTrainedModel) or all(p.requires_grad for p in model.parameters()):
        return None
    stored, spans = Stored(base), spans_in(base)
    kept: dict[str, Span] = {}
    for alike in _frozen(model):
        if not (found := _found(stored, model, alike)):
            raise ModelError(
                f"{alike[0]} is not in {base.name} under a name that is known here, and a part of a model is saved with the rest as its base has it",
                "set tuning: {kind: full} or {kind: lora}",
            )
        kept |= {name: spans[theirs] for name, theirs in found.items()}
    return Kept(base=base, spans=kept, stamps={path: _stamp(path) for path in {span.path for span in kept.values()}})


def spans_in(folder: Path) -> dict[str, Span]:
    found: dict[str, Span] = {}
    for file in (read_weight_file(folder / name) for name in find_weight_files(folder)):
        data = 8 + len(file.header)
        for name, tensor in file.tensors.items():
            start, end = tensor.data_offsets
            found[name] = Span(
                path=file.path, start=data + start, num_bytes=end - start, dtype=tensor.dtype, shape=tensor.shape
            )
    return found


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _frozen(model: nn.Module) -> Iterator[list[str]]:
    """The names of each tensor; one that is tied has several."""
    alike: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            alike.setdefault(id(parameter), []).append(name)
    yield from alike.values()


def _found(stored: Stored, model: PreTrainedModel, alike: list[str]) -> dict[str, str]:
    """Some bases are stored without the prefix of the model that is trained."""
    shape = model.get_parameter(alike[0]).shape
    for name in alike:
        if parts := stored.names(model, name, shape):
            return {alike[0]: name} if parts == (name,) else {part: part for part in parts}
    bare = alike[0].removeprefix(f"{model.base_model_prefix}.")
    return {alike[0]: bare} if stored.names(model, bare, shape) == (bare,) else {}


def save_part(
    model: PreTrainedModel, folder: Path, kept: Kept, trained: Mapping[str, Tensor], *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """`trained`: by name in the model. The config says of precision what the base's does."""
    _require_unchanged(kept)
    moved: dict[str, Tensor] = revert_weight_conversion(model, dict(trained))
    if twice := kept.spans.keys() & moved.keys():
        raise FinefitError(f"{sorted(twice)[0]} is both trained and frozen")
    sources: dict[str, Source] = {**kept.spans, **{name: _Held(tensor) for name, tensor in moved.items()}}
    _write_shards(folder, sources, shard_bytes)
    _write_config(model, folder, read_config(kept.base))


def _require_unchanged(kept: Kept) -> None:
    for path, stamp in kept.stamps.items():
        if not path.is_file() or _stamp(path) != stamp:
            what = "has changed" if path.is_file() else "is gone"
            raise RunError(
                f"{path} {what} since training began, and the frozen weights are saved from it",
                "put the old one back, then resume",
            )


def _write_shards(folder: Path, sources: Mapping[str, Source], shard_bytes: int) -> None:
    shards = _shards(sources, shard_bytes)
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    )
    for file, names in zip(files, shards, strict=True):
        _write(folder / file, {name: sources[name] for name in names})
    if len(shards) > 1:
        place = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(source.num_bytes for source in sources.values())}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(sources: Mapping[str, Source], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(sources):
        if shards[-1] and size + sources[name].num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sources[name].num_bytes
    return shards


def _write(path: Path, sources: Mapping[str, Source]) -> None:
    """Wide types first, so that each begins where its type may."""
    order = sorted(sources, key=lambda name: (-_item_bytes(sources[name]), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + sources[name].num_bytes
        entries[name] = {"dtype": sources[name].dtype, "shape": list(sources[name].shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            for block in sources[name].blocks():
                file.write(block)


def _item_bytes(source: Source) -> int:
    return source.num_bytes // max(math.prod(source.shape), 1)


def _write_config(model: PreTrainedModel, folder: Path, base: Mapping[str, Any]) -> None:
    config: Any = model.config
    config.dtype = base.get("dtype") or base.get("torch_dtype") or str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # which makes a class of its own
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def require_kept(kept: Kept, checkpoint: Path) -> None:
    """Every frozen tensor of the checkpoint is the base's, byte for byte: its files against theirs."""
    written = spans_in(checkpoint)
    moved = sorted(
        name for name, span in kept.spans.items() if name not in written or not _is_same(written[name], span)
    )
    if moved:
        more = f" and {len(moved) - 5} more" if len(moved) > 5 else ""
        raise FinefitError(
            f"{len(moved)} of {len(kept.spans)} frozen tensors of {checkpoint.name} are not the base's: {', '.join(moved[:5])}{more}"
        )


def _is_same(left: Span, right: Span) -> bool:
    alike = (left.dtype, left.shape, left.num_bytes) == (right.dtype, right.shape, right.num_bytes)
    return alike and all(ours == theirs for ours, theirs in zip(left.blocks(), right.blocks(), strict=True))
