"""Parts of a vision tower that no image ever passes through: features are taken before them. They get no gradient, so none of them is trained."""

from collections.abc import Iterator

from torch import nn

from finefit.model.sight.sight import Sight

_LAYERS, _NORM, _POOLING = "encoder.layers", "post_layernorm", "head"


def unused_in(causal: nn.Module, sight: Sight) -> tuple[str, ...]:
    """Dotted names of modules below the whole model."""
    return tuple(name for tower in sight.towers["vision"] for name in _unused(causal, tower))


def _unused(causal: nn.Module, tower: str) -> Iterator[str]:
    """LLaVA takes the features behind one layer or several and leaves out what follows; nobody asks SigLIP for one vector of a whole image."""
    parts = dict(causal.get_submodule(tower).named_modules())
    features = getattr(causal.config, "vision_feature_layer", None)
    if features is not None and _LAYERS in parts:
        depth = len(list(parts[_LAYERS].children()))
        last = max(layer % (depth + 1) for layer in ([features] if isinstance(features, int) else features))
        yield from (f"{tower}.{_LAYERS}.{number}" for number in range(last, depth))
        yield f"{tower}.{_NORM}"
    if _POOLING in parts:
        yield f"{tower}.{_POOLING}"


def is_among(name: str, modules: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
