"""Every stand-in of the rehearsal takes as much memory as the kernel that it stands for. Run with `pytest -m gpu` on a
machine that has a card."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, embedding, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from finefit.rehearse.allocator import replay
from finefit.rehearse.fake_kernels import DeviceKernels, device_kernels
from finefit.rehearse.fake_layers import BitsAndBytesAdamW, FusedDropout, Int8Linear, Nf4Linear
from finefit.rehearse.recorder import Recorder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

Make = Callable[..., Tensor]
MIB = 1 << 20


def predicted(run: Callable[[Make], Any], kernels: DeviceKernels) -> int:
    """Peak of what `run` allocates beside the tensors that it is given, on fake tensors."""
    recorder = Recorder(kernels)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        recorder.phase = "step"
        recorder._with_workspace |= {"forward", "backward"}  # the card's are taken by an earlier product too
        kept = run(lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype))
    found = replay(recorder.trace.stream()).allocated_bytes
    del kept
    return found


def measured(run: Callable[[Make], Any]) -> int:
    warm = nn.Linear(
        64, 64, device="cuda", dtype=torch.bfloat16
    )  # the workspaces of cuBLAS and cuBLASLt are taken before
    warm(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    del warm

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made = torch.empty(*shape, device="cuda", dtype=dtype)
        return made.normal_() if dtype.is_floating_point else made.zero_()

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run(make)
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    del kept
    return found


def assert_near(expected: int, seen: int) -> None:
    assert abs(expected - seen) <= max(0.005 * seen, 64 << 10), f"{expected:,} predicted, {seen:,} measured"


class _Heads(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def _attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    kv_heads: int,
    tokens: int,
    width: int,
    value_width: int | None = None,
) -> Callable[[Make], Any]:
    def run(make: Make) -> Any:
        q, k, v = (
            make(2, tokens, count, wide).transpose(1, 2).requires_grad_()
            for count, wide in ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
        )
        out = attend(q, k, v)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        return q, k, v

    return run


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _real(backends: list[SDPBackend], *, is_grouped: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out.transpose(1, 2).contiguous()

    return attend


def _fake(kernels: DeviceKernels, groups: int = 1) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: kernels.attention(_Heads(groups), q, k, v, None)[0]


SHAPES = [(28, 4, 2048, 128), (32, 32, 1024, 128), (9, 3, 1000, 64), (8, 4, 2048, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_attention_takes_what_was_predicted(shape: tuple[int, int, int, int], kernel: Any) -> None:
    heads, kv_heads, _, _ = shape
    kernels = DeviceKernels(device="cuda", attention_kernel=kernel, workspace_bytes=0)
    real = _real([BACKENDS[kernel]], is_grouped=heads != kv_heads)
    fake = _fake(kernels, heads // kv_heads)
    assert_near(predicted(_attention(fake, *shape), kernels), measured(_attention(real, *shape)))


LATENT = [(16, 16, 2048, 192, 128), (16, 16, 1000, 192, 128), (128, 128, 512, 192, 128), (4, 4, 1024, 96, 64)]
"""Multi-head latent attention: that of DeepSeek-V2-Lite, of V3, and of narrower heads."""


@pytest.mark.parametrize("shape", LATENT, ids=str)
@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_attention_to_values_narrower_than_keys_takes_what_was_predicted(
    shape: tuple[int, int, int, int, int], kernel: Any
) -> None:
    kernels = DeviceKernels(device="cuda", attention_kernel=kernel, workspace_bytes=0)
    real = _real([BACKENDS[kernel]])
    assert_near(predicted(_attention(_fake(kernels), *shape), kernels), measured(_attention(real, *shape)))


@pytest.mark.parametrize("shape", LATENT, ids=str)
def test_values_narrower_than_keys_take_the_kernel_that_this_card_is_predicted_to_take(
    shape: tuple[int, int, int, int, int],
) -> None:
    """Without flash attention, which does not take them, torch's own order of kernels is followed."""
    kernels = device_kernels("cuda", torch.cuda.get_device_capability(), "bf16")
    heads, _, tokens, width, value_width = shape
    q = torch.empty(2, heads, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.empty(2, heads, tokens, value_width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, v, is_causal=True))
    assert BACKENDS[kernels.chosen(q, v, is_masked=False)] == chosen
    every = list(BACKENDS.values())
    assert_near(predicted(_attention(_fake(kernels), *shape), kernels), measured(_attention(_real(every), *shape)))


@pytest.mark.parametrize("widths", [(128, 128), (128, 64), (64, 128), (64, 32), (192, 128)], ids=str)
def test_efficient_attention_in_fp32_takes_what_was_predicted(widths: tuple[int, int]) -> None:
    kernels = DeviceKernels(device="cuda", attention_kernel="efficient", workspace_bytes=0)

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Make], Any]:
        step = _attention(attend, 8, 8, 1024, *widths)
        return lambda make: step(partial(make, dtype=torch.float32))

    real = _real([SDPBackend.EFFICIENT_ATTENTION])
    assert_near(predicted(run(_fake(kernels)), kernels), measured(run(real)))


def test_this_card_takes_the_attention_that_its_generation_is_predicted_to_take() -> None:
    chosen = device_kernels("cuda", torch.cuda.get_device_capability(), "bf16").attention_kernel
    q = torch.empty(1, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
    names = {int(SDPBackend.CUDNN_ATTENTION.value): "cudnn", int(SDPBackend.FLASH_ATTENTION.value): "flash"}
    assert names[torch._fused_sdp_choice(q, q, q, is_causal=True)] == chosen


def test_dropout_takes_what_was_predicted() -> None:
    stand_in = FusedDropout(0.1).train()
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def run(drop: Callable[[Tensor], Tensor]) -> Callable[[Make], Any]:
        def step(make: Make) -> Any:
            x = make(4, 2048, 1024).requires_grad_()
            out = drop(x)
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
            return x

        return step

    assert_near(predicted(run(stand_in), kernels), measured(run(lambda x: dropout(x, 0.1, training=True))))


def test_the_gradient_of_an_embedding_takes_no_more_than_was_predicted() -> None:
    """What it takes depends on how often a token repeats; the rehearsal knows no tokens and expects none to."""
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def step(make: Make) -> Any:
        table = make(50_000, 1024, dtype=torch.float32).requires_grad_()
        ids = make(8, 1024, dtype=torch.long)
        out = embedding(ids if ids.device.type == "cpu" else torch.randint(0, 50_000, (8, 1024), device="cuda"), table)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        return table

    expected, seen = predicted(step, kernels), measured(step)
    assert seen <= expected <= 1.05 * seen


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_four_bits_takes_what_was_predicted(bias: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def real(make: Make) -> Any:
        layer = bitsandbytes.nn.Linear4bit(2048, 8192, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4")
        weight = torch.randn(8192, 2048, dtype=torch.bfloat16, device="cuda")
        layer.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
        )
        layer = layer.to("cuda", torch.bfloat16).requires_grad_(False)  # a frozen bias has no gradient to be summed
        del weight
        torch.cuda.reset_peak_memory_stats()
        return _through(lambda x: layer(x).clone(), make), layer

    def fake(make: Make) -> Any:
        stand_in = _filled(Nf4Linear, bias=bias)
        return _through(stand_in, make), stand_in

    assert_near(predicted(fake, kernels), measured(real))


def _filled(kind: type[Nf4Linear] | type[Int8Linear], *, bias: bool) -> nn.Module:
    with torch.device("meta"):
        stand_in = kind(nn.Linear(2048, 8192, bias=bias, dtype=torch.bfloat16))
    return _put(stand_in.requires_grad_(False))


def _put(module: nn.Module) -> nn.Module:
    """Tensors where there were none, trained or not as before."""
    for slots in (slots for part in module.modules() for slots in (part._parameters, part._buffers)):
        for name, old in slots.items():
            if old is not None:
                new = torch.empty(old.shape, dtype=old.dtype)
                slots[name] = (
                    nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new  # type: ignore[assignment]
                )
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_in_eight_bits_takes_what_was_predicted(bias: bool) -> None:
    """Without outliers: none of these inputs is as large as 6."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def real(make: Make) -> Any:
        layer = bitsandbytes.nn.Linear8bitLt(2048, 8192, bias=bias, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(
            torch.randn(8192, 2048, dtype=torch.bfloat16), requires_grad=False, has_fp16_weights=False
        )
        layer = layer.to("cuda").requires_grad_(False)
        if bias:
            layer.bias.data = layer.bias.data.to(torch.bfloat16)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return _through(layer, lambda *shape, **given: make(*shape, **given).clamp_(-5, 5)), layer

    def fake(make: Make) -> Any:
        stand_in = _filled(Int8Linear, bias=bias)
        return _through(stand_in, make), stand_in

    assert_near(predicted(fake, kernels), measured(real))


def test_an_input_in_eight_bits_is_kept_though_its_layer_is_computed_again() -> None:
    """bitsandbytes holds it where recomputation does not see it."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def recomputed(layer: nn.Module) -> Callable[[Make], Any]:
        def step(make: Make) -> Any:
            x = make(4, 512, 2048).clamp_(-5, 5).requires_grad_()
            out = checkpoint(lambda y: layer(y * 0.5), x, use_reentrant=False)
            out.backward(torch.ones_like(out))
            return x, layer

        return step

    def real(make: Make) -> Any:
        layer = bitsandbytes.nn.Linear8bitLt(2048, 8192, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(
            torch.randn(8192, 2048, dtype=torch.bfloat16), requires_grad=False, has_fp16_weights=False
        )
        layer = layer.to("cuda")
        torch.cuda.reset_peak_memory_stats()
        return recomputed(layer)(make)

    assert_near(predicted(lambda make: recomputed(_filled(Int8Linear, bias=False))(make), kernels), measured(real))


def _through(layer: Callable[[Tensor], Tensor], make: Make) -> Tensor:
    x = make(4, 512, 2048).requires_grad_()
    out = layer(x)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    return x


@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW", "PagedAdamW8bit"])
def test_adamw_of_bitsandbytes_takes_what_was_predicted(kind: str) -> None:
    """Paged moments lie outside of torch's allocator, in the rehearsal as on the card."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kernels = device_kernels("cuda", (9, 0), "bf16")

    def run(optimizer_of: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Make], Any]:
        def step(make: Make) -> Any:
            parameters = [
                nn.Parameter(make(*shape, dtype=torch.float32)) for shape in ((4096, 1024), (1024,), (513, 300))
            ]
            optimizer = optimizer_of(parameters)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return parameters, optimizer

        return step

    def stand_in(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return BitsAndBytesAdamW(
            [{"params": parameters}], is_eight_bit=kind.endswith("8bit"), is_paged=kind.startswith("Paged")
        )

    assert_near(
        predicted(run(stand_in), kernels), measured(run(lambda p: getattr(bitsandbytes.optim, kind)(p, lr=1e-3)))
    )
