from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv2d, conv3d, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finefit.vision.attention import by_piece, in_runs, patches_by_matmul

HEADS, WIDTH = 3, 8


Heads = tuple[Tensor, Tensor, Tensor]


def _heads(patches: int) -> Heads:
    torch.manual_seed(patches)
    query, key, value = (torch.randn(1, patches, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3))
    return query, key, value


def _boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _masked(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """All at once, under a mask that lets each piece see itself alone."""
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return scaled_dot_product_attention(q, k, v, attn_mask=piece[:, None] == piece[None], scale=0.3).transpose(1, 2)


class _Module(nn.Module):
    num_key_value_groups = 1
    is_causal = False


def _attend(lengths: tuple[int, ...], given: Heads, **changes: Any) -> Tensor:
    told: dict[str, Any] = {
        "cu_seq_lens_q": _boundaries(lengths),
        "pieces": (lengths,),
        "scaling": 0.3,
        "is_causal": False,
        "max_length_q": max(lengths),
    }
    answer, _ = by_piece(sdpa_attention_forward, lambda *_: False, _Module(), *given, None, **told | changes)
    return answer


@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (4, 4, 2, 4, 4, 2), (1, 7, 7, 3), (2, 9)])
def test_no_piece_sees_another(lengths: tuple[int, ...]) -> None:
    ours, theirs = _heads(sum(lengths)), _heads(sum(lengths))
    found, expected = _attend(lengths, ours), _masked(*theirs, lengths)
    assert found.shape == (1, sum(lengths), HEADS, WIDTH)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_neighbours_of_one_length_share_a_call() -> None:
    calls: list[tuple[int, ...]] = []

    def attend(*, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        calls.append(tuple(query.shape))
        return scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    in_runs(attend, *_heads(22), (4, 4, 4, 2, 4, 4))
    assert calls == [(3, HEADS, 4, WIDTH), (1, HEADS, 2, WIDTH), (2, HEADS, 4, WIDTH)]


def test_windows_and_images_are_told_apart_by_their_number() -> None:
    images, windows, given = (6, 6), (4, 2, 4, 2), _heads(12)
    for lengths in (images, windows):
        torch.testing.assert_close(_attend(lengths, given, pieces=(images, windows)), _masked(*given, lengths))


def test_the_kernel_is_given_boundaries_and_the_longest_piece() -> None:
    """On fake tensors, as a rehearsal for a card does."""
    lengths = (64, 64, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (
            torch.empty(1, 160, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        told: dict[str, Any] = {
            "cu_seq_lens_q": torch.zeros(4, dtype=torch.int32),
            "pieces": (lengths,),
            "scaling": 0.3,
        }
        answer, _ = by_piece(sdpa_attention_forward, lambda *_: True, _Module(), q, k, v, None, **told)
        answer.sum().backward()  # type: ignore[no-untyped-call]
    assert answer.shape == (1, 160, HEADS, WIDTH)
    assert all(tensor.grad is not None for tensor in (q, k, v))
    node = answer.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert (node._saved_max_q, node._saved_max_k, node._saved_is_causal, node._saved_scale) == (64, 64, False, 0.3)  # type: ignore[union-attr]


# Convolutions of towers, taken as products.


def _tower(*, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 8, kernel_size=4, stride=4, bias=bias).double()


def _tiles(height: int = 12, width: int = 8) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(12, 8), (15, 11)], ids=["whole patches", "pixels beyond them"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_convolution_and_has_its_gradients(size: tuple[int, int], bias: bool) -> None:
    proj, tiles = _tower(bias=bias), _tiles(*size).requires_grad_()
    wanted = conv2d(tiles, proj.weight, proj.bias, stride=4)
    patches_by_matmul(proj)
    found = proj(tiles)
    torch.testing.assert_close(found, wanted)
    inputs = [tiles, *proj.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), inputs), torch.autograd.grad(wanted.square().sum(), inputs)
    )


def test_what_a_norm_takes_of_it_lies_patch_by_patch() -> None:
    proj = _tower()
    assert not proj(_tiles()).flatten(2).transpose(1, 2).is_contiguous()
    patches_by_matmul(proj)
    assert proj(_tiles()).flatten(2).transpose(1, 2).is_contiguous()


def test_patches_that_come_cut_out_are_embedded_as_by_the_convolution() -> None:
    torch.manual_seed(0)
    proj, patches = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False), torch.randn(5, 3, 2, 4, 4)
    wanted = conv3d(patches, proj.weight, stride=(2, 4, 4)).flatten(1)
    patches_by_matmul(proj)
    torch.testing.assert_close(proj(patches), wanted)


def test_taken_twice_is_taken_once_and_what_is_no_convolution_stays() -> None:
    proj, other = _tower(), nn.Linear(3, 3)
    patches_by_matmul(proj)
    first = proj.forward
    patches_by_matmul(proj)
    patches_by_matmul(other)
    assert proj.forward is first
    assert "forward" not in vars(other)
