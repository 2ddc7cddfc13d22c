"""Rehearsals of a custom model with a few of its layers, for comparing candidates.

The file does not say which layers are alike. Layers count as alike that have the same class and the same tensors, are
in one list and are treated alike; for every model it is verified once that a few of them give the same trace as all of
them. The candidate that is chosen is always rehearsed whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise

from torch import nn

from finefit.custom.model import custom_family_of
from finefit.errors import ModelError
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_kernels import device_kernels
from finefit.rehearse.fake_model import build_on_meta
from finefit.rehearse.layer_extrapolation import LayerRun, LayersDiffer, extrapolate, find_inconsistencies
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.rehearse.step_config import StepConfig
from finefit.rehearse.trace import Trace

_KINDS: dict[str, tuple[tuple[str, ...], ...]] = {}
_PROVED: dict[str, bool] = {}
"""By config and tuning, for the life of the process."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """One list of layers."""

    kinds: tuple[str, ...]
    runs: tuple[LayerRun, ...]

    @property
    def kept(self) -> list[int]:
        starts = [0, *(sum(run.num_layers for run in self.runs[: at + 1]) for at in range(len(self.runs)))]
        return [
            start + at
            for (start, _), run in zip(pairwise(starts), self.runs, strict=True)
            for at in range(run.rehearsed)
        ]


def rehearse_custom(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal:
    """As `rehearse`; a quick rehearsal executes only a few layers where they are proved to represent all."""
    key = _key(cfg)
    if not cfg.is_quick or _PROVED.get(key) is False:
        return _executed(cfg, memo)
    if key not in _PROVED:
        whole, few = _executed(cfg, memo), _stretched(cfg, memo)
        _PROVED[key] = few is not None and _are_equal(whole.trace, few.trace)
        return whole
    return _stretched(cfg, memo) or _executed(cfg, memo)


def _key(cfg: StepConfig) -> str:
    return repr((cfg.config, cfg.tuning, cfg.device, cfg.capability, cfg.precision))


def _executed(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal:
    if repr(cfg) not in memo:
        memo[repr(cfg)] = rehearse(cfg)
    return memo[repr(cfg)]


def _are_equal(whole: Trace, few: Trace) -> bool:
    """Memory to the byte, work to the operation."""
    same_operations = sum(whole.operations.values()) == sum(few.operations.values())
    return (
        total_flops(whole) == total_flops(few)
        and same_operations
        and len(whole.events) == len(few.events)
        and replay(whole.stream()) == replay(few.stream())
    )


def _stretched(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal | None:
    """None where all layers must be executed."""
    stacks = _stacks(cfg)
    if not any(run.missing for stack in stacks for run in stack.runs):
        return None
    recompute, before = 0, 0
    for stack in stacks:
        recompute += sum(before + at < cfg.levers.recompute for at in stack.kept)
        before += len(stack.kinds)
    short = replace(cfg, levers=replace(cfg.levers, recompute=recompute))
    key = f"{[stack.kept for stack in stacks]} {short!r}"
    try:
        if key not in memo:
            memo[key] = rehearse(short, adjust=partial(_keep, stacks))
        found = memo[key]
        trace = extrapolate(found.trace, *(stack.runs for stack in stacks))
    except (LayersDiffer, ModelError):  # code may rely on all of its layers
        return None
    return None if found.unreached or any(find_inconsistencies(trace)) else replace(found, trace=trace)


def _stacks(cfg: StepConfig) -> list[_Stack]:
    found, before = [], 0
    for kinds in _kinds(cfg):
        again = [before + at < cfg.levers.recompute for at in range(len(kinds))]
        sizes = [len(list(same)) for _, same in groupby(zip(kinds, again, strict=True))]
        # code may keep the output of the layer before the last one
        runs = tuple(LayerRun(part) for size in sizes for part in (1, size - 1) if part)
        found.append(_Stack(kinds, runs))
        before += len(kinds)
    return found


def _kinds(cfg: StepConfig) -> tuple[tuple[str, ...], ...]:
    """Of the layers of each list: what distinguishes one from another."""
    key = _key(cfg)
    if key not in _KINDS:
        own = custom_family_of(build_on_meta(cfg, device_kernels(cfg.device, cfg.capability, cfg.precision)))
        assert own is not None
        _KINDS[key] = tuple(
            tuple(_kind(own.module.get_submodule(name)) for name in names) for names in _lists(own.module)
        )
    return _KINDS[key]


def _kind(layer: nn.Module) -> str:
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return repr(
        (type(layer), [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors])
    )


def _lists(module: nn.Module) -> list[list[str]]:
    """Names of layers by the list that they make up; nothing where a layer is in no list, or a list has other
    members."""
    found = [
        (parent, list(names)) for parent, names in groupby(_layers(module), key=lambda name: name.rpartition(".")[0])
    ]
    is_whole = all(
        isinstance(layers := module.get_submodule(parent), nn.ModuleList)
        and names == [f"{parent}.{at}" for at in range(len(layers))]
        for parent, names in found
    )
    return (
        [names for _, names in found]
        if is_whole and not isinstance(getattr(type(module), "layers", None), property)
        else []
    )


def _layers(module: nn.Module) -> Sequence[str]:
    return getattr(module, "layers", None) or ()


def _keep(stacks: Sequence[_Stack], model: nn.Module) -> None:
    """Removes the other layers from their lists."""
    own = custom_family_of(model)
    assert own is not None
    left: list[str] = []
    for names, stack in zip(_lists(own.module), stacks, strict=True):
        parent = names[0].rpartition(".")[0]
        layers = own.module.get_submodule(parent)
        assert isinstance(layers, nn.ModuleList)
        for at in reversed(range(len(names))):
            if at not in stack.kept:
                del layers[at]
        left += [f"{parent}.{at}" for at in range(len(stack.kept))]
    own.module.layers = tuple(left)  # type: ignore[assignment]
