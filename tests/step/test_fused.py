"""Fused adapters, heads and layers: the same numbers, fewer operations, and everything as it was once the lever is let
go."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm

from finefit.artifacts.records import Levers
from finefit.data.collate import collate
from finefit.model.adapter import as_reference
from finefit.rehearse.fake_kernels import FakeFusedKernels
from finefit.step import forward as forwards
from finefit.step import fused
from finefit.step.forward import bind, head_logprobs
from finefit.step.levers import apply_levers
from tests.step.conftest import FULL, LORA, assert_same_step, cut, take_gradients, tuned, unequal_examples

FUSED = Levers(micro_batch=3, kernels="fused")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PLAIN_HEADS: list[type[PretrainedConfig]] = [LlamaConfig, Qwen2Config, Qwen3Config, MixtralConfig]
OTHER_HEADS: list[type[PretrainedConfig]] = [Gemma2Config, GraniteConfig, CohereConfig]


@pytest.mark.parametrize("config", [*PLAIN_HEADS, *OTHER_HEADS], ids=lambda c: c.__name__)
def test_a_head_is_fused_only_where_logits_are_its_product_and_nothing_else(
    config: type[PretrainedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in name)
    used: list[int] = []

    def noted(*given: Any, **named: Any) -> Tensor:
        used.append(1)
        return head_logprobs(*given, **named)

    monkeypatch.setattr(forwards, "head_logprobs", noted)
    batch = collate(unequal_examples(), pad=1)
    found = bind(model, is_fused=True, loss_chunk=50)(batch)
    torch.testing.assert_close(found, bind(model)(batch), rtol=1e-5, atol=1e-5)
    assert bool(used) == (config in PLAIN_HEADS)


def test_a_head_that_is_trained_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "head_logprobs", None)
    bind(tuned(FULL), is_fused=True)(collate(unequal_examples(), pad=1))


def test_a_layer_computed_again_stops_before_its_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven products in each of two layers; in backward six of them again."""
    model = tuned(LORA)
    calls: list[int] = []
    real = fused._through

    def noted(*given: Any) -> Tensor:
        calls.append(1)
        return real(*given)

    monkeypatch.setattr(fused, "_through", noted)
    levers = replace(FUSED, recompute=2)
    apply_levers(model, levers)
    take_gradients(model, cut(unequal_examples(), 8), forward=bind(model, is_fused=True))
    assert len(calls) == 2 * 7 + 2 * 6


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_derivatives_of_a_layer_with_its_adapter_are_those_of_its_values(share: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64) if has_bias else None
    x, down, up = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (2, 4), (5, 2)))

    def whole(*given: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = fused._Whole.apply(*given, bias, lambda: weight, 0.7, share)  # type: ignore[no-untyped-call]
        return out

    def apart(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        torch.manual_seed(1)
        token, xa = fused._Adapter.apply(x, down, up, lambda: weight, 0.7, share, 5)  # type: ignore[no-untyped-call]
        out: Tensor = fused._Product.apply(token, x.detach(), xa, up.detach(), bias, lambda: weight)  # type: ignore[no-untyped-call]
        return out

    torch.testing.assert_close(apart(x, down, up), whole(x, down, up))
    for function in (whole, apart):
        grads = torch.autograd.grad(function(x, down, up).square().sum(), (x, down, up))
        for at, tensor in enumerate((x, down, up)):
            wanted = _slope(function, [x, down, up], at, tensor)
            torch.testing.assert_close(grads[at], wanted, rtol=1e-5, atol=1e-6)


def _slope(function: Callable[..., Tensor], given: list[Tensor], at: int, tensor: Tensor) -> Tensor:
    """By finite differences: the node through which gradients flow has no values of its own to check against."""
    found = torch.zeros_like(tensor)
    for index in range(tensor.numel()):
        ends = []
        for step in (1e-6, -1e-6):
            moved = tensor.detach().clone()
            moved.view(-1)[index] += step
            ends.append(function(*given[:at], moved, *given[at + 1 :]).square().sum().item())
        found.view(-1)[index] = (ends[0] - ends[1]) / 2e-6
    return found


def test_levers_let_go_leave_every_module_as_its_class_has_it() -> None:
    model = tuned(LORA)
    before = {name for name, module in model.named_modules() if "forward" in vars(module)}
    apply_levers(model, replace(FUSED, mlp_tiles=2), kernels=FakeFusedKernels())
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} > before
    apply_levers(model, Levers(micro_batch=3))
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} == before


def test_pulled_again_the_levers_are_those_of_the_last_time() -> None:
    model = tuned(LORA)
    for levers in (replace(FUSED, mlp_tiles=3, recompute=2), Levers(micro_batch=3), replace(FUSED, recompute=1), FUSED):
        apply_levers(model, levers)
    found = take_gradients(model, cut(unequal_examples(), 3), forward=bind(model, is_fused=True))
    fresh = tuned(LORA)
    apply_levers(fresh, FUSED)
    assert_same_step(found, take_gradients(fresh, cut(unequal_examples(), 3), forward=bind(fresh, is_fused=True)))


def test_a_fused_adapter_that_is_switched_off_is_off() -> None:
    model = tuned(LORA)
    batch = collate(unequal_examples(), pad=1)
    apply_levers(model, FUSED)
    with torch.no_grad():
        on = bind(model, is_fused=True)(batch)
        with as_reference(model):
            off = bind(model, is_fused=True)(batch)
        plain = bind(tuned(LORA).unload())(batch)  # type: ignore[operator]
    torch.testing.assert_close(off, plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(on, off, atol=1e-3)


@pytest.mark.parametrize("kind", ["dora", "rank_stabilised"])
def test_other_kinds_of_adapters_are_computed_as_they_are(kind: str) -> None:
    tuning = LORA.model_copy(update={kind: True})
    model, plain = tuned(tuning), tuned(tuning)
    apply_levers(model, FUSED)
    batches = cut(unequal_examples(), 3)
    assert_same_step(take_gradients(model, batches, forward=bind(model, is_fused=True)), take_gradients(plain, batches))


KNOWN = [LlamaRMSNorm, LlamaMLP, LlamaAttention, Qwen3RMSNorm, Qwen3MLP, Qwen3Attention, Gemma3RMSNorm]
OTHERS = [Olmo2RMSNorm, Phi3MLP, nn.Linear, nn.LayerNorm, Gemma3MLP]
"""They compute something else; the gated MLP has another activation."""


@pytest.mark.parametrize("kind", [*KNOWN, *OTHERS])
def test_modules_are_known_by_their_code(kind: type[nn.Module]) -> None:
    module: Any = kind.__new__(kind)
    nn.Module.__init__(module)
    module.act_fn = nn.GELU(approximate="tanh") if kind is Gemma3MLP else nn.SiLU()
    assert (fused._known(module, FakeFusedKernels()) is not None) is (kind in KNOWN)


def test_a_base_in_four_bits_gives_the_gradients_of_its_own_layers() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    dense = nn.Linear(64, 64, bias=False)
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = bitsandbytes.nn.Params4bit(dense.weight.data, requires_grad=False, quant_type="nf4", module=layer)
    layer = layer.to("cpu")
    x = torch.randn(5, 64, requires_grad=True)
    down, up = torch.randn(3, 64, requires_grad=True), torch.randn(64, 3, requires_grad=True)
    weight = partial(fused.dense_weight, layer)
    out: Tensor = fused._Whole.apply(x, down, up, None, weight, 0.5, 0.0)  # type: ignore[no-untyped-call]
    wanted = x @ weight().t() + 0.5 * x @ down.t() @ up.t()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(out.square().sum(), (x, down, up))
    for found, right in zip(ours, torch.autograd.grad(wanted.square().sum(), (x, down, up)), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
