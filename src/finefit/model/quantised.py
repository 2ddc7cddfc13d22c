"""Reads the `quantization_config` of a model whose weights are stored packed. Adapters can be trained on bitsandbytes
weights as they are; every other method is refused by name, here and nowhere else."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from finefit.errors import ModelError
from finefit.facts.files import RESTORE
from finefit.spec.models import Lora, Tuning

_KEYS = ("quantization_config", "compression_config")
_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "compressed-tensors": "compressed-tensors",
}
_UNPACKED = "name the model that it was quantised from"
_NUMBERED = re.compile(r"(^|\.)layers\.\d+(\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """How bitsandbytes stored the weights."""

    bits: Literal[4, 8]
    kind: str
    """nf4, fp4 or int8."""
    is_nested: bool
    """Whether the scales are quantised as well."""
    skipped: tuple[str, ...] | None
    """Modules that are not packed; None: the head."""

    @property
    def names_layers(self) -> bool:
        """Whether single layers are left out by number, so that layers of one kind differ."""
        return any(_NUMBERED.search(name) for name in self.skipped or ())


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Finds the setting where transformers would: in config.json or, for a vision-language model, perhaps in its
    text_config."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, dict) else {}):
        for key in _KEYS:
            if (found := values.get(key)) is not None:
                if not isinstance(found, dict):
                    problem = f"the model's config has a {key} that is a {type(found).__name__}, not an object"
                    raise ModelError(problem, RESTORE)
                return found
    return None


def packed_weights(config: Mapping[str, Any]) -> PackedWeights | None:
    """`config` is the content of a config.json. None for plain weights; raises for weights that cannot be trained
    on."""
    found = quantization_of(config)
    if found is None:
        return None
    bits: Literal[4, 8] | None = 4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else None
    if bits is None:
        method = str(found.get("quant_method", "of an unknown method"))
        problem = f"the model's weights are quantised ({_NAMES.get(method, method)}) by its quantization_config"
        why = "finefit trains on plain weights and on those of bitsandbytes"
        raise ModelError(f"{problem}, and {why}", f"{_UNPACKED}; tuning.base_bits: 4 loads that one in 4 bits")
    storage = str(found.get("bnb_4bit_quant_storage") or "uint8")
    if bits == 4 and storage != "uint8":
        problem = f"the model's 4-bit weights are stored as {storage}, and finefit reads those stored as uint8"
        raise ModelError(problem, f"{_UNPACKED}; tuning.base_bits: 4 loads that one in 4 bits")
    skipped = found.get("llm_int8_skip_modules")
    if skipped is not None and not (isinstance(skipped, list) and all(isinstance(name, str) for name in skipped)):
        problem = f"the model's quantization_config has llm_int8_skip_modules {skipped!r}, not a list of names"
        raise ModelError(problem, RESTORE)
    return PackedWeights(
        bits=bits,
        kind="int8" if bits == 8 else str(found.get("bnb_4bit_quant_type", "fp4")),
        is_nested=bits == 4 and bool(found.get("bnb_4bit_use_double_quant")),
        skipped=None if skipped is None else tuple(skipped),
    )


def require_trainable(packed: PackedWeights | None, tuning: Tuning) -> None:
    """The spec must state the bits of stored weights, so that every rule for a quantised base applies to them too."""
    if packed is None:
        return
    what = f"the model's weights are stored in {packed.bits} bits (bitsandbytes {packed.kind})"
    if not isinstance(tuning, Lora):
        problem = f"{what}, which no step can change: tuning.kind {tuning.kind} cannot train them"
        raise ModelError(problem, f"set tuning: {{kind: lora, base_bits: {packed.bits}}}, or {_UNPACKED}")
    if tuning.base_bits != packed.bits:
        given = "is not set" if tuning.base_bits is None else f"is {tuning.base_bits}"
        problem = f"{what}, and tuning.base_bits {given}"
        raise ModelError(problem, f"--set tuning.base_bits={packed.bits} trains on them as they are; or {_UNPACKED}")


def packed_layers(model: PreTrainedModel, packed: PackedWeights) -> dict[str, nn.Linear]:
    """The linear layers that transformers replaces by packed ones."""
    skipped = None if packed.skipped is None else list(packed.skipped)
    kept = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    linear = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
    return {name: module for name, module in linear if should_convert_module(name, kept)}
