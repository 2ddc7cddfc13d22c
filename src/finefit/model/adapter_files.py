"""The files of an adapter that training goes on from: named by content, and held against what the spec asks for before a weight is loaded."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from finefit.errors import ModelError
from finefit.spec.models import Lora

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
}
"""What finefit's own adapters have of the settings that a spec has no word for; an adapter that has more would lose it."""


def adapter_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        digest.update(hashlib.sha256(_bytes(folder, file)).digest())
    return digest.hexdigest()


def require_agreement(folder: Path, tuning: Lora, *, model: str) -> None:
    """`model`: the base model's name. Which layers it adapts is seen by its tensors, once the model is there."""
    try:
        config = json.loads(_bytes(folder, CONFIG))
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG} is no JSON: {error}", "name another adapter in tuning.adapter") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder.name} holds no LoRA adapter", "name another one in tuning.adapter")
    if differing := list(_differences(config, tuning, model)):
        raise ModelError(
            f"the adapter in {folder.name} is not the one that the spec describes: " + "; ".join(differing),
            "write its own values into the spec, or name another adapter in tuning.adapter",
        )


def _differences(config: dict[str, Any], tuning: Lora, model: str) -> Iterator[str]:
    for key, theirs, ours in (
        ("tuning.rank", config.get("r"), tuning.rank),
        ("tuning.alpha", config.get("lora_alpha"), tuning.alpha),
        ("tuning.rank_stabilised", bool(config.get("use_rslora")), tuning.rank_stabilised),
        ("tuning.dora", bool(config.get("use_dora")), tuning.dora),
    ):
        if theirs != ours:
            yield f"{key} is {ours}, the adapter has {theirs}"
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            yield f"the adapter has {key} {config[key]}, which finefit does not train"
    base = config.get("base_model_name_or_path")
    if base and _last(base) and _last(model) and _last(base) != _last(model):
        yield f"the model is {model}, the adapter was made for {base}"


def _last(name: str) -> str:
    """Of a path or a hub id: the same model lies in many places. A path may end in none, as `..` does."""
    return PurePosixPath(name).name.strip(".")


def _bytes(folder: Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"{folder / file} cannot be read: {reason}", f"name a folder with {CONFIG} and {WEIGHTS}"
        ) from None
