"""A model of the user's own with a few of its layers, for comparing candidates.

Nobody has said which layers are alike. So those are taken for alike that have the same class and the same tensors, stand in one list and are treated
alike, and of every model it is proved once that a few of them come to what all come to. What is chosen in the end is rehearsed whole all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise

from torch import nn

from finefit.errors import ModelError
from finefit.model.custom import own_of
from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import total_flops
from finefit.rehearse.fake_model import on_meta
from finefit.rehearse.kernels import kernels_for
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.splice import NotRegular, Run, check_whole, stretch
from finefit.rehearse.trace import Trace

_KINDS: dict[str, tuple[tuple[str, ...], ...]] = {}
_PROVED: dict[str, bool] = {}
"""By config and tuning, as long as the process lives."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """A list of layers, or of what stands alone."""

    kinds: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def kept(self) -> list[int]:
        starts = [0, *(sum(run.num_layers for run in self.runs[: at + 1]) for at in range(len(self.runs)))]
        return [
            start + at
            for (start, _), run in zip(pairwise(starts), self.runs, strict=True)
            for at in range(run.rehearsed)
        ]


def rehearse_own(scene: Scene, memo: dict[str, Rehearsed]) -> Rehearsed:
    """As `rehearse`; of a quick scene only a few layers are executed where they are proved to stand for all."""
    key = _key(scene)
    if not scene.is_quick or _PROVED.get(key) is False:
        return _executed(scene, memo)
    if key not in _PROVED:
        whole, few = _executed(scene, memo), _stretched(scene, memo)
        _PROVED[key] = few is not None and _are_equal(whole.trace, few.trace)
        return whole
    return _stretched(scene, memo) or _executed(scene, memo)


def _key(scene: Scene) -> str:
    return repr((scene.config, scene.tuning, scene.device, scene.capability, scene.precision))


def _executed(scene: Scene, memo: dict[str, Rehearsed]) -> Rehearsed:
    if repr(scene) not in memo:
        memo[repr(scene)] = rehearse(scene)
    return memo[repr(scene)]


def _are_equal(whole: Trace, few: Trace) -> bool:
    """Memory to the byte, work to the operation."""
    same_work = total_flops(whole) == total_flops(few) and sum(whole.operations.values()) == sum(
        few.operations.values()
    )
    return same_work and len(whole.events) == len(few.events) and replay(whole.stream()) == replay(few.stream())


def _stretched(scene: Scene, memo: dict[str, Rehearsed]) -> Rehearsed | None:
    """None where all layers have to be executed."""
    stacks = _stacks(scene)
    if not any(run.missing for stack in stacks for run in stack.runs):
        return None
    recompute, before = 0, 0
    for stack in stacks:
        recompute += sum(before + at < scene.levers.recompute for at in stack.kept)
        before += len(stack.kinds)
    short = replace(scene, levers=replace(scene.levers, recompute=recompute))
    key = f"{[stack.kept for stack in stacks]} {short!r}"
    try:
        if key not in memo:
            memo[key] = rehearse(short, adjust=partial(_keep, stacks))
        found = memo[key]
        trace = stretch(found.trace, *(stack.runs for stack in stacks))
    except (NotRegular, ModelError):  # code may count on all of its layers
        return None
    return None if found.unreached or any(check_whole(trace)) else replace(found, trace=trace)


def _stacks(scene: Scene) -> list[_Stack]:
    found, before = [], 0
    for kinds in _kinds(scene):
        again = [before + at < scene.levers.recompute for at in range(len(kinds))]
        sizes = [len(list(same)) for _, same in groupby(zip(kinds, again, strict=True))]
        runs = tuple(
            Run(part) for size in sizes for part in (1, size - 1) if part
        )  # code may hold on to what the layer before the last one gave
        found.append(_Stack(kinds, runs))
        before += len(kinds)
    return found


def _kinds(scene: Scene) -> tuple[tuple[str, ...], ...]:
    """Of the layers of each list: what tells one from another."""
    key = _key(scene)
    if key not in _KINDS:
        own = own_of(on_meta(scene, kernels_for(scene.device, scene.capability, scene.precision)))
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
    """Names of layers by the list that they are all of; nothing where one layer is in no list, or some of a list are no layers."""
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
    """Takes the other layers out of their lists."""
    own = own_of(model)
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
