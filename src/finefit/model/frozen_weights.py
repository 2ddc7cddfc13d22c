"""Frozen weights of a model in the files that it was loaded from. Weights in memory may be rounded; a checkpoint of a
part of a model stores the rest exactly as its base does, so that the two differ only in what was trained.

Bytes are copied from file to file, a block at a time, in the format of safetensors: frozen weights need no memory.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit.errors import FinefitError, ModelError, RunError
from finefit.facts.files import INDEX, WEIGHTS, find_weight_files, read_config, read_weight_file
from finefit.model.saved_weights import SavedTensors, whole_shape

_SHARD_BYTES = 50 * 10**9
"""Of one file at most, as in transformers."""
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
"""Of trained weights and buffers; frozen weights may have any."""


class TensorSource(Protocol):
    """A tensor's bytes, wherever they are."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def blocks(self) -> Iterator[bytes | memoryview]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
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
                    raise RunError(f"{self.path} ends before its last tensor", "download the model again, then resume")
                left -= len(block)
                yield block


class _InMemory:
    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.dtype, self.shape, self.num_bytes = _DTYPES[tensor.dtype], tuple(tensor.shape), self._bytes.numel()

    def blocks(self) -> Iterator[bytes | memoryview]:
        yield self._bytes.numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    base: Path
    spans: Mapping[str, FileSpan]
    """By the names that frozen tensors are to be stored under."""
    stamps: Mapping[Path, tuple[int, int]]
    """Size and time of each of the base's files when the model was loaded."""

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans.values())


def frozen_weights_of(model: nn.Module, base: Path) -> FrozenWeights | None:
    """None where all weights that are saved are trained: a whole model, an adapter. Call it before the model is
    sharded."""
    if not isinstance(model, PreTrainedModel) or all(p.requires_grad for p in model.parameters()):
        return None
    names_of: dict[int, list[str]] = {}  # a tied tensor has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            names_of.setdefault(id(parameter), []).append(name)
    saved, spans = SavedTensors(base), spans_in(base)
    frozen: dict[str, FileSpan] = {}
    for names in names_of.values():
        if not (found := _stored_names(saved, model, names)):
            raise ModelError(
                f"{names[0]} is not in {base.name} under a known name, and a checkpoint of a part of a model "
                "copies the "
                "rest from its base",
                "set tuning: {kind: full} or {kind: lora}",
            )
        frozen |= {name: spans[stored] for name, stored in found.items()}
    stamps = {path: _stamp(path) for path in {span.path for span in frozen.values()}}
    return FrozenWeights(base=base, spans=frozen, stamps=stamps)


def _stored_names(saved: SavedTensors, model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """What a tensor is saved under -> what its base has it under. Some bases are stored without the prefix of the
    trained model."""
    shape = model.get_parameter(names[0]).shape
    for name in names:
        if parts := saved.names(model, name, shape):
            return {names[0]: name} if parts == (name,) else {part: part for part in parts}
    short = names[0].removeprefix(f"{model.base_model_prefix}.")
    return {names[0]: short} if saved.names(model, short, shape) == (short,) else {}


def spans_in(folder: Path) -> dict[str, FileSpan]:
    found: dict[str, FileSpan] = {}
    for file in (read_weight_file(folder / name) for name in find_weight_files(folder)):
        data = 8 + len(file.header)
        for name, tensor in file.tensors.items():
            start, end = tensor.data_offsets
            found[name] = FileSpan(
                path=file.path, start=data + start, num_bytes=end - start, dtype=tensor.dtype, shape=tensor.shape
            )
    return found


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def weight_bytes(model: nn.Module, frozen: FrozenWeights | None = None) -> int:
    """What `save_weights` will write."""
    whole = not (isinstance(model, peft.PeftModel) or frozen)
    own = sum(whole_shape(p).numel() * p.element_size() for p in model.parameters() if whole or p.requires_grad)
    return own + (frozen.num_bytes if frozen else 0)


def save_with_frozen(
    model: PreTrainedModel,
    folder: Path,
    frozen: FrozenWeights,
    trained: Mapping[str, Tensor],
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """`trained`: by name in the model. The config keeps the base's dtype."""
    for path, stamp in frozen.stamps.items():
        if not path.is_file() or _stamp(path) != stamp:
            what = "has changed" if path.is_file() else "is gone"
            raise RunError(
                f"{path} {what} since training began, and the frozen weights are saved from it",
                "put the old one back, then resume",
            )
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(trained))
    if twice := frozen.spans.keys() & converted.keys():
        raise FinefitError(f"{sorted(twice)[0]} is both trained and frozen")
    sources: dict[str, TensorSource] = {**frozen.spans, **{name: _InMemory(t) for name, t in converted.items()}}
    _write_shards(folder, sources, shard_bytes)
    _write_config(model, folder, read_config(frozen.base))


def _write_shards(folder: Path, sources: Mapping[str, TensorSource], shard_bytes: int) -> None:
    shards = _shards(sources, shard_bytes)
    files = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WEIGHTS]
    for file, names in zip(files, shards, strict=True):
        _write(folder / file, {name: sources[name] for name in names})
    if len(shards) > 1:
        place = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(source.num_bytes for source in sources.values())}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(sources: Mapping[str, TensorSource], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(sources):
        if shards[-1] and size + sources[name].num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sources[name].num_bytes
    return shards


def _write(path: Path, sources: Mapping[str, TensorSource]) -> None:
    """Wide types first, so that each starts at an aligned offset."""

    def item_bytes(name: str) -> int:
        return sources[name].num_bytes // max(math.prod(sources[name].shape), 1)

    order = sorted(sources, key=lambda name: (-item_bytes(name), name))
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


def _write_config(model: PreTrainedModel, folder: Path, base: Mapping[str, Any]) -> None:
    config: Any = model.config
    config.dtype = base.get("dtype") or base.get("torch_dtype") or str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP makes a class of its own
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def require_frozen_unchanged(frozen: FrozenWeights, checkpoint: Path) -> None:
    """Every frozen tensor of the checkpoint equals the base's, byte for byte."""
    written = spans_in(checkpoint)
    changed = sorted(
        name for name, span in frozen.spans.items() if name not in written or not _is_same(written[name], span)
    )
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise FinefitError(
            f"{len(changed)} of {len(frozen.spans)} frozen tensors of {checkpoint.name} are not the base's: "
            f"{', '.join(changed[:5])}{more}"
        )


def _is_same(left: FileSpan, right: FileSpan) -> bool:
    alike = (left.dtype, left.shape, left.num_bytes) == (right.dtype, right.shape, right.num_bytes)
    return alike and all(ours == theirs for ours, theirs in zip(left.blocks(), right.blocks(), strict=True))
