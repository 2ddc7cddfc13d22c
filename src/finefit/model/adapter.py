"""Adapters on exactly the layers that the spec names: new ones, one that training continues from, the frozen copy of a
starting adapter, and any adapter that peft can read, on its base model."""

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from finefit.errors import FinefitError, ModelError, SpecError, is_out_of_memory
from finefit.facts.files import first_words, read_weight_file, reading_model
from finefit.model.experts import compute_adapters_apart, experts_of, weight_names
from finefit.model.family import family_of
from finefit.model.resolve_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, require_matching_adapter
from finefit.model.saved_weights import TRAINED, adapter_tensors
from finefit.spec.models import Lora

REFERENCE = "reference"
_RANK_UNIT = 8
_PREFIX = "base_model.model."
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OTHER_BASE = "take the model that the adapter was made for, base_model_name_or_path in its adapter_config.json"


def attach(model: PreTrainedModel, tuning: Lora, *, name: str, base: Path | None) -> peft.PeftModel:
    """`base` is the folder that the path of an adapter to continue from is relative to. If it is None, a new adapter of
    the same shape is made instead."""
    family = family_of(model)
    chosen = family.adapter_layers(tuning)
    # last parts of the names where they mean the same modules, as other tools expect them in adapter_config.json
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in last}
    if tuning.dora and tuning.base_bits == 8 and model.device.type == "cpu":
        why = "on a CPU peft loses the scales of the packed weights"
        problem = f"tuning.dora with tuning.base_bits 8 needs a CUDA device: {why}"
        raise SpecError(problem, "set tuning.base_bits: 4, or tuning.dora: false")
    if tuning.experts:
        _require_adaptable_experts(model, tuning)
    config = peft.LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        target_modules=sorted(last if meant == chosen else chosen),
        use_rslora=tuning.rank_stabilised,
        use_dora=tuning.dora,
        task_type=family.peft_task,
        target_parameters=_expert_weights(model) if tuning.experts else None,
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:  # layers that peft knows and cannot adapt
        problem = f"{type(model).__name__} cannot carry these adapters: {error}"
        raise ModelError(problem, "name others in tuning.targets") from error
    adapted.peft_config[TRAINED].base_model_name_or_path = name
    adapted.peft_config[TRAINED].inference_mode = False
    for parameter in _parameters_of(adapted, TRAINED).values():
        parameter.data = parameter.data.to(_DTYPES[tuning.weights])
    if tuning.experts:
        chosen |= _wrapped_experts(model)
        compute_adapters_apart(adapted)
    require_exact(adapted, chosen)
    if tuning.adapter is not None and base is not None:
        _continue_from(adapted, base / tuning.adapter, tuning, name)
    return adapted


def _require_adaptable_experts(model: nn.Module, tuning: Lora) -> None:
    if not experts_of(model):
        problem = f"tuning.experts is true, and {type(model).__name__} has no experts that hold their weights together"
        raise ModelError(problem, "leave it out")
    if tuning.dropout or tuning.dora:
        key = "dora" if tuning.dora else "dropout"
        raise SpecError(f"tuning.experts cannot have tuning.{key}, which peft lacks for experts", f"leave {key} out")
    if tuning.rank % _RANK_UNIT:
        problem = f"tuning.experts needs a rank that is a multiple of {_RANK_UNIT}, and tuning.rank is {tuning.rank}"
        raise SpecError(problem, "grouped products read 16 bytes at a time; choose another rank")


def _expert_weights(model: nn.Module) -> list[str]:
    """The ends of their names, as other tools expect them in adapter_config.json."""
    names = (f"{at}.{name}" for at, experts in experts_of(model).items() for name in weight_names(experts))
    return sorted({".".join(name.split(".")[-3:]) for name in names})


def _wrapped_experts(adapted: nn.Module) -> set[str]:
    """The names that peft's wrappers have: one for each weight, the second inside the first."""
    places = {name.removesuffix(".base_layer.base_layer") for name in experts_of(adapted)}
    return {f"{place}{inside}" for place in places for inside in ("", ".base_layer")}


def require_exact(adapted: peft.PeftModel, chosen: set[str]) -> None:
    """Raises if peft adapted other layers than intended (it matches names by their ends) or if anything but adapters is
    trainable."""
    carrying = {name.removeprefix(_PREFIX) for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    trained = {_layer_of(name) for name, p in adapted.named_parameters() if p.requires_grad}
    for odd, what in (
        (carrying - chosen, "got an adapter that the spec does not name"),
        (chosen - carrying, "got no adapter"),
        (trained - chosen, "would be trained beside the adapters"),
        (chosen - trained, "has an adapter that is not trained"),
    ):
        if odd:
            remedy = "name the layers in tuning.targets by more of their names"
            raise ModelError(f"tuning.targets: {_few(odd)} {what}", remedy)


def _layer_of(parameter: str) -> str:
    return parameter.partition(".lora_")[0].removeprefix(_PREFIX)


def _few(names: Iterable[str], *, most: int = 3) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _continue_from(adapted: peft.PeftModel, folder: Path, tuning: Lora, name: str) -> None:
    require_matching_adapter(folder, tuning, model=name)
    require_fitting_adapter(adapted, folder)
    peft.set_peft_model_state_dict(adapted, load_file(folder / ADAPTER_WEIGHTS), adapter_name=TRAINED)


def require_fitting_adapter(adapted: peft.PeftModel, folder: Path) -> None:
    """Compares the header of the adapter's file with the model, which may be on the meta device."""
    with reading_model(folder / ADAPTER_WEIGHTS, "name another adapter in tuning.adapter"):
        stored = read_weight_file(folder / ADAPTER_WEIGHTS).tensors
    wanted = adapter_tensors(adapted)
    theirs, ours = ({_layer_of(key) for key in tensors} for tensors in (stored, wanted))
    for layers, what in (
        (theirs - ours, "adapts layers that tuning.targets does not name"),
        (ours - theirs, "lacks layers that tuning.targets names"),
    ):
        if layers:
            problem = f"the adapter in {folder.name} {what}: {_few(layers)}"
            raise ModelError(problem, "write its own layers into tuning.targets")
    if odd := stored.keys() ^ wanted.keys() or {key for key in wanted if stored[key].shape != tuple(wanted[key].shape)}:
        problem = f"the adapter in {folder.name} was made for another model: {_few(odd)} differ"
        raise ModelError(problem, "name another one in tuning.adapter")


def freeze_reference(model: peft.PeftModel) -> None:
    """Adds a frozen, inactive copy of the adapter for `as_reference`. Call it before a checkpoint is restored."""
    config = copy.deepcopy(model.peft_config[TRAINED])
    config.inference_mode, config.lora_dropout = True, 0.0
    model.add_adapter(REFERENCE, config)
    start = _parameters_of(model, TRAINED)
    for name, parameter in _parameters_of(model, REFERENCE).items():
        parameter.data = start[name].detach().clone()


def _parameters_of(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The adapter's parameters, keyed by name without the adapter's own name."""
    return {
        name.replace(f".{adapter}", ""): p
        for name, p in model.named_parameters()
        if ".lora_" in name and f".{adapter}" in name
    }


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Within the block, the model answers as it did before its first step: with the frozen copy of its starting adapter
    if there is one, else without its adapter. Use it only without gradients: a recomputation in backward would use the
    trained adapter.

    Peft's own switches are not used, because they also toggle requires_grad of tensors that an engine may have wrapped
    or sharded."""
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


def load_adapter(model: nn.Module, folder: Path, *, on_meta: bool = False) -> peft.PeftModel:
    """Any adapter that peft can read. A tensor without a place in the model, or a place without a tensor, is an error:
    peft would go on with the tensors that fit. `on_meta`: the model has no values; the adapter gets its own, on the
    CPU."""
    with reading_model(folder / ADAPTER_CONFIG, _OTHER_BASE):
        config: peft.PeftConfig = peft.PeftConfig.from_pretrained(folder)
    if config.is_prompt_learning:
        what = f"{config.peft_type.value} prompts, which precede the model's input and are not part of its weights"
        raise ModelError(f"{folder.name} holds {what}", "finefit evaluates adapters of weights, such as LoRA and DoRA")
    with reading_model(folder, _OTHER_BASE), warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*missing adapter keys.*")
        try:
            where: dict[str, Any] = {"low_cpu_mem_usage": True, "torch_device": "cpu"} if on_meta else {}
            adapted = peft.PeftModel.from_pretrained(model, folder, config=config, **where)
        except UserWarning as missing:
            problem = f"the adapter in {folder.name} lacks tensors that this model needs: {first_words(missing)}"
            raise ModelError(problem, _OTHER_BASE) from None
        except (RuntimeError, ValueError) as error:  # shapes or names that do not fit
            if is_out_of_memory(error):
                raise
            problem = f"the adapter in {folder.name} does not fit this model: {first_words(error)}"
            raise ModelError(problem, _OTHER_BASE) from None
    compute_adapters_apart(adapted)
    if config.peft_type == peft.PeftType.LORA:  # whose tensors are named after the layers they adapt
        held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        with reading_model(folder, _OTHER_BASE):
            stored = peft.load_peft_weights(str(folder), device="cpu")
        if left := sorted(name for name in stored if ".lora_" in name and name not in held):
            problem = f"the adapter in {folder.name} adapts layers that this model does not have: {', '.join(left[:3])}"
            raise ModelError(problem, _OTHER_BASE)
    return adapted
