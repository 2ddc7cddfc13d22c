"""What torch's own kernels take inside themselves and how fast they are, measured on a CUDA card: the facts behind
`finefit.rehearse.fake_kernels`.

`python bench/kernel_probe.py bench/results/kernel_probe.json` takes about a minute.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from finefit.rehearse.host_speed import measure_host

BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def peak_over(run: Callable[[], Any]) -> int:
    """Bytes above what was allocated before, at the worst moment inside `run`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def attention(
    batch: int, heads: int, kv_heads: int, tokens: int, width: int, dtype: torch.dtype, *, masked: bool
) -> dict[str, Any]:
    def made(count: int) -> Tensor:
        return torch.randn(batch, tokens, count, width, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()

    q, k, v = made(heads), made(kv_heads), made(kv_heads)
    mask = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device="cuda").tril() if masked else None
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": heads != kv_heads}
    choice = BACKENDS[torch._fused_sdp_choice(q, k, v, **options)]
    row = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "width": width,
        "dtype": str(dtype),
        "masked": masked,
    }
    q_bytes, k_bytes = q.numel() * q.element_size(), k.numel() * k.element_size()
    out = scaled_dot_product_attention(q, k, v, **options)
    gradient = torch.randn_like(out)
    out.backward(gradient)  # type: ignore[no-untyped-call]
    del out
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = scaled_dot_product_attention(q, k, v, **options)
    torch.cuda.synchronize()
    forward_peak = torch.cuda.max_memory_allocated() - before
    forward_kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(gradient)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    backward_peak = torch.cuda.max_memory_allocated() - before
    layout = list(out.stride())
    return row | {
        "kernel": choice,
        "out_stride": layout,
        "q_bytes": q_bytes,
        "k_bytes": k_bytes,
        "forward_kept": forward_kept,
        "forward_peak": forward_peak,
        "backward_peak": backward_peak,
        "gradients": q_bytes + 2 * k_bytes,
    }


def seconds_of(run: Callable[[], Any], *, repeats: int = 7) -> float:
    run()
    run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(4):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 4000)
    return statistics.median(times)


def product(m: int, k: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
    seconds = seconds_of(lambda: a @ b.t())
    return {
        "what": "product",
        "m": m,
        "k": k,
        "n": n,
        "dtype": str(dtype),
        "seconds": seconds,
        "tflops": 2 * m * k * n / seconds / 1e12,
    }


def elementwise(num_bytes: int) -> dict[str, Any]:
    a = torch.randn(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    seconds = seconds_of(lambda: a + b)
    return {"what": "add", "bytes": num_bytes, "seconds": seconds, "bytes_per_second": 3 * num_bytes / seconds}


def attention_time(tokens: int, batch: int) -> dict[str, Any]:
    q = torch.randn(batch, tokens, 28, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    k, v = (
        torch.randn(batch, tokens, 4, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(2)
    )
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradient = torch.randn_like(out)
    forward = seconds_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    backward = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    flops = 4 * batch * 28 * tokens * tokens * 128 / 2
    return {
        "what": "attention",
        "tokens": tokens,
        "batch": batch,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
    }


def launches() -> dict[str, Any]:
    """Seconds per operation where the host is the bound: tiny tensors, plain and through autograd's backward."""
    a = torch.randn(64, 64, device="cuda", requires_grad=True)
    torch.cuda.synchronize()

    def chain(count: int) -> Tensor:
        b = a
        for _ in range(count):
            b = b * 1.0001
        return b

    chain(100).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = chain(2000).sum()
    middle = time.perf_counter()
    out.backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    end = time.perf_counter()
    return {"what": "launch", "forward_seconds": (middle - began) / 2000, "backward_seconds": (end - middle) / 2000}


def others() -> dict[str, Any]:
    tokens, vocabulary, hidden = 2048, 151936, 2560
    logits = torch.randn(tokens, vocabulary, device="cuda", requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    found: dict[str, Any] = {"logits_bytes": logits.numel() * 4}
    found["cross_entropy_forward"] = peak_over(lambda: cross_entropy(logits, targets, reduction="none"))
    loss = cross_entropy(logits, targets, reduction="none").sum()
    found["cross_entropy_backward"] = peak_over(lambda: torch.autograd.grad(loss, logits))
    x = torch.randn(8, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found["x_bytes"] = x.numel() * 2
    found["dropout_forward"] = peak_over(lambda: torch.nn.functional.dropout(x, 0.1))
    indices = torch.arange(0, 8 * tokens, 2, device="cuda")
    selected = x.flatten(0, 1).index_select(0, indices)
    found["index_select_backward"] = peak_over(lambda: torch.autograd.grad(selected.sum(), x))
    table = torch.nn.Embedding(vocabulary, hidden, device="cuda")
    ids = torch.randint(0, vocabulary, (8, tokens), device="cuda")
    found["table_bytes"] = table.weight.numel() * 4
    embedded = table(ids).sum()
    found["embedding_backward"] = peak_over(lambda: torch.autograd.grad(embedded, table.weight))
    return found


def main() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    free, total = torch.cuda.mem_get_info()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},  # type: ignore[no-untyped-call]
        "context_bytes": total - free - torch.cuda.memory_reserved(),
    }
    bf16, fp32 = torch.bfloat16, torch.float32
    shapes = [
        (1, 28, 4, 2048, 128, bf16, False),
        (4, 28, 4, 2048, 128, bf16, False),
        (1, 28, 4, 8192, 128, bf16, False),
        (1, 32, 8, 4096, 128, bf16, False),
        (2, 32, 32, 4096, 128, bf16, False),
        (1, 9, 3, 2048, 64, bf16, False),
        (1, 8, 4, 4096, 256, bf16, False),
        (1, 8, 4, 4096, 256, bf16, True),
        (1, 8, 8, 4096, 256, bf16, True),
        (1, 32, 32, 4096, 128, bf16, True),
        (1, 32, 8, 2048, 128, fp32, False),
        (1, 32, 32, 2048, 128, fp32, False),
        (1, 28, 4, 1000, 128, bf16, False),
    ]
    result["attention"] = []
    for shape in shapes:
        for choice in ("default", "flash", "efficient"):
            if choice != "default" and (shape[6] or shape[5] is fp32):
                continue
            with (
                torch.nn.attention.sdpa_kernel(
                    {
                        "default": list(torch.nn.attention.SDPBackend.__members__.values())[1:],
                        "flash": [torch.nn.attention.SDPBackend.FLASH_ATTENTION],
                        "efficient": [torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION],
                    }[choice]
                )
                if choice != "default"
                else torch.enable_grad()
            ):
                try:
                    result["attention"].append(attention(*shape[:6], masked=shape[6]) | {"asked": choice})
                except RuntimeError as error:
                    result["attention"].append({"shape": str(shape), "asked": choice, "error": str(error)[:200]})
            torch.cuda.empty_cache()
    result["others"] = others()
    torch.cuda.empty_cache()
    sizes = [
        (512, 3584, 18944),
        (2048, 3584, 18944),
        (8192, 3584, 18944),
        (8192, 18944, 3584),
        (8192, 3584, 3584),
        (8192, 3584, 512),
    ]
    sizes += [
        (8192, 3584, 128),
        (8192, 128, 18944),
        (2048, 3584, 152064),
        (512, 3584, 16),
        (8192, 3584, 16),
        (8192, 16, 3584),
    ]
    result["rates"] = [product(*size, bf16) for size in sizes] + [product(4096, 4096, 4096, fp32)]
    result["rates"] += [elementwise(size << 20) for size in (1, 8, 64, 512)]
    result["host_operation_seconds"] = measure_host().operation_seconds
    result["rates"] += [attention_time(2048, 4), attention_time(8192, 1), attention_time(65536, 1), launches()]
    held = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    result["host_bytes_per_second"] = (1 << 28) / seconds_of(lambda: there.copy_(held, non_blocking=True))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
