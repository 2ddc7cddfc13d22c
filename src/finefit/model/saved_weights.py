"""The weights of a saved model under the names of the model in memory. transformers stores some in another form, such
as the experts of a mixture, which are many tensors in a file and one in memory. Weights are read one at a time, put
back into a model, or collected from one whose parameters are sharded over ranks.

Weights in memory may be rounded. A checkpoint of a partly trained model therefore stores its frozen weights exactly as
the base does, so that the two differ only in what was trained. Their bytes are copied from file to file, a block at a
time, in the safetensors format, so frozen weights need no memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit import bounded
from finefit.errors import FinefitError, ModelError, RunError
from finefit.facts.files import INDEX, WEIGHTS, find_weight_files, read_config, read_weight_file
from finefit.model.resolve_model import ADAPTER_WEIGHTS

TRAINED = "default"
"""Peft's name of an adapter without a name of its own; it is saved in the plain layout."""
_SHARD_BYTES = 50 * 10**9
"""The largest size of one file, as in transformers."""
_BLOCK_BYTES = 16 << 20
_ALIGNED = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Dtypes of trained weights and buffers; frozen weights may have any dtype."""
_TORCH = {code: dtype for dtype, code in _DTYPES.items()}
Put = Callable[[nn.Parameter, Tensor], None]


class SavedTensors:
    """The tensors of one folder; tracks which are unread."""

    def __init__(self, folder: Path) -> None:
        self._spans = spans_in(folder)
        self._left = set(self._spans)

    @property
    def unread(self) -> list[str]:
        return sorted(self._left)

    def take(self, model: nn.Module, name: str, shape: torch.Size) -> Tensor | None:
        """None if the tensor is missing or has another shape."""
        if name in self._spans:
            return self.read(name) if self._shape(name) == list(shape) else None
        unit, places = self._parts(model, name, shape)
        if not places:
            return None
        parts = {key: self.read(key) for key in places}
        whole_SU = torch.empty(shape.numel() // unit, unit, dtype=next(iter(parts.values())).dtype)
        for key, part in parts.items():
            whole_SU[places[key].flatten()] = part.reshape(-1, unit)
        return whole_SU.view(shape)

    def names(self, model: nn.Module, name: str, shape: torch.Size) -> tuple[str, ...]:
        """The names that a tensor is stored under: its own, or those of its parts. Empty if `take` gives None."""
        if name in self._spans:
            return (name,) if self._shape(name) == list(shape) else ()
        return tuple(self._parts(model, name, shape)[1])

    def _parts(self, model: nn.Module, name: str, shape: torch.Size) -> tuple[int, dict[str, Tensor]]:
        """Which parts of a tensor are stored under which names, found by letting transformers convert numbers instead
        of values. `unit` consecutive values share a number, so that few numbers are needed where rows stay whole."""
        for unit in (shape[-1] if shape else 1, 1) if isinstance(model, PreTrainedModel) else ():
            numbers = torch.arange(shape.numel() // unit).view(*shape[:-1], -1)
            places: dict[str, Tensor] = revert_weight_conversion(model, {name: numbers})
            if places and all(key in self._spans and self._agree(key, place, unit) for key, place in places.items()):
                return unit, places
        return 1, {}

    def _agree(self, name: str, numbers: Tensor, unit: int) -> bool:
        """Whether the converted numbers match what is stored, in order; dimensions of size one may come and go."""
        stored = self._shape(name)
        rows = stored if unit == 1 else stored[:-1] if stored and stored[-1] == unit else [0]
        return [size for size in numbers.shape if size != 1] == [size for size in rows if size != 1]

    def _shape(self, name: str) -> list[int]:
        return list(self._spans[name].shape)

    def shape(self, stored: str) -> tuple[int, ...]:
        return self._spans[stored].shape

    def dtype(self, stored: str) -> torch.dtype:
        return _TORCH[self._spans[stored].dtype]

    def read(self, name: str) -> Tensor:
        """The tensor under this name of the file, unchanged."""
        self._left.discard(name)
        return self._spans[name].read()


def put_whole(parameter: Tensor, value: Tensor) -> None:
    parameter.detach().copy_(value)


def restore_weights(model: nn.Module, checkpoint: Path, put: Put = put_whole) -> None:
    """Reads what `save_weights` wrote, tensor by tensor. `put` copies into a parameter that may be sharded over
    ranks."""
    if isinstance(model, peft.PeftModel):
        wanted = adapter_tensors(model, dict(model.named_parameters()))
        adapter = load_file(checkpoint / ADAPTER_WEIGHTS)
        odd = adapter.keys() ^ wanted.keys() or {n for n in wanted if adapter[n].shape != full_shape(wanted[n])}
        if odd:
            names = ", ".join(sorted(odd)[:3])
            raise RunError(f"{checkpoint.name} holds an adapter for another model or other targets: {names} differ")
        for name, tensor in adapter.items():
            _put(wanted[name], tensor, put)
        return
    stored = SavedTensors(checkpoint)
    targets = model.state_dict(keep_vars=True)
    restored: set[int] = set()
    for name, target in targets.items():
        if (value := stored.take(model, name, full_shape(target))) is not None:
            _put(target, value, put)
            restored.add(id(target))
    if stored.unread:
        raise RunError(f"{checkpoint.name} holds {stored.unread[0]}, which this model does not have in that shape")
    # a tied tensor is stored under one of its names
    if missing := sorted(name for name, target in targets.items() if id(target) not in restored):
        raise RunError(f"{checkpoint.name} lacks {', '.join(missing[:3])}")


def _put(target: Tensor, value: Tensor, put: Put) -> None:
    """A buffer is whole on every rank."""
    if isinstance(target, nn.Parameter):
        put(target, value)
    else:
        put_whole(target, value)


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of a tensor that may be sharded; DeepSpeed leaves an empty tensor in its place."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def adapter_tensors(adapted: peft.PeftModel, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The trained adapter's tensors by the names they are stored under. `tensors`, by name, replaces the model's
    own."""
    named: dict[str, Tensor] = peft.get_peft_model_state_dict(
        adapted, state_dict=tensors, adapter_name=TRAINED, save_embedding_layers=False
    )
    return named


def whole_weights(
    model: nn.Module, weight: Callable[[nn.Parameter], Tensor], *, keeps: bool, only_trained: bool = False
) -> dict[str, Tensor]:
    """Collects the weights that `save_weights` takes if parameters are sharded. All ranks call it, because `weight`
    assembles one with the help of all; the rank that `keeps` the result gets it, with tied weights still tied. With
    `only_trained`, frozen weights are left out, because they are saved from files."""
    named = dict(_trained(model)) if isinstance(model, peft.PeftModel) else model.state_dict(keep_vars=True)
    if only_trained:
        buffers = {name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)}
        named = dict(_trained(model)) | buffers
    whole: dict[int, Tensor] = {}
    for ident, tensor in {id(tensor): tensor for tensor in named.values()}.items():
        value = weight(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
        if keeps:
            whole[ident] = value
    return {name: whole[id(tensor)] for name, tensor in named.items()} if keeps else {}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    path: Path
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def blocks(self) -> Iterator[bytes | memoryview]:
        left = self.num_bytes
        with bounded.open_binary(self.path) as file:
            file.seek(self.start)
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise RunError(f"{self.path} ends before its last tensor", "download the model again, then resume")
                left -= len(block)
                yield block

    def read(self) -> Tensor:
        """Not mapped: nothing of the file stays in the memory of this process."""
        if self.dtype not in _TORCH:
            raise ModelError(f"{self.path} holds tensors of type {self.dtype}, which torch does not know")
        data, filled = bytearray(self.num_bytes), 0
        with bounded.open_binary(self.path) as file:
            file.seek(self.start)
            while filled < self.num_bytes:
                if not (read := file.readinto(memoryview(data)[filled:])):
                    raise RunError(f"{self.path} ends before its last tensor", "fetch the file again")
                filled += read
        if not data:  # torch.frombuffer refuses it
            return torch.empty(self.shape, dtype=_TORCH[self.dtype])
        return torch.frombuffer(data, dtype=_TORCH[self.dtype]).view(self.shape)


class InMemory:
    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.dtype, self.shape, self.num_bytes = _DTYPES[tensor.dtype], tuple(tensor.shape), self._bytes.numel()

    def blocks(self) -> Iterator[bytes | memoryview]:
        yield self._bytes.numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lazy:
    """A tensor that is computed when its turn to be written comes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    compute: Callable[[], Tensor]

    def blocks(self) -> Iterator[bytes | memoryview]:
        yield from InMemory(self.compute()).blocks()


def lazy(shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[], Tensor]) -> _Lazy:
    def shaped() -> Tensor:
        return compute().to(dtype).reshape(shape)

    return _Lazy(dtype=code_of(dtype), shape=shape, num_bytes=math.prod(shape) * dtype.itemsize, compute=shaped)


class TensorSource(Protocol):
    """What a file is written from, one tensor after the other."""

    @property
    def dtype(self) -> str:
        """As safetensors names it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def blocks(self) -> Iterator[bytes | memoryview]: ...


def code_of(dtype: torch.dtype) -> str:
    """As safetensors names it."""
    return _DTYPES[dtype]


def torch_dtype_of(code: str) -> torch.dtype:
    """The other way round."""
    return _TORCH[code]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    base: Path
    spans: Mapping[str, FileSpan]
    """Keyed by the names under which frozen tensors are to be stored."""
    stamps: Mapping[Path, tuple[int, int]]
    """Size and time of each of the base's files when the model was loaded."""

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans.values())


def frozen_weights_of(model: nn.Module, base: Path) -> FrozenWeights | None:
    """None if everything that is saved is trained: a whole model or an adapter. Call it before the model is sharded."""
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
                f"{names[0]} is not in {base.name} under a known name, and a checkpoint of a part of a model copies "
                "the rest from its base",
                "set tuning: {kind: full} or {kind: lora}",
            )
        frozen |= {name: spans[stored] for name, stored in found.items()}
    stamps = {path: _stamp(path) for path in {span.path for span in frozen.values()}}
    return FrozenWeights(base=base, spans=frozen, stamps=stamps)


def _stored_names(saved: SavedTensors, model: PreTrainedModel, names: list[str]) -> dict[str, str]:
    """Maps the name that a tensor is saved under to its name in the base, which in some bases lacks the trained model's
    prefix."""
    shape = model.get_parameter(names[0]).shape
    for name in names:
        if parts := saved.names(model, name, shape):
            return {names[0]: name} if parts == (name,) else {part: part for part in parts}
    short = names[0].removeprefix(f"{model.base_model_prefix}.")
    return {names[0]: short} if saved.names(model, short, shape) == (short,) else {}


def spans_in(folder: Path) -> dict[str, FileSpan]:
    found: dict[str, FileSpan] = {}
    for name in find_weight_files(folder):
        found |= spans_of(folder / name)
    return found


def spans_of(path: Path) -> dict[str, FileSpan]:
    """Of one file."""
    found, file = dict[str, FileSpan](), read_weight_file(path)
    data = 8 + len(file.header)
    for name, tensor in file.tensors.items():
        start, end = tensor.data_offsets
        found[name] = FileSpan(
            path=path, start=data + start, num_bytes=end - start, dtype=tensor.dtype, shape=tensor.shape
        )
    return found


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def weight_bytes(model: nn.Module, frozen: FrozenWeights | None = None) -> int:
    """The number of bytes that `save_weights` will write."""
    whole = not (isinstance(model, peft.PeftModel) or frozen)
    own = sum(full_shape(p).numel() * p.element_size() for p in model.parameters() if whole or p.requires_grad)
    return own + (frozen.num_bytes if frozen else 0)


def save_with_frozen(
    model: PreTrainedModel,
    folder: Path,
    frozen: FrozenWeights,
    trained: Mapping[str, Tensor],
    *,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """`trained` is keyed by name in the model. The config keeps the base's dtype."""
    for path, stamp in frozen.stamps.items():
        if not path.is_file() or _stamp(path) != stamp:
            what = "has changed" if path.is_file() else "is gone"
            problem = f"{path} {what} since training began, and the frozen weights are saved from it"
            raise RunError(problem, "put the old one back, then resume")
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(trained))
    if twice := frozen.spans.keys() & converted.keys():
        raise FinefitError(f"{sorted(twice)[0]} is both trained and frozen")
    sources: dict[str, TensorSource] = {**frozen.spans, **{name: InMemory(t) for name, t in converted.items()}}
    write_shards(folder, sources, shard_bytes)
    config, base = model.config, read_config(frozen.base)
    config.dtype = base.get("dtype") or base.get("torch_dtype") or str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP makes a class of its own
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def write_shards(folder: Path, sources: Mapping[str, TensorSource], shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(sources):
        if shards[-1] and size + sources[name].num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sources[name].num_bytes
    if len(shards) == 1:
        _write(folder / WEIGHTS, sources)
        return
    place: dict[str, str] = {}
    for at, names in enumerate(shards, start=1):
        file = f"model-{at:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, {name: sources[name] for name in names})
        place |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(source.num_bytes for source in sources.values())}, "weight_map": place}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(path: Path, sources: Mapping[str, TensorSource]) -> None:
    """Writes wide dtypes first, so that each tensor starts at an aligned offset."""
    item_bytes = {name: source.num_bytes // max(math.prod(source.shape), 1) for name, source in sources.items()}
    order = sorted(sources, key=lambda name: (-item_bytes[name], name))
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


def require_frozen_unchanged(frozen: FrozenWeights, checkpoint: Path) -> None:
    """Requires every frozen tensor of the checkpoint to equal the base's, byte for byte."""
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
