"""The weights of base and adapter in one model, written tensor by tensor: a model larger than memory can be merged.

The model is built without weights. Each layer that the adapter changes gets its base weights from the file just before
they are written, peft's own code merges them, and they are freed; every other tensor is copied from file to file.
Merging computes in fp32, so that each weight is rounded once. Where stored tensors do not map to those in memory one
layer at a time, the whole model is loaded and merged.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit.artifacts.atomic import report_disk_full
from finefit.errors import ModelError
from finefit.facts.files import COMPUTED, read_config, reading_model
from finefit.model.adapter import load_adapter
from finefit.model.load import load_base
from finefit.model.quantised import PackedWeights, packed_layers
from finefit.model.saved_weights import (
    SavedTensors,
    TensorSource,
    code_of,
    lazy,
    spans_in,
    torch_dtype_of,
    write_shards,
)
from finefit.vision import auto_class

SHARD_BYTES = 4 * 10**9
"""Of one file at most."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_INSIDE = ("base_layer", "original_module")
"""Peft's names of what it has wrapped."""
_TIED = "tie_word_embeddings"
_PACKED = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedWeights:
    parameters: int
    is_streamed: bool
    merged: tuple[str, ...]
    """Stored names of the tensors that are not the base's."""
    is_untied: bool
    """Whether input embeddings and head were one tensor in the base and are two in the merged model."""


def write_merged(
    base: Path,
    adapter: Path | None,
    out: Path,
    *,
    dtype: torch.dtype | None,
    unpacked: Callable[[Tensor], Tensor] | None = None,
    packed: PackedWeights | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> MergedWeights:
    """Weights and config.json. `dtype`: of every floating tensor; None, each as the base has it. `unpacked`: what the
    weights of the layers that `packed` names become before the adapter is merged into them."""
    if adapter is None and unpacked is None:
        sources = copied(base, dtype)
        plan = _Plan(sources=sources)
    else:
        found = _streamed(base, adapter, dtype, unpacked, packed)
        if found is None:
            assert adapter is not None
            return _write_whole(base, adapter, out, dtype or most_frequent_dtype(base), shard_bytes)
        plan = found
    with report_disk_full(out, sum(source.num_bytes for source in plan.sources.values())):
        write_shards(out, plan.sources, shard_bytes)
        for file in out.glob("*.safetensors"):
            file.chmod(0o644)
        _write_config(base, out, dtype, is_untied=plan.is_untied)
    return MergedWeights(
        parameters=sum(prod(source.shape) for source in plan.sources.values()),
        is_streamed=True,
        merged=tuple(sorted(plan.merged)),
        is_untied=plan.is_untied,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    sources: dict[str, TensorSource]
    """By the names that they are stored under."""
    merged: frozenset[str] = frozenset()
    is_untied: bool = False


def copied(base: Path, dtype: torch.dtype | None) -> dict[str, TensorSource]:
    """Every tensor of a folder, in this precision."""
    sources: dict[str, TensorSource] = {}
    for name, span in spans_in(base).items():
        if name.endswith(COMPUTED):
            continue
        is_same = dtype is None or span.dtype not in _FLOATS or span.dtype == code_of(dtype)
        sources[name] = span if is_same or dtype is None else lazy(span.shape, dtype, span.read)
    return sources


def _streamed(
    base: Path,
    adapter: Path | None,
    dtype: torch.dtype | None,
    unpacked: Callable[[Tensor], Tensor] | None,
    packed: PackedWeights | None,
) -> _Plan | None:
    """None where a tensor that changes cannot be found in the file, or cannot be put back there."""
    model = empty_model(base)
    changed: dict[str, Callable[[Tensor], Tensor]] = {}
    if unpacked is not None and packed is not None:
        changed = {f"{name}.weight": unpacked for name in packed_layers(model, packed)}
    merging = Merging.of(model, base, adapter, changed)
    sources, merged = copied(base, dtype), set[str]()
    untied = merging.untied()
    for name in (*merging.touched(), *untied):
        stored = merging.places(name, untied)
        if not stored and not merging.is_alias(name):
            return None
        for part, shape in stored.items():
            precision = dtype or merging.dtype(name)
            sources[part] = lazy(shape, precision, merging.part(name, part))
            merged.add(part)
    return _Plan(sources=sources, merged=frozenset(merged), is_untied=bool(untied))


@dataclass(slots=True, kw_only=True)
class Merging:
    """Which tensors of a model an adapter changes, and what they become."""

    model: PreTrainedModel
    """On the meta device, without the adapter."""
    saved: SavedTensors
    shapes: dict[str, torch.Size]
    ties: dict[str, tuple[str, ...]]
    """All names of a tensor that has several, by each of them."""
    units: dict[str, nn.Module]
    """What peft has put in the place of a module, by the module's name."""
    owner: dict[str, str]
    """The unit that changes a tensor, by the tensor's name in the model."""
    changed: Mapping[str, Callable[[Tensor], Tensor]]
    _last: tuple[str, dict[str, Tensor]] = ("", {})
    """The parts of one stored tensor follow one another, so that one unit is kept."""

    @classmethod
    def of(
        cls, model: PreTrainedModel, base: Path, adapter: Path | None, changed: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> "Merging":
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        ties = {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        units = {} if adapter is None else units_of(on_meta(empty_model(base), adapter))
        owner = {
            f"{path}.{name}": path for path, unit in units.items() for name in dict(_wrapped(unit).named_parameters())
        }
        saved = SavedTensors(base)
        return cls(model=model, saved=saved, shapes=shapes, ties=ties, units=units, owner=owner, changed=changed)

    def touched(self) -> list[str]:
        return list(dict.fromkeys((*self.owner, *self.changed)))

    def untied(self) -> list[str]:
        """Names of tensors that were one and no longer are: an adapter has changed some of them, or each otherwise."""
        found: list[str] = []
        for group in dict.fromkeys(self.ties.values()):
            mine = [name for name in group if name in self.owner]
            if mine and (len(mine) < len(group) or not self._are_equal(mine)):
                found += group
        return found

    def _are_equal(self, names: list[str]) -> bool:
        first = self.value(names[0])
        return all(torch.equal(first, self.value(name)) for name in names[1:])

    def is_alias(self, name: str) -> bool:
        """Of a tensor that is stored under another name, and still tied."""
        return any(self._own(twin) for twin in self.ties.get(name, ()))

    def _own(self, name: str) -> tuple[str, ...]:
        return self.saved.names(self.model, name, self.shapes[name])

    def places(self, name: str, untied: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the stored tensors that hold it. Empty where it is not stored under a name of its own, which
        one gets that is no longer tied."""
        own = {part: self.saved.shape(part) for part in self._own(name)}
        return own or ({name: tuple(self.shapes[name])} if name in untied else {})

    def dtype(self, name: str) -> torch.dtype:
        (part, *_) = next(filter(None, map(self._own, (name, *self.ties.get(name, ())))))
        return self.saved.dtype(part)

    def part(self, name: str, stored: str, *, with_adapter: bool = True) -> Callable[[], Tensor]:
        """The stored tensor `stored` of what the tensor `name` becomes."""

        def compute() -> Tensor:
            value = self.value(name) if with_adapter else self._read(name).float()
            if stored == name:
                return value
            parts: dict[str, Tensor] = revert_weight_conversion(self.model, {name: value})
            return parts[stored]

        return compute

    def value(self, name: str) -> Tensor:
        """In fp32."""
        if name not in self.owner:
            return self._read(name).float()
        path = self.owner[name]
        if self._last[0] != path:
            self._last = ("", {})  # frees it first
            self._last = (path, self._merge(path))
        return self._last[1][name]

    def _read(self, name: str) -> Tensor:
        for alias in (name, *self.ties.get(name, ())):
            if (found := self.saved.take(self.model, alias, self.shapes[name])) is not None:
                return self.changed[name](found) if name in self.changed else found
        raise ModelError(f"{name} is not in the base under a known name", "fetch the model again")

    def _merge(self, path: str) -> dict[str, Tensor]:
        unit = self.units[path]
        with self._weights_in(path, unit):
            try:
                merged = merge_unit(unit)
            except ValueError as error:  # weights that are not finite
                raise cannot_merge(error) from None
            return {f"{path}.{name}": parameter.detach() for name, parameter in merged.named_parameters()}

    @contextmanager
    def _weights_in(self, path: str, unit: nn.Module) -> Iterator[None]:
        """The base's weights are in a unit while it is merged."""
        empty = []
        for prefix, module in _wrapped(unit).named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    empty.append((module, name, parameter))
                    full = ".".join(part for part in (path, prefix, name) if part)
                    module._parameters[name] = nn.Parameter(self._read(full).float(), requires_grad=False)
        try:
            yield
        finally:
            for module, name, parameter in empty:
                module._parameters[name] = parameter
            for module in unit.modules():
                if isinstance(module, BaseTunerLayer):
                    module.merged_adapters.clear()


def empty_model(folder: Path) -> PreTrainedModel:
    """On the meta device: names, shapes and ties without values."""
    with reading_model(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, _PACKED):
            del config.quantization_config
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
        model.tie_weights()
    return model.eval()


def on_meta(model: PreTrainedModel, adapter: Path) -> nn.Module:
    """The same model with the adapter, whose own weights are on the CPU, in fp32. Peft moves them to the device of the
    layers that they belong to, so they are put there once more."""
    with without_ties_warned():
        adapted = load_adapter(model, adapter, on_meta=True)
    named = dict(adapted.named_parameters(remove_duplicate=False))
    places = {id(p): (module, name) for module in adapted.modules() for name, p in module._parameters.items()}
    known = named | peft.get_peft_model_state_dict(adapted, state_dict=named, save_embedding_layers=False)
    for name, value in peft.load_peft_weights(str(adapter), device="cpu").items():
        if name in known:
            module, own = places[id(known[name])]
            module._parameters[own] = nn.Parameter(value.float(), requires_grad=False)
    found: nn.Module = adapted.get_base_model()
    return found


@contextmanager
def without_ties_warned() -> Iterator[None]:
    """Peft warns that tied layers lead to complications, which are seen to here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*(tie_word_embeddings|no longer tied|tied).*")
        yield


def units_of(adapted: nn.Module) -> dict[str, nn.Module]:
    """What peft has put in the place of modules, by their names; not what lies inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not any(
            f"{name}.".startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


def _wrapped(unit: nn.Module) -> nn.Module:
    """The base's own module inside."""
    inner = next((getattr(unit, name) for name in _INSIDE if name in unit._modules), None)
    return unit if inner is None else _wrapped(inner)


def merge_unit(unit: Any) -> nn.Module:
    """As peft's `merge_and_unload` does it with each of them; the result is the plain module."""
    if hasattr(unit, "unload_and_optionally_merge_module"):
        merged: nn.Module = unit.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        return merged
    unit.merge(safe_merge=True)
    found: nn.Module = unit.get_base_layer()
    return found


def cannot_merge(error: ValueError) -> ModelError:
    return ModelError(f"the adapter cannot be merged: {error}", "take another checkpoint: its weights have diverged")


def _write_whole(base: Path, adapter: Path, out: Path, dtype: torch.dtype, shard_bytes: int) -> MergedWeights:
    model = load_base(base, device="cpu", dtype=torch.float32)
    with without_ties_warned():
        adapted = load_adapter(model, adapter).eval()
        units = units_of(adapted.get_base_model())
        is_untied = _untie(adapted.get_base_model(), units)
        merged = tuple(
            f"{path}.{name}" for path, unit in units.items() for name, _ in _wrapped(unit).named_parameters()
        )
        try:
            plain = adapted.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise cannot_merge(error) from None
    assert isinstance(plain, PreTrainedModel)
    plain.to(dtype)
    parameters, num_bytes = plain.num_parameters(), sum(p.numel() * p.element_size() for p in plain.parameters())
    with report_disk_full(out, num_bytes):
        plain.generation_config = GenerationConfig()  # the base's file is copied: transformers refuses to save some
        plain.save_pretrained(out, max_shard_size=shard_bytes)
        (out / "generation_config.json").unlink(missing_ok=True)
        _write_config(base, out, dtype, is_untied=is_untied)
    return MergedWeights(parameters=parameters, is_streamed=False, merged=merged, is_untied=is_untied)


def _untie(model: PreTrainedModel, units: Mapping[str, nn.Module]) -> bool:
    """Merging into one of two tied layers would change the other one, too: each gets weights of its own."""
    ends: tuple[Any, Any] = (model.get_input_embeddings(), model.get_output_embeddings())
    if None in ends:
        return False
    first, last = (_wrapped(end) for end in ends)
    wrapped = {id(_wrapped(unit)) for unit in units.values()}
    if first.weight is not last.weight or not wrapped & {id(first), id(last)}:
        return False
    last.weight = nn.Parameter(torch.as_tensor(last.weight).detach().clone(), requires_grad=False)
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    return True


def _write_config(base: Path, out: Path, dtype: torch.dtype | None, *, is_untied: bool) -> None:
    """The base's own, so that nothing is added or lost by reading and writing it."""
    config = read_config(base)
    for values in (config, *(inner for inner in config.values() if isinstance(inner, dict))):
        values.pop(_PACKED, None)
        if dtype is not None:
            values |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in values}
        if is_untied and (values is config or _TIED in values):
            values[_TIED] = False
    if dtype is not None:
        config.setdefault("dtype", str(dtype).removeprefix("torch."))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def most_frequent_dtype(base: Path) -> torch.dtype:
    sizes: dict[str, int] = {}
    for span in spans_in(base).values():
        sizes[span.dtype] = sizes.get(span.dtype, 0) + span.num_bytes
    floats = {code: size for code, size in sizes.items() if code in _FLOATS}
    return torch_dtype_of(max(floats, key=lambda code: floats[code])) if floats else torch.float32
