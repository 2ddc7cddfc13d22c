"""Applies the exact levers to a model: what is kept, recomputed or offloaded. The gradient does not change.

Offloaded layer inputs wait in pinned host memory between forward and backward, and copies overlap with computation: one
tensor is on its way out while the next layer computes, and one on its way back while the layer after it does. Both
directions wait for events and never for the host. Layers come back in reverse order.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from transformers.modeling_layers import GradientCheckpointingLayer

from finefit.artifacts.records import Levers
from finefit.errors import ModelError, SpecError
from finefit.model.family import TransformersFamily, family_of
from finefit.step.fused import Dense, FusedKernels, LeverForward, dense_weight, fuse, release
from finefit.vision import tower_of, vision_forward_in, without_adapter


class ActivationStore(Protocol):
    """Stores a layer's input between forward and backward."""

    def put(self, tensor: Tensor) -> Callable[[], Tensor]: ...


class _Waiting:
    """One offloaded input. It belongs to the graph that will fetch it, and is freed with it."""

    def __init__(self, held: Tensor, like: Tensor, give_back: Callable[[Tensor], None]) -> None:
        self.held, self.shape, self.dtype, self.device = held, like.shape, like.dtype, like.device
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        weakref.finalize(self, give_back, held)


class PinnedMemory:
    """Buffers are kept for the next step, because pinning costs more than copying."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: list[Tensor] = []
        self._waiting: list[weakref.ref[_Waiting]] = []
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        held = self._buffer(tensor)
        self._copy_out(tensor, held)
        waiting = _Waiting(held, tensor, self._free.append)
        self._waiting.append(weakref.ref(waiting))
        return lambda: self._fetch(waiting)

    def _copy_out(self, tensor: Tensor, held: Tensor) -> None:
        flat = tensor.flatten().view(torch.uint8)
        if not tensor.is_cuda:
            held[: len(flat)].copy_(flat)
            return
        stream, now = self._stream(tensor.device), torch.cuda.current_stream(tensor.device)
        self._let_leave(now)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            held[: len(flat)].copy_(flat, non_blocking=True)
            left = stream.record_event()
        self._leaving = (tensor, left)  # until then its memory must not be reused

    def _let_leave(self, now: torch.cuda.Stream) -> None:
        if self._leaving is not None:
            now.wait_event(self._leaving[1])
            self._leaving = None

    def _fetch(self, waiting: _Waiting) -> Tensor:
        if waiting.coming is None:
            self._call_back(waiting)
        assert waiting.coming is not None
        tensor, arrived = waiting.coming
        waiting.coming = None
        if arrived is not None:
            torch.cuda.current_stream(waiting.device).wait_event(arrived)
        while self._waiting:  # the next to be fetched is the last that was put
            following = self._waiting.pop()()
            if following is not None and following.coming is None:
                self._call_back(following)
                break
        return tensor

    def _call_back(self, waiting: _Waiting) -> None:
        if self._waiting and self._waiting[-1]() is waiting:
            self._waiting.pop()
        tensor = torch.empty(waiting.shape, dtype=waiting.dtype, device=waiting.device)
        flat = tensor.view(-1).view(torch.uint8)
        if not tensor.is_cuda:
            flat.copy_(waiting.held[: len(flat)])
            waiting.coming = (tensor, None)
            return
        stream, now = self._stream(waiting.device), torch.cuda.current_stream(waiting.device)
        self._let_leave(now)
        stream.wait_stream(now)  # the previous owner of this memory is done with it
        with torch.cuda.stream(stream):
            flat.copy_(waiting.held[: len(flat)], non_blocking=True)
            waiting.coming = (tensor, stream.record_event())

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _buffer(self, tensor: Tensor) -> Tensor:
        """The smallest free buffer that is large enough; else a new one, which replaces the largest free one."""
        num_bytes = tensor.numel() * tensor.element_size()
        large = [at for at, held in enumerate(self._free) if held.numel() >= num_bytes]
        if large:
            return self._free.pop(min(large, key=lambda at: self._free[at].numel()))
        if self._free:
            self._free.pop(max(range(len(self._free)), key=lambda at: self._free[at].numel()))
        return _pinned(num_bytes, is_pinned=tensor.is_cuda)


def _pinned(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Exactly this many bytes; torch's own pinned memory comes in powers of two."""
    held = torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned:
        code = torch.cuda.cudart().cudaHostRegister(held.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
        if int(code) != 0:
            problem = f"{num_bytes:,} bytes of host memory could not be pinned (CUDA error {int(code)})"
            raise torch.OutOfMemoryError(problem)
        weakref.finalize(held, torch.cuda.cudart().cudaHostUnregister, held.data_ptr())  # type: ignore[no-untyped-call]
    return held


_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts around a layer's forward and around its recomputation."""


def apply_levers(
    model: nn.Module,
    levers: Levers,
    store: ActivationStore | None = None,
    kernels: FusedKernels | None = None,
    dense: Dense = dense_weight,
) -> None:
    """May be called again with other levers. `kernels` are the fused ones of this device."""
    family = family_of(model)
    layers: list[Any] = family.layers()
    if levers.recompute > len(layers):
        has = f"{family.name} has {len(layers)} layers that can be recomputed"
        raise ModelError(f"levers.recompute is {levers.recompute}, but {has}", "lower it, or set it to `all`")
    if refused := family.refused_levers(levers):
        problem = f"{', '.join(refused)} cannot be applied to {family.name}"
        raise SpecError(problem, "leave them at auto; micro_batch and recompute apply to every model")
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = levers.adapter_inputs != "bf16"
    if not isinstance(family, TransformersFamily):
        release(model)
        for layer in layers[: levers.recompute]:
            layer.forward = LeverForward(_recomputed, layer.forward)
        return
    recompute = _recomputation(levers, store or PinnedMemory())
    others = _recomputed_others(model, levers)
    release(model)
    for layer in layers:
        layer._compiled_call_impl = None
        if levers.compile:
            layer.compile()
    if levers.kernels == "fused":
        fuse(model, kernels, dense, [*layers[: levers.recompute], *others])
    for at, layer in enumerate(layers):
        layer.gradient_checkpointing = at < levers.recompute
        layer._gradient_checkpointing_func = recompute
        if levers.mlp_tiles > 1:
            mlp = getattr(layer, "mlp", None)
            # one that works token by token; an MLP that routes tokens to experts is left whole
            if isinstance(mlp, nn.Module) and not hasattr(mlp, "experts"):
                mlp.forward = LeverForward(_tiled, mlp.forward, levers.mlp_tiles)
    for layer in other_layers(model):
        layer.gradient_checkpointing = any(layer is other for other in others)
        layer._gradient_checkpointing_func = _recomputation(replace(levers, offload=False), PinnedMemory())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that levers count: in a vision-language model, those of its language tower; in a custom model, those
    that it names."""
    return family_of(model).layers()


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


def other_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a vision-language model's other towers."""
    vision_forward = vision_forward_in(model)
    return [
        module
        for name, module in without_adapter(model).named_modules()
        if isinstance(module, GradientCheckpointingLayer)
        and vision_forward is not None
        and tower_of(vision_forward, name) != "language"
    ]


def _recomputed_others(model: nn.Module, levers: Levers) -> list[GradientCheckpointingLayer]:
    """If any layer is recomputed, all others from the first with a trained tensor on. Those before it keep nothing
    anyway."""
    others = other_layers(model) if levers.recompute else []
    trained = (at for at, layer in enumerate(others) if any(p.requires_grad for p in layer.parameters()))
    return others[next(trained, len(others)) :]


def _recomputation(levers: Levers, store: ActivationStore) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _ATTENTION) if levers.keep_attention else noop_context_fn
    if levers.offload:
        return partial(_offloaded, contexts, store)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _offloaded(
    contexts: Callable[[], Contexts], store: ActivationStore, layer: Callable[..., Any], hidden: Tensor, *rest: Any
) -> Any:
    """The first call takes the input itself, the call in backward the stored one."""
    given, requires_grad = [hidden], hidden.requires_grad
    fetch = store.put(hidden.detach())

    def refilled() -> Contexts:
        forward, backward = contexts()
        return forward, _refilled(given, lambda: fetch().requires_grad_(requires_grad), backward)

    def run(_: Tensor, *others: Any) -> Any:
        return layer(given.pop(), *others)

    here = hidden.new_empty(0)  # torch saves the random state of the devices among the arguments
    del hidden
    return checkpoint(run, here, *rest, use_reentrant=False, context_fn=refilled)


@contextmanager
def _refilled(given: list[Tensor], fetch: Callable[[], Tensor], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Fetches before `inner` begins, which would otherwise treat the copy as an operation of the layer."""
    given.append(fetch())
    with inner:
        yield


def _tiled(forward: Callable[[Tensor], Tensor], tiles: int, hidden_BTH: Tensor) -> Tensor:
    return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in hidden_BTH.chunk(tiles, dim=1)], dim=1)
