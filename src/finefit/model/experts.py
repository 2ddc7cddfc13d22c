"""How the experts of a mixture are computed: tokens stand in the order of their experts, and one product by groups takes each with its own weights.

| implementation of transformers | why it is not taken |
|---|---|
| eager | asks on the host which experts have tokens, so a card waits in every layer and a rehearsal, which has no values, cannot pass |
| batched_mm | copies an expert's weights for every token: memory of tokens x weights |
| grouped_mm | under autocast it multiplies in what the weights are kept in: a whole model in fp32 would be trained by fp32 products, and what the \
rehearsal saw would not be what its precision says; its gathers add gradients up in no fixed order |

What it allocates depends on how many tokens there are and not on which experts they go to, so no routing is worse for memory than another.
N tokens, K experts of each, S = N x K, E experts, H hidden, I inner, O outer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

STAND_IN = 1
"""Neurons of the shared expert of a mixture that is built without one, where the architecture must have it: zeros, which no gradient moves."""
GROUPED = "grouped_under_autocast"
_WITHOUT_KERNEL = (8, 0)
"""Older cards have no product by groups; transformers has a loop for them, which asks the card how many tokens each expert has."""


def choose_experts() -> str:
    """The name that transformers knows it by; a model without experts takes no notice of it. The same for training, answers and rehearsal."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _grouped)
    return GROUPED


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name: modules that hold the weights of several experts in one tensor each, as `use_experts_implementation` of transformers marks them."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_concatenated") and hasattr(module, "num_experts")
    }


def stand_ins_in(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the shared experts that are none, and of their gates, to which they give no gradient either."""
    config = getattr(model, "config", None)
    if (
        not isinstance(config, PretrainedConfig)
        or getattr(config.get_text_config(), "shared_expert_intermediate_size", None) != STAND_IN
    ):
        return ()
    return tuple(name for name, _ in model.named_modules() if name.endswith((".shared_expert", ".shared_expert_gate")))


def active_parameters(model: nn.Module) -> int:
    """That a token meets: of each layer's experts as many as it is sent to."""
    config = getattr(model, "config", None)
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None) if config is not None else None
    total = sum(p.numel() for p in model.parameters())
    if not isinstance(chosen, int):
        return total
    return total - sum(_left_out(experts, chosen) for experts in experts_of(model).values())


def _left_out(experts: Any, chosen: int) -> int:
    num_experts, values = int(experts.num_experts), sum(int(p.numel()) for p in experts.parameters())
    return values * max(0, num_experts - chosen) // num_experts


def _grouped(experts: Any, hidden_NH: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """As transformers calls it, on modules of its `use_experts_implementation`."""
    num_chosen, first = experts_NK.shape[-1], "gate_up_proj" if experts.has_gate else "up_proj"
    sorted_S, order_S = torch.sort(experts_NK.reshape(-1), stable=True)
    back_S = torch.argsort(order_S)
    ends_E = torch.searchsorted(
        sorted_S, torch.arange(experts.num_experts, device=sorted_S.device), right=True, out_int32=True
    )
    narrow_NH = hidden_NH.to(_product_dtype(getattr(experts, first)))
    rows_SH: Tensor = _Gathered.apply(narrow_NH, order_S, back_S, num_chosen)  # type: ignore[no-untyped-call]
    inner_SI = _linear(experts, first, rows_SH, ends_E, sorted_S)
    inner_SI = experts._apply_gate(inner_SI) if experts.has_gate else experts.act_fn(inner_SI)
    rows_SH = _linear(experts, "down_proj", inner_SI, ends_E, sorted_S)
    weighted_SH = rows_SH * weights_NK.reshape(-1).index_select(0, order_S).unsqueeze(-1)
    summed_NH: Tensor = _Summed.apply(weighted_SH, order_S, back_S, num_chosen)  # type: ignore[no-untyped-call]
    return summed_NH.to(hidden_NH.dtype)


def _linear(experts: Any, name: str, x_SI: Tensor, ends_E: Tensor, sorted_S: Tensor) -> Tensor:
    weight: nn.Parameter = getattr(experts, name)
    dtype = _product_dtype(weight)
    weight_EIO = weight.to(dtype) if experts.is_transposed else weight.to(dtype).transpose(-2, -1)
    out_SO = _product(x_SI.to(dtype), weight_EIO, ends_E)
    if experts.has_bias:
        out_SO = out_SO + getattr(experts, f"{name}_bias").to(dtype).index_select(0, sorted_S)
    return out_SO


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Products by groups are unknown to autocast, so it is done here what it does for linear layers."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    if x_SI.device.type == "cuda" and torch.cuda.get_device_capability(x_SI.device) < _WITHOUT_KERNEL:
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, offs=ends_E)
        return found
    return grouped_mm(x_SI, weight_EIO, offs=ends_E)


class _Gathered(torch.autograd.Function):
    """Each token once for every expert of its own, in the order of the experts. Backward sums them again, always in the same order: an index with
    repetitions would be added up as threads come by."""

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
    """The other way round: what the experts of a token gave becomes one."""

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
    """In the type of the rows: on a card autocast would give it in fp32, and a processor would not."""
    return rows_SH.index_select(0, back_S).view(-1, num_chosen, rows_SH.shape[-1]).sum(dim=1, dtype=rows_SH.dtype)
