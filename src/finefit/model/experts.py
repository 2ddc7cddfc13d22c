"""The experts of a mixture, computed by one grouped product over tokens sorted by expert, and its routers.

finefit does not use the implementations of transformers: `eager` asks on the host which experts have tokens, so the GPU
waits in every layer and a rehearsal, which has no values, fails; `batched_mm` copies an expert's weights for every
token; `grouped_mm` ignores autocast, so a model kept in fp32 would train with fp32 products, and its gathers add
gradients in no fixed order.

Memory depends on the number of tokens and not on their experts, so every routing needs the same. N tokens, K experts of
each, S = N x K, E experts, H hidden, I inner, O outer, r rank.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from finefit.objective.losses import Routed

PLACEHOLDER_SIZE = 1
"""Neurons, all zero and without gradient, of a shared expert that only the architecture requires."""
GROUPED = "grouped_under_autocast"
_WRAPPERS = "finefit_adapters"
"""Attribute of an experts module: peft's wrappers of its weights, by name."""
_WITHOUT_KERNEL = (8, 0)
"""Replaces the grouped product on older GPUs, which lack it: transformers' loop, which waits for the GPU."""


def choose_experts() -> str:
    """The implementation's name in transformers, for everything that runs a model; models without experts ignore it."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _grouped)
    return GROUPED


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, that hold several experts in one tensor, as transformers' `use_experts_implementation` does."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_concatenated") and hasattr(module, "num_experts")
    }


def placeholder_experts(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the all-zero shared experts and their gates; these get no gradient either."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if isinstance(config, PretrainedConfig) else None
    if getattr(text, "shared_expert_intermediate_size", None) != PLACEHOLDER_SIZE:
        return ()
    return tuple(name for name, _ in model.named_modules() if name.endswith((".shared_expert", ".shared_expert_gate")))


def active_parameters(model: nn.Module) -> int:
    """The number of parameters that process one token: of each layer's experts, only as many as the token is sent
    to."""
    config = getattr(model, "config", None)
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) if config is not None else None
    total = sum(p.numel() for p in model.parameters())
    if not isinstance(chosen, int):
        return total
    for experts in experts_of(model).values():
        num_experts: int = experts.num_experts  # type: ignore[assignment]
        values = sum(p.numel() for p in experts.parameters())
        total -= values * max(0, num_experts - chosen) // num_experts
    return total


def _grouped(experts: Any, hidden_NH: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The signature is the one that transformers calls on modules of its `use_experts_implementation`."""
    num_chosen, (first, last) = experts_NK.shape[-1], weight_names(experts)
    sorted_S, order_S = torch.sort(experts_NK.reshape(-1), stable=True)
    back_S = torch.argsort(order_S)
    ends_E = torch.searchsorted(
        sorted_S, torch.arange(experts.num_experts, device=sorted_S.device), right=True, out_int32=True
    )
    narrow_NH = hidden_NH.to(product_dtype(getattr(experts, first)))
    rows_SH: Tensor = _Gathered.apply(narrow_NH, order_S, back_S, num_chosen)  # type: ignore[no-untyped-call]
    inner_SI = _linear(experts, first, rows_SH, ends_E, sorted_S)
    inner_SI = experts._apply_gate(inner_SI) if experts.has_gate else experts.act_fn(inner_SI)
    rows_SH = _linear(experts, last, inner_SI, ends_E, sorted_S)
    weighted_SH = rows_SH * weights_NK.reshape(-1).index_select(0, order_S).unsqueeze(-1)
    summed_NH: Tensor = _Summed.apply(weighted_SH, order_S, back_S, num_chosen)  # type: ignore[no-untyped-call]
    return summed_NH.to(hidden_NH.dtype)


def _linear(experts: Any, name: str, x_SI: Tensor, ends_E: Tensor, sorted_S: Tensor) -> Tensor:
    weight: nn.Parameter = getattr(experts, name)
    dtype = product_dtype(weight)
    weight_EIO = weight.to(dtype) if experts.is_transposed else weight.to(dtype).transpose(-2, -1)
    x_SI = x_SI.to(dtype)
    out_SO = _product(x_SI, weight_EIO, ends_E)
    for down_EIr, up_ErO, scaling in _adapters(experts, name, dtype):
        out_SO = out_SO + _product(_product(x_SI, down_EIr, ends_E), up_ErO, ends_E) * scaling
    if experts.has_bias:
        out_SO = out_SO + getattr(experts, f"{name}_bias").to(dtype).index_select(0, sorted_S)
    return out_SO


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """The weights of an experts module that can carry adapters."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def compute_adapters_apart(model: nn.Module) -> None:
    """Adapters on experts' weights get grouped products of their own. Peft would add each of them to a copy of all
    experts, and backward would make a gradient as large as that copy."""
    for wrapper in model.modules():
        if isinstance(wrapper, ParamWrapper) and wrapper.get_base_layer() in experts_of(model).values():
            vars(wrapper.get_base_layer()).setdefault(_WRAPPERS, {})[wrapper.parameter_name] = wrapper
            wrapper.forward = partial(_through, wrapper)


def _through(wrapper: ParamWrapper, *args: Any, **kwargs: Any) -> Any:
    """Past the wrapper to the experts, whose grouped products look for it; any other implementation does not."""
    experts = wrapper.get_base_layer()
    is_grouped = experts.config._experts_implementation == GROUPED
    return experts(*args, **kwargs) if is_grouped else ParamWrapper.forward(wrapper, *args, **kwargs)


def _adapters(experts: Any, name: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, float]]:
    wrapper: Any = vars(experts).get(_WRAPPERS, {}).get(name)
    if wrapper is None or wrapper.disable_adapters or wrapper.merged:
        return
    for adapter in wrapper.active_adapters:
        down_EI = wrapper.lora_A[adapter].weight.to(dtype)
        up_OE = wrapper.lora_B[adapter].weight.to(dtype)
        down_EIr = down_EI.reshape(experts.num_experts, -1, down_EI.shape[-1]).transpose(1, 2)
        up_ErO = up_OE.reshape(up_OE.shape[0], -1, experts.num_experts).permute(2, 1, 0).contiguous()
        yield down_EIr, up_ErO, wrapper.scaling[adapter]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a product under autocast. Autocast does not know grouped products and fused kernels, so they cast
    their inputs themselves, as it would for linear layers."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    if x_SI.device.type == "cuda" and torch.cuda.get_device_capability(x_SI.device) < _WITHOUT_KERNEL:
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, offs=ends_E)
        return found
    return grouped_mm(x_SI, weight_EIO, offs=ends_E)


class _Gathered(torch.autograd.Function):
    """Repeats each token once per chosen expert, sorted by expert. Backward sums the copies in a fixed order; torch's
    gradient of a repeated index would add them in any order."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, order_S: Tensor, back_S: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(back_S)
        ctx.num_chosen = num_chosen
        return hidden_NH.index_select(0, order_S // num_chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SH: Tensor) -> Any:
        return _sum(gradient_SH, ctx.saved_tensors[0], ctx.num_chosen), None, None, None


class _Summed(torch.autograd.Function):
    """The reverse of `_Gathered`: sums the outputs of a token's experts."""

    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, order_S: Tensor, back_S: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(order_S)
        ctx.num_chosen = num_chosen
        return _sum(rows_SH, back_S, num_chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NH: Tensor) -> Any:
        return gradient_NH.index_select(0, ctx.saved_tensors[0] // ctx.num_chosen), None, None, None


def _sum(rows_SH: Tensor, back_S: Tensor, num_chosen: int) -> Tensor:
    """Sums in the dtype of the rows: autocast would give fp32 on a GPU but not on a CPU."""
    return rows_SH.index_select(0, back_S).view(-1, num_chosen, rows_SH.shape[-1]).sum(dim=1, dtype=rows_SH.dtype)


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Routers by name, in the order of the layers. A router is recognised by `top_k` and a weight with one row per
    expert."""
    return {name: module for name, module in model.named_modules() if is_router(module)}


def is_router(module: nn.Module) -> bool:
    weight, num_experts = getattr(module, "weight", None), getattr(module, "num_experts", None)
    if not isinstance(weight, Tensor) or not isinstance(getattr(module, "top_k", None), int):
        return False
    shape: tuple[int, ...] = tuple(getattr(weight, "ds_shape", weight.shape))  # DeepSpeed empties what it shards
    return len(shape) == 2 and shape[0] == num_experts


def top_k_of(router: nn.Module) -> int:
    top_k = router.top_k
    assert isinstance(top_k, int)
    return top_k


@contextmanager
def record_routing(routers: Iterable[nn.Module]) -> Iterator[list[Routed]]:
    """Records the outputs of the routers in call order. A recomputation in backward comes after the block and adds
    nothing."""
    found: list[Routed] = []

    def note(_: nn.Module, __: Any, answer: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(Routed(*answer))

    with forward_hooks(routers, note):
        yield found


@contextmanager
def forward_hooks(routers: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
