"""What training and evaluation need from a model, whoever wrote its code: which layers may carry adapters, which may be
recomputed, how it is saved, whether it computes its own loss. `TransformersFamily` answers for a transformers model,
`custom.model.CustomFamily` for a module that a user's file built."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import peft
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.model.experts import experts_of
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.model.saved_weights import TRAINED, FrozenWeights, save_with_frozen, whole_weights
from finefit.model.targets import left_out, linear_layers, refuse_unadaptable, unadaptable
from finefit.objective.batch import Forward, Objective
from finefit.spec.models import Layers, Lora, Tower
from finefit.vision import is_inside, tower_of, unused_modules, vision_forward_in, without_adapter

Watch = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps the call that runs the model; a rehearsal watches it."""
FAMILY = "finefit_family"
"""Attribute of a module that is not a transformers model; calling it makes the module's family."""


class ModelFamily(Protocol):
    @property
    def module(self) -> nn.Module:
        """The module without its adapters."""

    @property
    def name(self) -> str:
        """The name in messages: a class, or the user's file."""

    @property
    def peft_task(self) -> str | None:
        """None for a model that need not be a transformers model."""

    def adapter_layers(self, tuning: Lora) -> set[str]:
        """Names of exactly the modules that get an adapter."""

    def layers(self) -> list[nn.Module]:
        """The layers that `levers.recompute` counts, first to last."""

    def refused_levers(self, levers: Levers) -> list[str]:
        """Levers that cannot be applied to this model, with their values."""

    def own_forward(self, autocast: AbstractContextManager[Any] | None, watch: Watch) -> Forward | None:
        """The forward of a model that computes its own loss; None if log-probabilities are computed from its logits."""

    def own_objective(self) -> Objective | None:
        """The objective of a model that computes its own loss; None if the spec's objective applies."""

    def save(self, folder: Path, whole: Mapping[str, Tensor] | None, frozen: FrozenWeights | None) -> None:
        """Saves the whole model. `whole` has the weights by name if the model's own are sharded; `frozen` has files
        with the frozen weights as they were before any rounding."""


def family_of(model: nn.Module) -> ModelFamily:
    module = without_adapter(model)
    make: Callable[[Any], ModelFamily] = vars(module).get(FAMILY, TransformersFamily)
    return make(module)


def save_weights(
    model: nn.Module, folder: Path, whole: dict[str, Tensor] | None = None, frozen: FrozenWeights | None = None
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, or the whole model, as peft and transformers expect
    them. `whole` and `frozen` are as in `ModelFamily.save`."""
    if not isinstance(model, peft.PeftModel):
        family_of(model).save(folder, whole, frozen)
        return
    model.save_pretrained(folder, save_embedding_layers=False, selected_adapters=[TRAINED], state_dict=whole)
    config = folder / ADAPTER_CONFIG
    values = json.loads(config.read_text(encoding="utf-8"))
    # peft writes a set in any order; equal files are wanted
    for key in ("target_modules", "target_parameters"):
        values[key] = values[key] and sorted(values[key])
    config.write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class TransformersFamily:
    module: PreTrainedModel
    peft_task: ClassVar[str] = "CAUSAL_LM"

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def adapter_layers(self, tuning: Lora) -> set[str]:
        model = self.module
        linear = linear_layers(model) - unadaptable(model).keys()
        if not linear:
            problem = f"{self.name} has no linear layer that could carry an adapter"
            raise ModelError(problem, "train it in full: `tuning: {kind: full}`")
        # names without a tower belong to the language tower, which is all of a model that takes no images
        given = tuning.targets
        by_tower: dict[Tower, Layers] = given if isinstance(given, dict) else {"language": given}
        chosen: set[str] = set()
        for tower, targets in by_tower.items():
            place = "the model" if vision_forward_in(model) is None else f"the tower {tower}"
            nothing, known = f"no linear layer of {place}", "its linear layers are"
            refuse_unadaptable(model, targets)
            able = linear - left_out(model).keys() if targets == "all-linear" else linear
            chosen |= match_targets(self._of_tower(able, tower), targets, "tuning.targets", nothing, known)
        return chosen

    def _of_tower(self, linear: set[str], tower: Tower) -> set[str]:
        vision_forward = vision_forward_in(self.module)
        if vision_forward is not None:
            unused = unused_modules(self.module)
            found = {name for name in linear if tower_of(vision_forward, name) == tower and not is_inside(name, unused)}
        elif tower == "language":
            found = linear
        else:
            problem = f"tuning.targets names layers of the tower {tower}, and {self.name} has none: it takes no images"
            raise ModelError(problem, "write the layers without a tower, or name a vision-language model")
        if not found:
            raise ModelError(
                f"tuning.targets: the tower {tower} of {self.name} has no linear layer that could carry an adapter",
                f"leave it out, or train it as a whole: `tuning: {{kind: subset, trainable: [{tower}]}}`",
            )
        return found

    def layers(self) -> list[nn.Module]:
        """In a vision-language model, the layers of its language tower."""
        vision_forward, found = vision_forward_in(self.module), dict[str, nn.Module]()
        for name, module in self.module.named_modules():
            is_language = vision_forward is None or tower_of(vision_forward, name) == "language"
            # Zamba 2 has layers inside of layers
            if isinstance(module, GradientCheckpointingLayer) and is_language and not is_inside(name, tuple(found)):
                found[name] = module
        return list(found.values())

    def refused_levers(self, levers: Levers) -> list[str]:  # noqa: ARG002
        return []

    def own_forward(self, autocast: AbstractContextManager[Any] | None, watch: Watch) -> Forward | None:  # noqa: ARG002
        return None

    def own_objective(self) -> Objective | None:
        return None

    def save(self, folder: Path, whole: Mapping[str, Tensor] | None, frozen: FrozenWeights | None) -> None:
        model = self.module
        if frozen is not None:
            found = whole_weights(model, _to_host, keeps=True, only_trained=True) if whole is None else whole
            save_with_frozen(model, folder, frozen, found)
            return
        if whole is None and model.device.type != "cpu" and experts_of(model):
            # experts are stored one by one; taking them apart copies them, which the planned memory has no place for
            whole = whole_weights(model, _to_host, keeps=True)
        model.save_pretrained(folder, state_dict=whole)


def _to_host(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().cpu()


def match_targets(allowed: set[str], targets: Layers, key: str, nothing: str, known: str) -> set[str]:
    """Names in `allowed` that end with one of the targets. `key`, `nothing` and `known` word the error for a target
    that matches none: where it was given, what it failed to match, and what introduces the choices."""
    if targets == "all-linear":
        return allowed
    chosen: set[str] = set()
    for target in targets:
        matched = {name for name in allowed if name == target or name.endswith(f".{target}")}
        if not matched:
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in allowed})) or "none"
            raise ModelError(f"{key}: {target} matches {nothing}", f"{known} {ends}")
        chosen |= matched
    return chosen
