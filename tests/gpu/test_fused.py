"""On a card the fused kernels give the numbers of the modules that they stand for."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finefit.artifacts.records import Levers
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch
from finefit.objective.losses import sft_loss
from finefit.spec.models import Lora
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.levers import apply_levers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
}


def _batch() -> Batch:
    torch.manual_seed(1)
    ids = torch.randint(0, 1000, (3, 77))
    places = torch.cat([row * 77 + torch.arange(20, 76) for row in range(3)])
    return Batch(
        input_ids_BT=ids.cuda(),
        positions_N=places.cuda(),
        targets_N=ids.flatten()[places + 1].cuda(),
        num_supervised=len(places),
        num_tokens=231,
    )


def _taken(model: nn.Module, levers: Levers) -> tuple[float, dict[str, Tensor]]:
    from finefit.step.fused import kernels_here

    is_fused = levers.kernels == "fused"
    kernels = kernels_here("cuda") if is_fused else None
    assert is_fused == (kernels is not None)
    apply_levers(model, levers, kernels=kernels)
    gradients: dict[str, Tensor] = {}

    def note(_: Tensor) -> bool:
        gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return False

    forward = bind(model, loss_chunk=levers.loss_chunk, is_fused=is_fused, kernels=kernels)
    outcome = optimizer_step(
        [_batch()],
        forward=forward,
        objective=sft_loss,
        optimizer=make_optimizer(model, AdamW(lr=0.05), device="cuda"),
        clip=None,
        decide=note,
    )
    return outcome.loss.item(), gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [0, 3])
@pytest.mark.parametrize("chunk", [None, 50])
def test_fused_kernels_leave_loss_and_gradients_equal_in_fp32(name: str, recompute: int, chunk: int | None) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    base = MODELS[name]().cuda()
    trained = make_trainable(base, Lora(kind="lora", rank=8), name="tiny")
    for key, parameter in trained.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.1)
    levers = Levers(micro_batch=3, recompute=recompute, loss_chunk=chunk)
    loss, gradients = _taken(copy.deepcopy(trained), levers)
    fused_loss, fused = _taken(trained, replace(levers, kernels="fused"))
    assert fused_loss == pytest.approx(loss, rel=1e-5)
    assert fused.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            fused[key],
            gradient,
            rtol=1e-3,
            atol=1e-5 * float(gradient.abs().max()),
            msg=f"the gradients of {key} differ",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 152064])
def test_the_loss_kernel_gives_losses_and_derivatives(dtype: torch.dtype, vocabulary: int) -> None:
    from finefit.step.liger import LigerKernels

    torch.manual_seed(0)
    logits = (3 * torch.randn(33, vocabulary, device="cuda")).to(dtype)
    targets = torch.randint(0, vocabulary, (33,), device="cuda")
    wanted = logits.float().requires_grad_()
    losses = cross_entropy(wanted, targets, reduction="none")
    losses.sum().backward()  # type: ignore[no-untyped-call]
    found = LigerKernels().cross_entropy(logits, targets)
    torch.testing.assert_close(found, losses.detach(), rtol=1e-5, atol=1e-5)
    assert wanted.grad is not None
    torch.testing.assert_close(logits.float(), wanted.grad, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
