"""Why a trained tensor gets no gradient, as far as a rehearsal can tell.

On the path from the model down to the tensor, the first module that was called without gradients is where they end.
Where there is none, the tensor's own module was never called, or its output was never used.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.forecasts import grouped_names
from finefit.model.adapter import REFERENCE
from finefit.vision import tower_in

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called themselves."""

_NO_INPUT = "gets no input (a tower that the batch does not use); feed it, or leave it out of tuning.targets"
_NO_IMAGE = (
    "no row has an image; give rows with images, or train the language tower alone "
    "(tuning.targets without towers, or tuning: {kind: subset, trainable: [language]})"
)
_ADAPTER_IS_OFF = "is called without its adapter, which gets no input; unmerge the adapter, or make it the active one"
_NO_GRAD = "is computed under no_grad; remove it from the forward that makes the call, or do not train these layers"
_REENTRANT = (
    "re-entrant checkpointing passes no gradient to layers whose input requires none; use non-reentrant checkpointing "
    "or enable_input_require_grads()"
)
_NO_GRAD_OR_REENTRANT = f"{_NO_GRAD}; if it is checkpointed: {_REENTRANT}"
_UNUSED = "its output does not reach the loss: it is dropped, detached, or used only where gradients are off"


def explain(
    model: nn.Module, unreached: Sequence[str], entered: Mapping[str, bool], *, shows_images: bool = True
) -> tuple[str, ...]:
    """`entered`: the modules that were called, in the order of their first calls, and whether with gradients enabled in
    any call. `shows_images`: whether any row does."""
    modules = dict(model.named_modules())
    places: dict[str, list[str]] = {}  # by cause
    for name in unreached:
        if not shows_images and tower_in(model, name) in ("vision", "projector"):
            places.setdefault(_NO_IMAGE, []).append(f"the tower {tower_in(model, name)}")
            continue
        around = [above for above in _path(name)[:-1] if not isinstance(modules[above], _CONTAINERS)]
        sentence, place = _cause(around[-1], modules, entered)
        places.setdefault(sentence, []).append(place or "the model")
    return tuple(f"{', '.join(grouped_names(found))}: {sentence}" for sentence, found in places.items())


def frozen_adapters(model: nn.Module) -> tuple[str, ...]:
    """Adapter tensors that were attached and then frozen, so that no list of unreached tensors names them. The frozen
    copy for a DPO reference is left out."""
    found = (name for name, p in model.named_parameters() if "lora_" in name and not p.requires_grad)
    return tuple(grouped_names(name for name in found if f".{REFERENCE}" not in name))


def _cause(owner: str, modules: Mapping[str, nn.Module], entered: Mapping[str, bool]) -> tuple[str, str]:
    """What is wrong, and with which module."""
    path = _path(owner)
    blind = next((at for at, above in enumerate(path) if entered.get(above) is False), None)
    if owner not in entered and blind is None:
        alive = [f"{called}." for called in entered]
        silent = next((above for above in path[1:] if not any(name.startswith(f"{above}.") for name in alive)), owner)
        base, adapter, _ = silent.partition(".lora_")
        return (_ADAPTER_IS_OFF, base) if adapter else (_NO_INPUT, silent)
    if blind is None:
        return _UNUSED, owner.partition(".lora_")[0]
    callers = [at for at in range(blind) if path[at] in entered]
    if any(_is_reentrant(modules[above]) for above in path[callers[-1] if callers else 0 : blind + 1]):
        return _REENTRANT, path[blind]
    is_plain = not callers or _follows_a_trained_one(path[blind], modules, entered)
    return _NO_GRAD if is_plain else _NO_GRAD_OR_REENTRANT, path[blind]


def _is_reentrant(module: nn.Module) -> bool:
    """Whether it checkpoints what it calls, or itself, re-entrantly."""
    is_on = getattr(module, "gradient_checkpointing", False)
    inner = is_on and _checkpoints_reentrantly(getattr(module, "_gradient_checkpointing_func", None))
    return inner or _checkpoints_reentrantly(module.forward)


def _checkpoints_reentrantly(function: Any) -> bool:
    given: dict[str, Any] = {}
    while isinstance(function, partial):
        given, function = {**function.keywords, **given}, function.func
    return function is checkpoint and given.get("use_reentrant") in (True, None)


def _follows_a_trained_one(name: str, modules: Mapping[str, nn.Module], entered: Mapping[str, bool]) -> bool:
    """Then its input most likely requires gradients, and no kind of checkpointing stops them."""
    before = takewhile(lambda called: called != name, entered)
    return any(
        entered[called] and any(p.requires_grad for p in modules[called].parameters(recurse=False)) for called in before
    )


def _path(name: str) -> list[str]:
    """From the model, whose name is empty, to the module itself."""
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
