"""Where the layers of a model lie that is larger than one card: whole layers, card after card, in equal shares (accelerate's own arithmetic).
Nothing is ever left on the host or on disk: it would answer a hundred times slower, or with weights that are not there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import CustomDtype, get_balanced_memory
from torch import nn
from transformers import AutoConfig

from finefit.errors import ModelError
from finefit.model.sight import auto_class, sight_in, tower_of

_PACKED: dict[int, Any] = {4: CustomDtype.INT4, 8: torch.int8}


def spread(folder: Path, *, dtype: torch.dtype, bits: int | None, free: Mapping[int, int]) -> dict[str, int]:
    """The card of every module by its number. `free`: bytes of each card."""
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = auto_class(config).from_config(config, dtype=dtype)
    model.tie_weights()
    sizes: dict[str, Any] = {
        "dtype": _PACKED[bits] if bits else dtype,
        "special_dtypes": dict.fromkeys(_unpacked(model), dtype) if bits else {},
    }
    whole: Any = list(model._no_split_modules or ())
    balanced = get_balanced_memory(model, max_memory=dict(free), no_split_module_classes=whole, **sizes)
    cards = {card: room for card, room in balanced.items() if card in free}
    places = infer_auto_device_map(model, max_memory=cards, no_split_module_classes=whole, **sizes)
    if left := sorted(name for name, place in places.items() if place not in free):
        given = ", ".join(f"{room / 2**30:.1f} GiB" for room in free.values())
        raise ModelError(
            f"{folder.name} does not fit on {len(free)} cards with {given} free: {', '.join(left[:3])} would be left over",
            "free the cards, take more of them, or load the weights in 4 bits",
        )
    return {name: int(place) for name, place in places.items()}


def _unpacked(model: nn.Module) -> list[str]:
    """Tensors that keep their precision: all but the linear layers' of the language tower, and the head."""
    head, sight = model.get_output_embeddings(), sight_in(model)  # type: ignore[operator]
    linear = (
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    )
    packed = {id(module.weight) for name, module in linear if sight is None or tower_of(sight, name) == "language"}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in packed]
