"""Which layers of a model are alike, and a rehearsal of the whole depth at the price of a few layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from transformers import PretrainedConfig

from finefit.errors import ModelError
from finefit.model.resolve_model import custom_source_in
from finefit.rehearse.custom import rehearse_custom
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.layer_extrapolation import (
    REHEARSED_PERIODS,
    LayerRun,
    LayersDiffer,
    extrapolate,
    find_inconsistencies,
)
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.rehearse.step_config import StepConfig
from finefit.spec.models import Full, Layers, Lora, Subset, Tuning
from finefit.vision import vision_forward_of


def rehearse_extrapolated(cfg: StepConfig, memo: dict[str, Rehearsal] | None = None) -> Rehearsal:
    """Like `rehearse`, but executes only layers that differ, or all of them where layers do not repeat or a
    gradient is missing.

    `memo` keeps what was executed: another number of recomputed layers needs the same few. In the result, layers of a
    vision tower belong to no layer, since levers do not count them."""
    memo = {} if memo is None else memo
    if custom_source_in(cfg.config) is not None:
        return rehearse_custom(cfg, memo)
    config = read_config(cfg.config)
    kinds = layer_kinds(config)
    if not kinds or cfg.levers.recompute > len(kinds):
        problem = f"levers.recompute is {cfg.levers.recompute}, but the model has {len(kinds)} layers"
        raise ModelError(problem, "lower it, or set it to `all`")
    found = None if names_layers(cfg.tuning) else _extrapolated(cfg, config, kinds, memo)
    found = found or _executed(cfg, memo)
    return replace(found, trace=found.trace.beyond(len(kinds))) if tower_kinds(config) else found


def _extrapolated(
    cfg: StepConfig, config: PretrainedConfig, kinds: Sequence[str], memo: dict[str, Rehearsal]
) -> Rehearsal | None:
    """None where all layers have to be executed."""
    deepstack = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    runs = layer_runs(kinds, cfg.levers.recompute, lead=len(deepstack))
    kept: list[int] = []  # the first layers of each run: whole periods are left out, so the kinds stay in step
    start = 0
    for run in runs:
        kept += range(start, start + run.rehearsed)
        start += run.num_layers
    levers = replace(cfg.levers, recompute=sum(layer < cfg.levers.recompute for layer in kept))
    language = with_layers(cfg.config, [kinds[layer] for layer in kept])
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


def _executed(cfg: StepConfig, memo: dict[str, Rehearsal]) -> Rehearsal:
    if repr(cfg) not in memo:
        memo[repr(cfg)] = rehearse(cfg)
    return memo[repr(cfg)]


def names_layers(tuning: Tuning) -> bool:
    """Whether single layers are trained by their number, so that layers of one kind may differ."""
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
    """What distinguishes one layer from another, according to the config."""
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ["layer"] * text.num_hidden_layers)
    dense, every = set(getattr(text, "mlp_only_layers", None) or ()), getattr(text, "decoder_sparse_step", 1) or 1
    first_dense = getattr(text, "first_k_dense_replace", 0) or 0
    is_dense = [at in dense or (at + 1) % every != 0 or at < first_dense for at in range(len(kinds))]
    rotates = list(getattr(text, "no_rope_layers", None) or [1] * len(kinds))  # 0: a layer without rotary embedding
    found = zip(kinds, is_dense, rotates, strict=True)
    return [kind + " dense" * dense + " unrotated" * (not rotated) for kind, dense, rotated in found]


def layer_runs(kinds: Sequence[str], recompute: int, lead: int = 0) -> tuple[LayerRun, ...]:
    """The recomputed layers and the kept ones, each with the period in which its kinds repeat. The first `lead` layers
    stand for themselves: they also receive features of deeper and deeper vision layers (deepstack)."""
    period = period_of(kinds)
    borders = sorted({0, recompute, min(lead, len(kinds)), len(kinds)})
    return tuple(LayerRun(end - start, period if start >= lead else end - start) for start, end in pairwise(borders))


def period_of(kinds: Sequence[str]) -> int:
    """The number of layers after which the kinds repeat."""
    return next(p for p in range(1, len(kinds) + 1) if all(kinds[at] == kinds[at % p] for at in range(len(kinds))))


def with_layers(config: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The same config with other layers."""
    if isinstance(config.get("text_config"), dict):  # the language tower of a vision-language model
        return config | {"text_config": with_layers(config["text_config"], kinds)}
    short = dict(config, num_hidden_layers=len(kinds))
    if config.get("layer_types"):
        short["layer_types"] = [kind.split(" ")[0] for kind in kinds]
    if config.get("mlp_only_layers"):
        short["mlp_only_layers"] = [at for at, kind in enumerate(kinds) if " dense" in kind]
    if config.get("no_rope_layers"):
        short["no_rope_layers"] = [int(" unrotated" not in kind) for kind in kinds]
    return short


_PLAIN, _WHOLE, _TAPPED, _UNUSED = "layer", "whole", "tapped", "unused"
"""`whole`: attends to the whole image where others attend to windows; `tapped`: its output is read by more than the
next layer; `unused`: no image passes it."""


def tower_kinds(config: PretrainedConfig) -> list[str]:
    """What distinguishes one layer of the vision tower from another; empty for a language model."""
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
    """Runs of layers with the kinds of those to be rehearsed: the fewest first, all of them last."""
    middle = kinds[1:-1]
    # where one kernel takes pieces of any length, plain and whole layers differ only in sizes
    if len(kinds) > REHEARSED_PERIODS and set(middle) == {_PLAIN, _WHOLE}:
        like = tuple(int(kind != middle[0]) for kind in middle)
        yield (LayerRun(len(kinds), like=like),), [kinds[0], middle[0], middle[like.index(1)], kinds[-1]]
    runs = [(kind, LayerRun(len(list(same)))) for kind, same in groupby(kinds)]
    yield tuple(run for _, run in runs), [kind for kind, run in runs for _ in range(run.rehearsed)]
    yield tuple(LayerRun(1) for _ in kinds), list(kinds)


def with_tower_layers(values: dict[str, Any], config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """`values` of `config` with other layers in the tower."""
    vision, depth = config.vision_config, len(kinds)
    if kinds == tower_kinds(config):
        return values
    short = dict(values["vision_config"]) | {_depth_key(vision): depth}
    for key, kind in (("fullatt_block_indexes", _WHOLE), ("deepstack_visual_indexes", _TAPPED)):
        if hasattr(vision, key):
            short[key] = [at for at, found in enumerate(kinds) if found == kind]
    return values | {"vision_config": short} | _moved_features(config, kinds)


def _moved_features(config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
    depth = getattr(config.vision_config, _depth_key(config.vision_config))
    old = _features(config, depth)
    if not old:
        return {}
    tapped = [at + 1 for at, kind in enumerate(kinds) if kind == _TAPPED]
    new = [0] * (old[0] == 0) + tapped + [sum(kind != _UNUSED for kind in kinds)]
    asked, moved = config.vision_feature_layer, dict(zip(old, new, strict=True))
    if isinstance(asked, int):
        return {"vision_feature_layer": moved[asked % (depth + 1)]}
    return {"vision_feature_layer": [moved[layer % (depth + 1)] for layer in asked]}


def _features(config: PretrainedConfig, depth: int) -> list[int]:
    """After how many layers features are taken, in order; empty where they come from the whole tower."""
    asked = getattr(config, "vision_feature_layer", None)
    if asked is None:
        return []
    return sorted({layer % (depth + 1) for layer in ([asked] if isinstance(asked, int) else asked)})


def _depth_key(vision: PretrainedConfig) -> str:
    return "depth" if hasattr(vision, "depth") else "num_hidden_layers"
