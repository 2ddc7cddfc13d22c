"""Whether two configs say the same of how a model computes, whatever each of them leaves to its class."""

from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from finefit.errors import ModelError

_ASIDE = frozenset(
    {
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "use_cache",
            "initializer_range",
            "attention_dropout",
            "pretraining_tp",
        ),
        *("max_window_layers", "rope_parameters.type"),  # said again by layer_types and by rope_parameters.rope_type
    }
)
"""What a class declares and its answers do not follow from."""


def differing(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By key, with dots where it lies deeper, what each of two config.json has of what decides a model's answers."""
    if base.get("model_type") != other.get("model_type"):
        return {"model_type": (base.get("model_type"), other.get("model_type"))}
    one, two = _deciding(base), _deciding(other)
    return {
        key: (one.get(key), two.get(key)) for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)
    }


def require_alike(expert: str, base: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if found := differing(base, other):
        told = ", ".join(
            f"{key} {brief(theirs)} where the base has {brief(ours)}" for key, (ours, theirs) in found.items()
        )
        raise ModelError(
            f"expert {expert} computes otherwise than the base: its config.json has {told}", "train it from this base"
        )


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """With all that the config leaves to the defaults of its class, if transformers knows that. Not what any model at all has by default."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(config)
    try:
        found = AutoConfig.for_model(**config).to_dict()
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the config.json of a {kind} cannot be read: {reason}", "take the config.json of the published model"
        ) from None
    common = PreTrainedConfig().to_dict()
    return {key: value for key, value in found.items() if key not in common or value != common[key]} | {
        "model_type": kind
    }


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that no class declares are read by none."""
    kind, found = config.get("model_type"), resolved(config)
    if kind in CONFIG_MAPPING:
        declared = AutoConfig.for_model(kind).to_dict().keys() - PreTrainedConfig().to_dict().keys()
        found = {key: value for key, value in found.items() if key in declared}
    return {key: value for key, value in _flat(found).items() if key not in _ASIDE}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            {f"{key}.{name}": inner for name, inner in _flat(value).items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
    return found
