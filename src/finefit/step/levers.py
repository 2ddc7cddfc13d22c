"""The exact levers carried out on a model: what is kept, what is computed again, what waits in host memory. The gradient stays as it is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.model.custom import own_of
from finefit.model.sight import bare, sight_in, tower_of
from finefit.step.custom import pull_own
from finefit.step.fused import Kernels, Lever, fuse, release
from finefit.step.liger import dense_weight
from finefit.step.offload import PinnedMemory, Store

_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
]
Layer = Callable[..., Any]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Around a layer's forward, and around its recomputation."""


def pull(
    model: nn.Module,
    levers: Levers,
    store: Store | None = None,
    kernels: Kernels | None = None,
    dense: Callable[[nn.Module], Tensor] = dense_weight,
) -> None:
    """On a model that is to be trained; again with other levers where those were not enough. `kernels` is what fused levers have on this device."""
    if (own := own_of(model)) is not None:
        pull_own(own, levers)
        _keep_inputs(model, levers)
        return
    layers = _counted(model)
    if levers.recompute > len(layers):
        raise ModelError(
            f"levers.recompute is {levers.recompute}, but {type(model).__name__} has {len(layers)} layers that can be computed again",
            "lower it, or say `all`",
        )
    recompute = _recomputation(levers, store or PinnedMemory())
    looking = _recomputed_beside(model, levers)
    release(model)
    for layer in layers:
        layer._compiled_call_impl = None
        if levers.compile:
            layer.compile()
    if levers.kernels == "fused":
        fuse(model, kernels, dense, [*layers[: levers.recompute], *looking])
    for at, layer in enumerate(layers):
        layer.gradient_checkpointing = at < levers.recompute
        layer._gradient_checkpointing_func = recompute
        if levers.mlp_tiles > 1:
            _tile(layer, levers.mlp_tiles)
    for layer in layers_beside(model):
        layer.gradient_checkpointing = any(layer is other for other in looking)
        layer._gradient_checkpointing_func = _recomputation(replace(levers, offload=False), PinnedMemory())
    _keep_inputs(model, levers)


def _keep_inputs(model: nn.Module, levers: Levers) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = levers.adapter_inputs != "bf16"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Those that levers count; of a model that sees, its language tower's; of a model of the user's own, those that it names."""
    own = own_of(model)
    return [*_counted(model)] if own is None else own.layers


def _counted(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [layer for layer, is_counted in _layers(model) if is_counted]


def layers_beside(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Of the other towers of a model that sees."""
    return [layer for layer, is_counted in _layers(model) if not is_counted]


def _layers(model: nn.Module) -> Iterator[tuple[GradientCheckpointingLayer, bool]]:
    sight = sight_in(model)
    for name, module in bare(model).named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield module, sight is None or tower_of(sight, name) == "language"


def _recomputed_beside(model: nn.Module, levers: Levers) -> list[GradientCheckpointingLayer]:
    """All of them where any layer is recomputed at all, from the first that something is trained in: those before it keep nothing anyway."""
    beside = layers_beside(model) if levers.recompute else []
    first = next(
        (at for at, layer in enumerate(beside) if any(p.requires_grad for p in layer.parameters())), len(beside)
    )
    return beside[first:]


def _recomputation(levers: Levers, store: Store) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _ATTENTION) if levers.keep_attention else _no_contexts
    if levers.offload:
        return partial(_offloaded, contexts, store)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


def _offloaded(contexts: Callable[[], Contexts], store: Store, layer: Layer, hidden: Tensor, *rest: Any) -> Any:
    """The first call takes the input itself, the call in backward takes what was stored."""
    given, requires_grad = [hidden], hidden.requires_grad
    fetch = store.put(hidden.detach())

    def refilled() -> Contexts:
        forward, backward = contexts()
        return forward, _refilled(given, lambda: fetch().requires_grad_(requires_grad), backward)

    def run(_: Tensor, *others: Any) -> Any:
        return layer(given.pop(), *others)

    here = hidden.new_empty(0)  # torch keeps the random numbers of the devices that it sees among the arguments
    del hidden
    return checkpoint(run, here, *rest, use_reentrant=False, context_fn=refilled)


@contextmanager
def _refilled(given: list[Tensor], fetch: Callable[[], Tensor], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Fetched before `inner` begins, which takes every operation for one of the layer's."""
    given.append(fetch())
    with inner:
        yield


def _tile(layer: nn.Module, tiles: int) -> None:
    """Of an MLP that works token by token; one that routes tokens to experts is left whole."""
    mlp = getattr(layer, "mlp", None)
    if isinstance(mlp, nn.Module) and not hasattr(mlp, "experts"):
        mlp.forward = Lever(_tiled, mlp.forward, tiles)


def _tiled(forward: Callable[[Tensor], Tensor], tiles: int, hidden_BTH: Tensor) -> Tensor:
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in hidden_BTH.chunk(tiles, dim=1)], dim=1)
