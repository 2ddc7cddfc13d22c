"""Which layers of a vision tower are alike, and the tower with a few of them."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from transformers import PretrainedConfig

from finefit.model.sight import sight_of
from finefit.rehearse.splice import REHEARSED, Run

_PLAIN, _WHOLE, _TAPPED, _UNUSED = "layer", "whole", "tapped", "unused"
"""`whole`: looks at all of an image where others look at windows; `tapped`: read by more than the layer behind it; `unused`: no image passes."""


def tower_kinds(config: PretrainedConfig) -> list[str]:
    """What distinguishes one layer from another, as far as the config says it; nothing for a model that sees nothing."""
    if sight_of(config) is None:
        return []
    vision = config.vision_config
    depth = getattr(vision, _depth_key(vision))
    whole, tapped = (
        set(getattr(vision, "fullatt_block_indexes", None) or ()),
        set(getattr(vision, "deepstack_visual_indexes", None) or ()),
    )
    ends = _features(config, depth) or [depth]
    tapped |= {end - 1 for end in ends[:-1]}
    kinds = [_TAPPED if at in tapped else _WHOLE if at in whole else _PLAIN for at in range(ends[-1])]
    return kinds + [_UNUSED] * (depth - ends[-1])


def tower_cuts(kinds: Sequence[str]) -> Iterator[tuple[tuple[Run, ...], list[str]]]:
    """Runs of layers with the kinds of those to be rehearsed, the fewest first; all of them last."""
    middle = kinds[1:-1]
    if len(kinds) > REHEARSED and set(middle) == {
        _PLAIN,
        _WHOLE,
    }:  # where one kernel takes pieces of any length, layers differ in sizes alone
        like = tuple(int(kind != middle[0]) for kind in middle)
        yield (Run(len(kinds), like=like),), [kinds[0], middle[0], middle[like.index(1)], kinds[-1]]
    runs = [(kind, Run(len(list(same)))) for kind, same in groupby(kinds)]
    yield tuple(run for _, run in runs), [kind for kind, run in runs for _ in range(run.rehearsed)]
    yield tuple(Run(1) for _ in kinds), list(kinds)


def cut_tower(values: dict[str, Any], config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
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
    old = _features(config, getattr(config.vision_config, _depth_key(config.vision_config)))
    if not old:
        return {}
    behind = (
        [0] * (old[0] == 0)
        + [at + 1 for at, kind in enumerate(kinds) if kind == _TAPPED]
        + [sum(kind != _UNUSED for kind in kinds)]
    )
    asked, moved = config.vision_feature_layer, dict(zip(old, behind, strict=True))
    depth = getattr(config.vision_config, _depth_key(config.vision_config))
    return {
        "vision_feature_layer": moved[asked % (depth + 1)]
        if isinstance(asked, int)
        else [moved[layer % (depth + 1)] for layer in asked]
    }


def _features(config: PretrainedConfig, depth: int) -> list[int]:
    """Behind how many layers features are taken, in order; none where that is the whole tower's matter."""
    asked = getattr(config, "vision_feature_layer", None)
    if asked is None:
        return []
    return sorted({layer % (depth + 1) for layer in ([asked] if isinstance(asked, int) else asked)})


def _depth_key(vision: PretrainedConfig) -> str:
    return "depth" if hasattr(vision, "depth") else "num_hidden_layers"
