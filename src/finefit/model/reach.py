"""The linear layers of a causal language model that text passes, found by one step on fake tensors.

Some models have layers that no text passes: towers for images or sound, attention to another model, layers whose weight
is read without calling them. An adapter on such a layer would get no gradient."""

import copy
import re
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finefit.model.attention import choose_attention
from finefit.model.experts import choose_experts

_TOKENS = 16
_LAYERS = 8
"""Run first: layers repeat, and as many have one of each kind in most models."""


def idle_layers(model: PreTrainedModel) -> frozenset[str]:
    """Linear layers that a row of text does not call, or whose output it does not depend on."""
    names, key = set(linear_modules(model)), _Config(model.config)
    kinds = {_kind(name) for name in names}
    for depth in (_LAYERS, None):
        seen, idle = _run(type(model), key, depth)  # type: ignore[arg-type]
        if kinds <= seen:
            return frozenset(name for name in names if _kind(name) in idle)
    return frozenset()


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def keep_every_layer(model: nn.Module) -> None:
    """For a model on fake tensors: where a random number decides whether a step leaves a layer out, none is."""
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = _NoLayerDropped()  # type: ignore[assignment]


class _NoLayerDropped:
    """A share of layers that is below any number drawn."""

    def __gt__(self, _: object) -> bool:
        return False


class _Config:
    """A config as a key: equal if its values are."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config, self._values = config, config.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)


def _kind(name: str) -> str:
    """The name of a layer without its numbers, and without a wrapper that peft has put around it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.removesuffix(".base_layer"))


@lru_cache(maxsize=16)
def _run(kind: type[PreTrainedModel], given: _Config, depth: int | None) -> tuple[frozenset[str], frozenset[str]]:
    """The kinds of all linear layers, and of those that are idle; none if the model cannot be run without values."""
    reached: set[str] = set()

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: reached.add(_kind(name)))  # type: ignore[no-untyped-call]

    try:
        config = _shortened(given.config, depth)
        attention, experts = choose_attention("cpu", (0, 0), "fp32", config), choose_experts()
        with torch.device("meta"):
            model = kind._from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention, experts_implementation=experts
            )
        keep_every_layer(model.train())
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.enable_grad():
            model.to_empty(device="cpu")
            linear = linear_modules(model)
            for name, module in linear.items():
                module.register_forward_hook(partial(note, name))
            ids_1T = torch.zeros(1, _TOKENS, dtype=torch.long)
            model(input_ids=ids_1T, use_cache=False).logits.sum().backward()
    except Exception:  # noqa: BLE001 whatever its authors raise: the rehearsal says why it cannot be run
        return frozenset(), frozenset()
    kinds = frozenset(map(_kind, linear))
    return kinds, kinds - reached


def _shortened(config: PretrainedConfig, depth: int | None) -> PretrainedConfig:
    """With its first layers only."""
    short, layers = copy.deepcopy(config), getattr(config, "num_hidden_layers", None)
    if depth is None or not isinstance(layers, int) or layers <= depth:
        return short
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(short, name, value[:depth])
    short.num_hidden_layers = depth
    return short
