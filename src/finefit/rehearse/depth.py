"""A rehearsal of the whole depth at the price of a few layers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

from finefit.errors import ModelError
from finefit.model.custom_files import written_in
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.own_depth import rehearse_own
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.rehearse.splice import NotRegular, Run, check_whole, stretch
from finefit.rehearse.tower import cut_tower, tower_cuts, tower_kinds
from finefit.spec.models import Full, Layers, Lora, Subset, Tuning


def rehearse_depth(scene: Scene, memo: dict[str, Rehearsed] | None = None) -> Rehearsed:
    """As `rehearse`, but only as many layers as differ are executed; where layers do not repeat, or a gradient is missing, all of them are.

    `memo` keeps what was executed: another number of recomputed layers needs the same few. Layers of a vision tower are told apart while they are
    stretched; in what is answered they are of no layer, since levers do not count them."""
    memo = {} if memo is None else memo
    if written_in(scene.config) is not None:
        return rehearse_own(scene, memo)
    config = read_config(scene.config)
    kinds = layer_kinds(config)
    if not kinds or scene.levers.recompute > len(kinds):
        raise ModelError(
            f"levers.recompute is {scene.levers.recompute}, but the model has {len(kinds)} layers",
            "lower it, or say `all`",
        )
    found = None if names_layers(scene.tuning) else _stretched(scene, config, kinds, memo)
    found = found or _executed(scene, memo)
    return replace(found, trace=found.trace.beyond(len(kinds))) if tower_kinds(config) else found


def _stretched(
    scene: Scene, config: PretrainedConfig, kinds: Sequence[str], memo: dict[str, Rehearsed]
) -> Rehearsed | None:
    """None where all layers have to be executed."""
    runs = runs_of(kinds, scene.levers.recompute, lead_of(config))
    kept = _rehearsed_layers(runs)
    levers = replace(scene.levers, recompute=sum(layer < scene.levers.recompute for layer in kept))
    language = cut(scene.config, [kinds[layer] for layer in kept])
    for tower_runs, tower in tower_cuts(tower_kinds(config)):
        short = replace(scene, config=cut_tower(language, config, tower) if tower else language, levers=levers)
        found = _executed(short, memo)
        if short == scene:
            return found
        if found.unreached:
            return None
        try:
            trace = stretch(found.trace, runs, tower_runs)
        except NotRegular:
            continue
        if not any(check_whole(trace)):
            trace.host_bytes = found.trace.host_bytes * scene.levers.recompute // max(1, levers.recompute)
            return replace(found, trace=trace)
    return None


def _executed(scene: Scene, memo: dict[str, Rehearsed]) -> Rehearsed:
    if repr(scene) not in memo:
        memo[repr(scene)] = rehearse(scene)
    return memo[repr(scene)]


def names_layers(tuning: Tuning) -> bool:
    """Whether single layers are chosen by their number, so that layers of one kind need not be alike."""
    match tuning:
        case Full():
            return False
        case Subset():
            named: tuple[Layers, ...] = (tuning.trainable,)
        case Lora():
            named = tuple(tuning.targets.values()) if isinstance(tuning.targets, dict) else (tuning.targets,)
    return any(
        part.isdigit() for names in named if not isinstance(names, str) for name in names for part in name.split(".")
    )


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """What distinguishes one layer from another, as far as the config says it."""
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ["layer"] * text.num_hidden_layers)
    dense, every = set(getattr(text, "mlp_only_layers", None) or ()), getattr(text, "decoder_sparse_step", 1) or 1
    first_dense = getattr(text, "first_k_dense_replace", 0) or 0
    is_dense = [at in dense or (at + 1) % every != 0 or at < first_dense for at in range(len(kinds))]
    turned = list(
        getattr(text, "no_rope_layers", None) or [1] * len(kinds)
    )  # a layer without rotary embedding is marked by 0
    return [
        kind + " dense" * plain + " unturned" * (not turns)
        for kind, plain, turns in zip(kinds, is_dense, turned, strict=True)
    ]


def lead_of(config: PretrainedConfig) -> int:
    """How many layers at the beginning are given more than those behind them: features of deeper and deeper layers of the vision tower."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())


def runs_of(kinds: Sequence[str], recompute: int, lead: int = 0) -> tuple[Run, ...]:
    """The recomputed layers and the kept ones, each with the period in which its kinds repeat. `lead` layers at the beginning stand for
    themselves."""
    period = period_of(kinds)
    borders = sorted({0, recompute, min(lead, len(kinds)), len(kinds)})
    return tuple(Run(end - start, period if start >= lead else end - start) for start, end in pairwise(borders))


def period_of(kinds: Sequence[str]) -> int:
    """Layers after which the kinds repeat."""
    return next(p for p in range(1, len(kinds) + 1) if all(kinds[at] == kinds[at % p] for at in range(len(kinds))))


def _rehearsed_layers(runs: Sequence[Run]) -> list[int]:
    """Of each run the first ones: a whole number of periods is left out, so the kinds stay in step."""
    kept: list[int] = []
    start = 0
    for run in runs:
        kept += range(start, start + run.rehearsed)
        start += run.num_layers
    return kept


def cut(config: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The same config with other layers."""
    if isinstance(config.get("text_config"), dict):  # of a model that sees: its language tower's
        return config | {"text_config": cut(config["text_config"], kinds)}
    short = dict(config, num_hidden_layers=len(kinds))
    if config.get("layer_types"):
        short["layer_types"] = [kind.split(" ")[0] for kind in kinds]
    if config.get("mlp_only_layers"):
        short["mlp_only_layers"] = [at for at, kind in enumerate(kinds) if " dense" in kind]
    if config.get("no_rope_layers"):
        short["no_rope_layers"] = [int(" unturned" not in kind) for kind in kinds]
    return short
