"""Adapters on exactly the layers that were asked for: new ones, one that training goes on from, and the one that it started with."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finefit.errors import FinefitError, ModelError, SpecError
from finefit.model.adapter_files import WEIGHTS, require_agreement
from finefit.model.custom import adaptable_layers, own_of
from finefit.model.experts import stand_ins_in
from finefit.model.sight import sight_in, tower_of
from finefit.model.sight.unused import is_among, unused_in
from finefit.spec.models import Layers, Lora, Tower

TRAINED = "default"
"""As peft calls an adapter that has no name of its own; it is saved in the plain layout."""
REFERENCE = "reference"
_PREFIX = "base_model.model."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def attach(model: PreTrainedModel, tuning: Lora, *, name: str, base: Path | None) -> peft.PeftModel:
    """`base` is where the path of an adapter to go on from starts; None: one of its shape, whatever it holds."""
    chosen = _chosen(model, tuning)
    if tuning.dora and tuning.base_bits == 8 and model.device.type == "cpu":
        raise SpecError(
            "tuning.dora with tuning.base_bits 8 needs a CUDA device: on a CPU peft loses the scales of the packed weights",
            "set tuning.base_bits: 4, or tuning.dora: false",
        )
    try:
        adapted = peft.get_peft_model(
            model, _config(tuning, _shortest(chosen, model), task=None if own_of(model) else "CAUSAL_LM")
        )
    except ValueError as error:  # layers that peft knows of and cannot adapt
        raise ModelError(
            f"{type(model).__name__} cannot carry these adapters: {error}", "name others in tuning.targets"
        ) from error
    adapted.peft_config[TRAINED].base_model_name_or_path = name
    adapted.peft_config[TRAINED].inference_mode = False
    for parameter in _parameters_of(adapted, TRAINED).values():
        parameter.data = parameter.data.to(_DTYPES[tuning.weights])
    require_exact(adapted, chosen)
    if tuning.adapter is not None and base is not None:
        _go_on_from(adapted, base / tuning.adapter, tuning, name)
    return adapted


def _config(tuning: Lora, targets: list[str], *, task: str | None) -> peft.LoraConfig:
    """`task`: None for a model that need not be one of transformers'."""
    return peft.LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        target_modules=targets,
        use_rslora=tuning.rank_stabilised,
        use_dora=tuning.dora,
        task_type=task,
    )


# which layers


def resolve_targets(model: PreTrainedModel, tuning: Lora) -> list[str]:
    """Names of the modules that get an adapter, and of no others."""
    return _shortest(_chosen(model, tuning), model)


def _chosen(model: PreTrainedModel, tuning: Lora) -> set[str]:
    if (own := own_of(model)) is not None:
        return adaptable_layers(own, tuning)
    head, unmoved = model.get_output_embeddings(), stand_ins_in(model)
    modules = (
        (name, module) for name, module in model.named_modules() if module is not head and not is_among(name, unmoved)
    )
    linear = {name for name, module in modules if isinstance(module, nn.Linear | Conv1D)}
    if not linear:
        raise ModelError(
            f"{type(model).__name__} has no linear layer that could carry an adapter",
            "train it in full: `tuning: {kind: full}`",
        )
    return {
        name
        for tower, layers in targets_by_tower(tuning).items()
        for name in _matched(_of_tower(linear, tower, model), layers, tower, model)
    }


def targets_by_tower(tuning: Lora) -> dict[Tower, Layers]:
    """Names without a tower are of the language tower, which is all of a model that sees nothing."""
    return tuning.targets if isinstance(tuning.targets, dict) else {"language": tuning.targets}


def _of_tower(linear: set[str], tower: Tower, model: PreTrainedModel) -> set[str]:
    sight = sight_in(model)
    if sight is not None:
        unused = unused_in(model, sight)
        found = {name for name in linear if tower_of(sight, name) == tower and not is_among(name, unused)}
    elif tower == "language":
        found = linear
    else:
        raise ModelError(
            f"tuning.targets names layers of the tower {tower}, and {type(model).__name__} has none: it sees no images",
            "write the layers without a tower, or name a model that sees",
        )
    if not found:
        raise ModelError(
            f"tuning.targets: the tower {tower} of {type(model).__name__} has no linear layer that could carry an adapter",
            f"leave it out, or train it as a whole: `tuning: {{kind: subset, trainable: [{tower}]}}`",
        )
    return found


def _matched(linear: set[str], layers: Layers, tower: Tower, model: PreTrainedModel) -> set[str]:
    if layers == "all-linear":
        return linear
    place = f"the tower {tower}" if sight_in(model) is not None else "the model"
    chosen: set[str] = set()
    for target in layers:
        matched = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not matched:
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ModelError(
                f"tuning.targets: {target} matches no linear layer of {place}",
                f"its linear layers are {', '.join(known)}",
            )
        chosen |= matched
    return chosen


def _shortest(chosen: set[str], model: PreTrainedModel) -> list[str]:
    """Last parts of the names where they mean the same modules, as other tools expect them in adapter_config.json; else whole names."""
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in last}
    return sorted(last if meant == chosen else chosen)


def require_exact(adapted: peft.PeftModel, chosen: set[str]) -> None:
    """peft matches names by their ends, so it may adapt more than was asked for; and nothing but adapters may be trained."""
    carrying = {name.removeprefix(_PREFIX) for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    trained = {
        name.partition(".lora_")[0].removeprefix(_PREFIX) for name, p in adapted.named_parameters() if p.requires_grad
    }
    for odd, what in (
        (carrying - chosen, "got an adapter that was not asked for"),
        (chosen - carrying, "got no adapter"),
        (trained - chosen, "would be trained beside the adapters"),
        (chosen - trained, "has an adapter that is not trained"),
    ):
        if odd:
            raise ModelError(
                f"tuning.targets: {_few(odd)} {what}", "name the layers in tuning.targets by more of their names"
            )


def _few(names: Iterable[str], *, most: int = 3) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


# going on from one


def _go_on_from(adapted: peft.PeftModel, folder: Path, tuning: Lora, name: str) -> None:
    require_agreement(folder, tuning, model=name)
    stored = _stored(folder)
    wanted = adapter_tensors(adapted)
    theirs, ours = (
        {key.partition(".lora_")[0].removeprefix(_PREFIX) for key in tensors} for tensors in (stored, wanted)
    )
    for odd, what in (
        (theirs - ours, "adapts layers that tuning.targets does not name"),
        (ours - theirs, "lacks layers that tuning.targets names"),
    ):
        if odd:
            raise ModelError(
                f"the adapter in {folder.name} {what}: {_few(odd)}", "write its own layers into tuning.targets"
            )
    if odd := stored.keys() ^ wanted.keys() or {key for key in wanted if stored[key].shape != wanted[key].shape}:
        raise ModelError(
            f"the adapter in {folder.name} was made for another model: {_few(odd)} differ",
            "name another one in tuning.adapter",
        )
    put_adapter_tensors(adapted, stored)


def _stored(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{folder / WEIGHTS} cannot be read: {error}", "name another adapter in tuning.adapter"
        ) from None


def adapter_tensors(adapted: peft.PeftModel) -> dict[str, Tensor]:
    """Of the adapter that is trained, by the names that they are stored under."""
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(
        adapted, adapter_name=TRAINED, save_embedding_layers=False
    )
    return tensors


def put_adapter_tensors(adapted: peft.PeftModel, stored: dict[str, Tensor]) -> None:
    peft.set_peft_model_state_dict(adapted, stored, adapter_name=TRAINED)


# what training started from


def freeze_reference(model: peft.PeftModel) -> None:
    """A copy of the adapter as it is now, frozen and inactive; `as_reference` then answers by it. To be called before a checkpoint is restored."""
    config = copy.deepcopy(model.peft_config[TRAINED])
    config.inference_mode, config.lora_dropout = True, 0.0
    model.add_adapter(REFERENCE, config)
    start = _parameters_of(model, TRAINED)
    for name, parameter in _parameters_of(model, REFERENCE).items():
        parameter.data = start[name].detach().clone()


def _parameters_of(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """By their names without that of the adapter."""
    return {
        name.replace(f".{adapter}", ""): p
        for name, p in model.named_parameters()
        if ".lora_" in name and f".{adapter}" in name
    }


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """The model answers as it did before its first step: by the frozen copy where there is one, else without its adapter. Only without gradients:
    what is computed again in backward would be computed by the other one.

    peft's own switches also turn requires_grad off and on, of tensors that an engine may have wrapped or divided; here none is touched."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise FinefitError("a model without adapters holds no reference")
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            if REFERENCE in layer.lora_A:
                layer._active_adapter = [REFERENCE]
            else:
                layer._disable_adapters = True
        yield
    finally:
        for layer, (active, is_disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, is_disabled
