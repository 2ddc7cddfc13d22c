"""Determines which layers of a model are alike, and rehearses the whole depth with a few layers."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from finefit.custom.model import custom_family_of
from finefit.errors import ModelError
from finefit.model.attention import layer_types_of
from finefit.model.quantised import packed_weights
from finefit.model.resolve_model import custom_source_in
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_kernels import DeviceKernels, device_kernels
from finefit.rehearse.fake_model import StepConfig, build_on_meta, layer_shapes, read_config
from finefit.rehearse.layer_extrapolation import LayerRun, LayersDiffer, extrapolate, find_inconsistencies
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.models import Full, Layers, Lora, Subset
from finefit.vision import vision_forward_of


def rehearse_extrapolated(cfg: StepConfig, memo: dict[str, Rehearsal] | None = None) -> Rehearsal:
    """Like `rehearse`, but executes only layers that differ, or all of them if layers do not repeat or a gradient is
    missing.

    `memo` keeps executed rehearsals: another number of recomputed layers needs the same few. In the result, layers of a
    vision tower are assigned to no layer, since levers do not count them."""
    memo = {} if memo is None else memo
    if custom_source_in(cfg.config) is not None:
        return _rehearse_custom(cfg, memo)
    config = read_config(cfg.config)
    kinds = layer_kinds(config)
    if not kinds or cfg.levers.recompute > len(kinds):
        problem = f"levers.recompute is {cfg.levers.recompute}, but the model has {len(kinds)} layers"
        raise ModelError(problem, "lower it, or set it to `all`")
    found = None if names_layers(cfg) else _extrapolated(cfg, config, kinds, memo)
    found = found or _executed(cfg, memo)
    return replace(found, trace=found.trace.beyond(len(kinds))) if tower_kinds(config) else found


def _extrapolated(
    cfg: StepConfig, config: PretrainedConfig, kinds: Sequence[str], memo: dict[str, Rehearsal]
) -> Rehearsal | None:
    """Returns None if all layers have to be executed."""
    deepstack = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    runs = layer_runs(kinds, cfg.levers.recompute, lead=len(deepstack))
    kept = _kept(runs)
    levers = replace(cfg.levers, recompute=sum(layer < cfg.levers.recompute for layer in kept))
    language = with_layers(cfg.config, [kinds[layer] for layer in kept])
    if not stands_for(language, cfg.config, kinds, kept):
        return None
    for tower_runs, tower in tower_cuts(tower_kinds(config)):
        short = replace(cfg, config=with_tower_layers(language, config, tower) if tower else language, levers=levers)
        found = _executed(short, memo)
        if short == cfg:
            return found
        if found.unreached:
            return None
        try:
            trace = extrapolate(found.trace, runs, tower_runs)
        except LayersDiffer:
            continue
        if not any(find_inconsistencies(trace)):
            trace.host_bytes = found.trace.host_bytes * cfg.levers.recompute // max(1, levers.recompute)
            return replace(found, trace=trace)
    return None


def memo_key(cfg: StepConfig) -> str:
    """Returns the key under which executed rehearsals are kept, independent of the card."""
    return repr(replace(cfg, capability=(0, 0)))


def _executed(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal:
    """Cards whose kernels behave the same share executed rehearsals; only their workspace sizes may differ."""
    kernels = device_kernels(cfg.device, cfg.capability, cfg.precision)
    key = memo_key(cfg)
    if key in memo and not _does_as(memo[key].kernels, kernels):
        key = f"{kernels} {key}"
    if key not in memo:
        memo[key] = rehearse(cfg)
    found, size = memo[key], kernels.workspace_bytes
    if size == found.kernels.workspace_bytes:
        return found
    return replace(found, trace=found.trace.with_workspaces(size), kernels=kernels)


def _does_as(rehearsed: DeviceKernels, other: DeviceKernels) -> bool:
    """Returns whether other kernels would have behaved the same in this rehearsal, except for workspace sizes."""
    limits = rehearsed.widest_head, other.widest_head
    is_same_choice = all((width <= limits[0]) == (width <= limits[1]) for width in rehearsed.asked_widths)
    like = replace(other, workspace_bytes=rehearsed.workspace_bytes, widest_head=rehearsed.widest_head)
    return is_same_choice and rehearsed == like


def _kept(runs: Sequence[LayerRun]) -> list[int]:
    """Returns the first layers of each run: whole periods are left out, so the order of kinds is kept."""
    starts = (sum(run.num_layers for run in runs[:at]) for at in range(len(runs)))
    return [start + at for start, run in zip(starts, runs, strict=True) for at in range(run.rehearsed)]


def names_layers(cfg: StepConfig) -> bool:
    """Returns whether single layers are trained, or stored packed, by number, so that layers of one kind may differ."""
    if (packed := packed_weights(cfg.config)) is not None and packed.names_layers:
        return True
    tuning = cfg.tuning
    match tuning:
        case Full():
            return False
        case Subset():
            named: tuple[Layers, ...] = (tuning.trainable,)
        case Lora():
            named = tuple(tuning.targets.values()) if isinstance(tuning.targets, dict) else (tuning.targets,)
    names = [name for listed in named if not isinstance(listed, str) for name in listed]
    return any(part.isdigit() for name in names for part in name.split("."))


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Returns what distinguishes the layers from one another, according to the config."""
    text = config.get_text_config()
    kinds = layer_types_of(config) or ["layer"] * text.num_hidden_layers
    dense, every = set(getattr(text, "mlp_only_layers", None) or ()), getattr(text, "decoder_sparse_step", 1) or 1
    first_dense = getattr(text, "first_k_dense_replace", 0) or 0
    mlps = list(getattr(text, "mlp_layer_types", None) or [""] * len(kinds))
    is_dense = [
        at in dense or (at + 1) % every != 0 or at < first_dense or mlps[at] == "dense" for at in range(len(kinds))
    ]
    rotates = list(getattr(text, "no_rope_layers", None) or [1] * len(kinds))  # 0: a layer without rotary embedding
    found = zip(kinds, is_dense, rotates, strict=True)
    return [kind + " dense" * dense + " unrotated" * (not rotated) for kind, dense, rotated in found]


def layer_runs(kinds: Sequence[str], recompute: int, lead: int = 0) -> tuple[LayerRun, ...]:
    """Returns the recomputed and the kept layers as runs, each with the period in which its kinds repeat. The first
    `lead` layers are never repeated: they also receive features of increasingly deep vision layers (deepstack)."""
    period = period_of(kinds)
    borders = sorted({0, recompute, min(lead, len(kinds)), len(kinds)})
    return tuple(LayerRun(end - start, period if start >= lead else end - start) for start, end in pairwise(borders))


def period_of(kinds: Sequence[str]) -> int:
    """Returns the number of layers after which the kinds repeat."""
    return next(p for p in range(1, len(kinds) + 1) if all(kinds[at] == kinds[at % p] for at in range(len(kinds))))


def with_layers(config: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the same config with other layers."""
    if isinstance(config.get("text_config"), dict):  # the language tower of a vision-language model
        return config | {"text_config": with_layers(config["text_config"], kinds)}
    short = dict(config, num_hidden_layers=len(kinds))
    for key in ("layer_types", "layers_block_type"):
        if config.get(key):
            short[key] = [kind.split(" ")[0] for kind in kinds]
    if config.get("mlp_layer_types"):
        short["mlp_layer_types"] = ["dense" if " dense" in kind else "sparse" for kind in kinds]
    if config.get("mlp_only_layers"):
        short["mlp_only_layers"] = [at for at, kind in enumerate(kinds) if " dense" in kind]
    if config.get("no_rope_layers"):
        short["no_rope_layers"] = [int(" unrotated" not in kind) for kind in kinds]
    return short


def stands_for(short: dict[str, Any], whole: dict[str, Any], kinds: Sequence[str], kept: Sequence[int]) -> bool:
    """Returns whether layers of one kind are alike in the model, each with weights of its own, and whether a shortened
    config has exactly the kept layers: some configs have patterns of layers that this module does not know."""
    if short == whole:
        return True
    layers = layer_shapes(json.dumps(whole, sort_keys=True))
    if layers is None or len(set(zip(kinds, layers, strict=True))) > len(set(kinds)):
        return False
    try:
        return layer_shapes(json.dumps(short, sort_keys=True)) == tuple(layers[at] for at in kept)
    except ModelError:  # a list in the config has as many entries as the model has layers
        return False


_PLAIN, _WHOLE, _TAPPED, _UNUSED = "layer", "whole", "tapped", "unused"
"""`whole`: attends to the whole image while others attend to windows; `tapped`: its output is read by more than the
next layer; `unused`: no image reaches it."""


def tower_kinds(config: PretrainedConfig) -> list[str]:
    """Returns what distinguishes the layers of the vision tower from one another; empty for a language model."""
    if vision_forward_of(config) is None:
        return []
    vision = config.vision_config
    depth = getattr(vision, _depth_key(vision))
    whole = set(getattr(vision, "fullatt_block_indexes", None) or ())
    tapped = set(getattr(vision, "deepstack_visual_indexes", None) or ())
    ends = _features(config, depth) or [depth]
    tapped |= {end - 1 for end in ends[:-1]}
    kinds = [_TAPPED if at in tapped else _WHOLE if at in whole else _PLAIN for at in range(ends[-1])]
    return kinds + [_UNUSED] * (depth - ends[-1])


def tower_cuts(kinds: Sequence[str]) -> Iterator[tuple[tuple[LayerRun, ...], list[str]]]:
    """Yields runs of layers with the kinds of the rehearsed ones: the fewest layers first, all of them last."""
    middle = kinds[1:-1]
    # if one kernel handles pieces of any length, plain and whole layers differ only in size
    if LayerRun(len(kinds)).missing and set(middle) == {_PLAIN, _WHOLE}:
        like = tuple(int(kind != middle[0]) for kind in middle)
        yield (LayerRun(len(kinds), like=like),), [kinds[0], middle[0], middle[like.index(1)], kinds[-1]]
    runs = [(kind, LayerRun(len(list(same)))) for kind, same in groupby(kinds)]
    yield tuple(run for _, run in runs), [kind for kind, run in runs for _ in range(run.rehearsed)]
    yield tuple(LayerRun(1) for _ in kinds), list(kinds)


def with_tower_layers(values: dict[str, Any], config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns `values` of `config` with other layers in the tower."""
    vision = config.vision_config
    if kinds == tower_kinds(config):
        return values
    short = dict(values["vision_config"]) | {_depth_key(vision): len(kinds)}
    for key, kind in (("fullatt_block_indexes", _WHOLE), ("deepstack_visual_indexes", _TAPPED)):
        if hasattr(vision, key):
            short[key] = [at for at, found in enumerate(kinds) if found == kind]
    found = values | {"vision_config": short}
    old_depth = getattr(vision, _depth_key(vision))
    if old := _features(config, old_depth):
        tapped = [at + 1 for at, kind in enumerate(kinds) if kind == _TAPPED]
        new = [0] * (old[0] == 0) + tapped + [sum(kind != _UNUSED for kind in kinds)]
        asked, moved = config.vision_feature_layer, dict(zip(old, new, strict=True))
        layers = [moved[layer % (old_depth + 1)] for layer in ([asked] if isinstance(asked, int) else asked)]
        found["vision_feature_layer"] = layers[0] if isinstance(asked, int) else layers
    return found


def _features(config: PretrainedConfig, depth: int) -> list[int]:
    """Returns after how many layers features are taken, in order; empty if they come from the whole tower."""
    asked = getattr(config, "vision_feature_layer", None)
    if asked is None:
        return []
    return sorted({layer % (depth + 1) for layer in ([asked] if isinstance(asked, int) else asked)})


def _depth_key(vision: PretrainedConfig) -> str:
    return "depth" if hasattr(vision, "depth") else "num_hidden_layers"


# A custom model's file does not say which of its layers are alike. Layers count as alike if they have the same class
# and tensors, are in one list and are treated alike; for every model it is verified once that a few of them give the
# same trace as all of them. The chosen candidate is always rehearsed in full.

_KINDS: dict[str, tuple[tuple[str, ...], ...]] = {}
_PROVED: dict[str, bool] = {}
"""Whether a few layers represent all, by config and tuning, for the lifetime of the process."""


def _rehearse_custom(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal:
    """Like `rehearse`; a quick rehearsal executes only a few layers if they are proved to represent all."""
    key = _key(cfg)
    if not cfg.is_quick or _PROVED.get(key) is False:
        return _executed(cfg, memo)
    if key in _PROVED:
        return _stretched(cfg, memo) or _executed(cfg, memo)
    whole, few = _executed(cfg, memo), _stretched(cfg, memo)
    _PROVED[key] = (
        few is not None  # memory to the byte, work to the operation
        and total_flops(whole.trace) == total_flops(few.trace)
        and whole.trace.num_operations() == few.trace.num_operations()
        and len(whole.trace.events) == len(few.trace.events)
        and replay(whole.trace.stream()) == replay(few.trace.stream())
    )
    return whole


def _key(cfg: StepConfig) -> str:
    return repr((cfg.config, cfg.tuning, cfg.device, cfg.capability, cfg.precision))


def _stretched(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal | None:
    """Returns None if all layers must be executed."""
    stacks: list[tuple[LayerRun, ...]] = []
    before = recompute = 0
    for kinds in _kinds(cfg):
        again = [before + at < cfg.levers.recompute for at in range(len(kinds))]
        sizes = [len(list(same)) for _, same in groupby(zip(kinds, again, strict=True))]
        # code may keep the output of the layer before the last one
        stacks.append(tuple(LayerRun(part) for size in sizes for part in (1, size - 1) if part))
        recompute += sum(again[at] for at in _kept(stacks[-1]))
        before += len(kinds)
    if not any(run.missing for runs in stacks for run in runs):
        return None
    short = replace(cfg, levers=replace(cfg.levers, recompute=recompute))
    kept = [_kept(runs) for runs in stacks]
    key = f"{kept} {short!r}"
    try:
        if key not in memo:
            memo[key] = rehearse(short, adjust=partial(_keep, kept))
        found = memo[key]
        trace = extrapolate(found.trace, *stacks)
    except (LayersDiffer, ModelError):  # code may rely on all of its layers
        return None
    return None if found.unreached or any(find_inconsistencies(trace)) else replace(found, trace=trace)


def _kinds(cfg: StepConfig) -> tuple[tuple[str, ...], ...]:
    """Returns for each list of layers what distinguishes them from one another."""

    def kind(layer: nn.Module) -> str:
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        return repr((type(layer), [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors]))

    key = _key(cfg)
    if key not in _KINDS:
        own = custom_family_of(build_on_meta(cfg, device_kernels(cfg.device, cfg.capability, cfg.precision)))
        assert own is not None
        lists = _lists(own.module)
        _KINDS[key] = tuple(tuple(kind(own.module.get_submodule(name)) for name in names) for names in lists)
    return _KINDS[key]


def _lists(module: nn.Module) -> list[list[str]]:
    """Returns the names of layers, by the list that holds them; nothing if a layer is in no list or a list has other
    members."""
    named: Sequence[str] = getattr(module, "layers", None) or ()
    found = [(parent, list(names)) for parent, names in groupby(named, key=lambda name: name.rpartition(".")[0])]
    is_whole = all(
        isinstance(layers := module.get_submodule(parent), nn.ModuleList)
        and names == [f"{parent}.{at}" for at in range(len(layers))]
        for parent, names in found
    )
    is_plain = not isinstance(getattr(type(module), "layers", None), property)
    return [names for _, names in found] if is_whole and is_plain else []


def _keep(kept: Sequence[Sequence[int]], model: nn.Module) -> None:
    """Removes all but the kept layers from their lists."""
    own = custom_family_of(model)
    assert own is not None
    left: list[str] = []
    for names, stay in zip(_lists(own.module), kept, strict=True):
        parent = names[0].rpartition(".")[0]
        layers = own.module.get_submodule(parent)
        assert isinstance(layers, nn.ModuleList)
        for at in reversed(range(len(names))):
            if at not in stay:
                del layers[at]
        left += [f"{parent}.{at}" for at in range(len(stay))]
    own.module.layers = tuple(left)  # type: ignore[assignment]
