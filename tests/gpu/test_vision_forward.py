"""Towers on a card: what the kernel for pieces of any length computes, takes and waits for. Run with `pytest -m gpu` on
a machine that has one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finefit.rehearse.fake_kernels import device_kernels
from finefit.vision import vision_forward_of
from finefit.vision.attention import _on_gpu, by_piece
from tests.gpu.test_fake_kernels import Make, assert_near, measured, predicted
from tests.gpu.waiting import waiting_forbidden
from tests.qwen_rows import QWENS, image_processor_of, mixed_rows
from tests.vision_models import make_vlm, vlm_processor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no CUDA device that has the kernel for rows of any length",
    ),
]

HEADS = 16
WIDTHS = {"Qwen2.5-VL": 80, "Qwen3-VL": 72, "Qwen3-VL-2B": 64}
CUTS = {"images": (3072, 1200, 3072), "windows": (64,) * 40 + (32, 64, 16) * 8, "one image": (4096,)}


class _Module(nn.Module):
    num_key_value_groups = 1
    is_causal = False


def _boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _through(has_kernel: Callable[..., bool], lengths: tuple[int, ...], given: list[Tensor]) -> list[Tensor]:
    """The answer and the gradients of query, key and value."""
    told: dict[str, Any] = {"cu_seq_lens_q": _boundaries(lengths).cuda(), "pieces": (lengths,), "scaling": 0.11}
    answer, _ = by_piece(sdpa_attention_forward, has_kernel, _Module(), given[0], given[1], given[2], None, **told)
    weights = torch.randn(answer.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return [answer.detach(), *torch.autograd.grad((answer.float() * weights).sum(), given)]


def _heads(width: int, patches: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(1, patches, HEADS, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in made]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
def test_the_kernel_gives_every_piece_what_it_gives_it_alone(width: int, lengths: tuple[int, ...]) -> None:
    """Against fp32, no further from it than attention in bf16 piece by piece is."""
    given = _heads(width, sum(lengths), torch.bfloat16)
    assert _on_gpu(*given)
    found, alone = _through(_on_gpu, lengths, given), _through(lambda *_: False, lengths, given)
    exact = _through(lambda *_: False, lengths, _heads(width, sum(lengths), torch.float32))
    for name, ours, theirs, wanted in zip(("answer", "query", "key", "value"), found, alone, exact, strict=True):
        error, usual = ((tensor.float() - wanted).norm() / wanted.norm() for tensor in (ours, theirs))
        assert error <= 1.5 * usual + 1e-4, f"{name}: {error:.2e}, piece by piece {usual:.2e}"


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("lengths", CUTS.values(), ids=CUTS)
def test_the_kernel_takes_what_was_predicted(width: int, lengths: tuple[int, ...]) -> None:
    kernels = replace(device_kernels("cuda", torch.cuda.get_device_capability(), "bf16"), workspace_bytes=0)
    on_card, on_host = _boundaries(lengths).cuda(), _boundaries(lengths)

    def run(attend: Callable[..., Any], boundaries: Tensor) -> Callable[[Make], Any]:
        def step(make: Make) -> Any:
            q, k, v = (make(1, sum(lengths), HEADS, width).transpose(1, 2).requires_grad_() for _ in range(3))
            answer, _ = attend(_Module(), q, k, v, None, cu_seq_lens_q=boundaries, pieces=(lengths,))
            answer.backward(torch.ones_like(answer))
            return q, k, v

        return step

    expected = predicted(run(partial(by_piece, kernels.attention, kernels.has_varlen), on_host), kernels)
    assert_near(expected, measured(run(partial(by_piece, sdpa_attention_forward, _on_gpu), on_card)))


@pytest.mark.parametrize("family", QWENS)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=str)
def test_rows_with_images_are_read_without_waiting_for_the_card(
    family: str, precision: torch.dtype, tmp_path: Path
) -> None:
    folder = make_vlm(family, tmp_path / family)
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=precision, device_map={"": 0})
    vision_forward = vision_forward_of(model.config)
    assert vision_forward is not None
    ids, extra = rows.input_ids.cuda(), rows.extra.moved(lambda tensor: tensor.cuda())
    for _ in range(2):  # the first call takes workspaces and handles
        torch.cuda.synchronize()
        with waiting_forbidden():
            hidden = vision_forward(model.model, ids, extra, use_cache=False).last_hidden_state
            hidden.square().mean().backward()
    assert not [name for name, parameter in model.model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("family", QWENS)
def test_a_card_reads_what_a_cpu_reads(family: str, tmp_path: Path) -> None:
    folder = make_vlm(family, tmp_path / family)
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    seen = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device)
        vision_forward = vision_forward_of(model.config)
        assert vision_forward is not None
        extra = rows.extra.moved(partial(Tensor.to, device=device))
        with torch.no_grad():
            hidden = vision_forward(model.model, rows.input_ids.to(device), extra, use_cache=False).last_hidden_state
        seen.append(hidden.float().cpu()[rows.is_own])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=1e-3)
    assert (seen[2] - seen[0]).norm() / seen[0].norm() < 0.02
