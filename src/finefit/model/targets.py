"""The linear layers of a transformers model, and those among them that cannot carry an adapter: `all-linear` leaves
these out, and the plan names them."""

import peft
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finefit.errors import ModelError
from finefit.model.experts import is_router, placeholder_experts
from finefit.model.reach import idle_layers
from finefit.spec.models import Layers
from finefit.vision import is_inside, vision_forward_in

_ROUTER = "a router answers with a choice of experts"
_FUSED = "a kernel reads the weights of these state-space layers and would ignore adapters"
_TAKEN = "peft takes these names for those of the experts"
_OTHERS = "a block that several layers share holds one of these for each of them"
_IDLE = "no text passes these layers, so their adapters would get no gradient"
_LISTED = "_adapter_list"
"""The end of the names of Zamba 2's low-rank layers in a shared block."""
_STATE_SPACE = ("A_log", "D")
"""Parameters of a state-space mixer; its input projection alone is called as a layer."""
_CALLED = "in_proj"


def linear_layers(model: PreTrainedModel) -> set[str]:
    """All linear layers except the head and placeholders that only the architecture requires."""
    head, excluded = model.get_output_embeddings(), placeholder_experts(model)
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not is_inside(name, excluded)
    }


def unadaptable(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers that cannot carry an adapter, with the reason."""
    modules, linear = dict(model.named_modules()), linear_layers(model)
    taken = {last for last in set(map(_last, linear)) if _is_taken(model, last)}
    found: dict[str, str] = {}
    for name in sorted(linear):
        mixer = modules[name.rpartition(".")[0]]
        if is_router(modules[name]):
            found[name] = _ROUTER
        elif _last(name) != _CALLED and all(hasattr(mixer, key) for key in _STATE_SPACE):
            found[name] = _FUSED
        elif any(part.endswith(_LISTED) for part in name.split(".")):
            found[name] = _OTHERS
        elif _last(name) in taken:
            found[name] = _TAKEN
    return found


def left_out(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers that `all-linear` does not adapt, with the reason: beside those that cannot carry an adapter, those
    that no text passes. A vision-language model is told by its family which layers its rows reach."""
    idle = frozenset[str]() if vision_forward_in(model) is not None else idle_layers(model)
    return dict.fromkeys(sorted(linear_layers(model) & idle), _IDLE) | unadaptable(model)


def _is_taken(model: PreTrainedModel, last: str) -> bool:
    """Whether peft would adapt experts instead of layers with this name, because checkpoints of transformers 4 used it
    so."""
    config = peft.LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # several names together stand for one tensor of experts
        return True
    return set(config.target_modules) != {last}


def refuse_unadaptable(model: PreTrainedModel, targets: Layers) -> None:
    """Raises if targets name layers that cannot carry an adapter."""
    if targets == "all-linear":
        return
    found = unadaptable(model)
    for target in targets:
        if reason := next((why for name, why in found.items() if f".{name}".endswith(f".{target}")), None):
            able = ", ".join(sorted(set(map(_last, linear_layers(model) - found.keys())))) or "none"
            problem = f"tuning.targets: {target} of {type(model).__name__} cannot carry an adapter: {reason}"
            raise ModelError(problem, f"leave it out; the linear layers that can are {able}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
