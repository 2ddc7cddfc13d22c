"""Attention over sequences that are concatenated in one tensor and do not see each other: the images of a batch and
their windows are handled here, packed rows in `model.attention`. One flash kernel is used if a GPU has it, otherwise
one call for each run of sequences of equal length. Boundaries come with the batch, and lengths also on the host, so
nothing waits for the device. The module also computes patch embedding as a matrix product.

H heads, P patches, W width of a head, N tiles, C channels, S pixels of a side, R patches of a side."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[Tensor, None]]
"""The call signature of transformers: (module, query_BHTW, key, value, mask, **settings) -> (answer_BTHW, None)."""
PIECES: Final = "_flash_by_piece"
"""Suffix of an attention's name. Transformers passes boundaries to attentions whose name contains flash; for any other
it reads them on the host."""


def attend_by_piece(tower: PreTrainedModel) -> None:
    """Switches the tower to attention by piece, which uses the tower's current attention for each piece. Idempotent."""
    name = str(tower.config._attn_implementation)
    if name.endswith(PIECES):
        return
    if name + PIECES not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name + PIECES, partial(by_piece, partial(_attend_as, name), _on_gpu))
    tower.config._attn_implementation = name + PIECES


def _attend_as(name: str, *given: Any, **settings: Any) -> tuple[Tensor, None]:
    """Looks the attention up at every call, because a name may be registered again."""
    attend: Attention = ALL_ATTENTION_FUNCTIONS["sdpa" if name == "eager" else name]
    return attend(*given, **settings)


def _on_gpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns False under deterministic algorithms, because the kernel's memory was not measured there."""
    if not query.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    capability = torch.cuda.get_device_capability(query.device)
    return capability >= (8, 0) and has_varlen(query, key, value, widest_head(capability))


def by_piece(
    attend: Attention,
    has_kernel: Callable[[Tensor, Tensor, Tensor], bool],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    cu_seq_lens_q: Tensor,
    pieces: Sequence[Sequence[int]] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Has the signature that transformers expects of such an attention; the geometry adds `pieces`: the lengths for
    each way in which the tower cuts. The model's own forward passes none, and waits for the device."""
    # identified by their number alone: windows are inside images, so the numbers are equal only if the pieces are
    # the same
    known = next((lengths for lengths in pieces if len(lengths) + 1 == cu_seq_lens_q.numel()), None)
    lengths: Sequence[int] = cu_seq_lens_q.diff().tolist() if known is None else known
    if has_kernel(query, key, value):
        how: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": False}
        return flash_varlen(query, key, value, cu_seq_lens_q, max(lengths), **how), None
    one = partial(attend, module, attention_mask=None, dropout=dropout, scaling=scaling, is_causal=False)
    return in_runs(one, query, key, value, lengths), None


def in_runs(attend: Attention, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Neighbours of equal length share a call. Query, key and value are 1 x H x P x W, the answer is 1 x P x H x W."""
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    sizes = [length * count for length, count in runs]
    answers = []
    for (length, count), *run in zip(
        runs, *(torch.split(tensor, sizes, dim=2) for tensor in (query, key, value)), strict=True
    ):
        q, k, v = (tensor.unflatten(2, (count, length)).squeeze(0).transpose(0, 1) for tensor in run)
        answers.append(attend(query=q, key=k, value=v)[0].flatten(0, 1))
    return torch.cat(answers).unsqueeze(0)


def widest_head(capability: tuple[int, int]) -> int:
    """Returns the widest head for which the flash kernel has a backward."""
    is_small = (8, 6) <= capability < (9, 0) or capability >= (12, 0)
    return 192 if is_small else 256


def has_varlen(query: Tensor, key: Tensor, value: Tensor, widest: int) -> bool:
    """Returns whether the flash kernel supports these: all in bf16 or all in fp16, of one width, which is a multiple of
    8."""
    width, cast = query.shape[-1], _autocast_dtype(query)
    is_half = {cast or tensor.dtype for tensor in (query, key, value)} in ({torch.bfloat16}, {torch.float16})
    return is_half and width <= widest and width % 8 == 0 and key.shape[-1] == value.shape[-1] == width


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    """Runs one kernel over all sequences; fewer key and value heads need no repetition. `boundaries` are int32 on the
    device; `longest` is the largest distance between two of them."""
    q_THW, k_THW, v_THW = (tensor.squeeze(0).transpose(0, 1) for tensor in autocast(query, key, value))
    answer: Tensor = torch.ops.aten._flash_attention_forward(
        q_THW, k_THW, v_THW, boundaries, boundaries, longest, longest, dropout, is_causal, False, scale=scaling
    )[0]
    return answer.unsqueeze(0)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts like SDPA casts its inputs; the kernels below it do not."""
    cast = _autocast_dtype(tensors[0])
    return tensors if cast is None else tuple(tensor.to(cast) for tensor in tensors)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def patches_by_matmul(proj: nn.Module) -> None:
    """Makes a convolution whose patches neither overlap nor leave gaps compute as a matrix product. Idempotent. A
    product has no workspace that cuDNN chooses at run time, and its output is contiguous by patch: otherwise a norm
    would copy strided channels in every layer of the tower."""
    products: Mapping[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {nn.Conv2d: _of_tiles, nn.Conv3d: _of_patches}
    product = products.get(type(proj))
    if product is not None and "forward" not in vars(proj):
        proj.forward = partial(product, proj)


def _of_patches(proj: nn.Conv3d, patches: Tensor) -> Tensor:
    """Computes patches that are already cut out and concatenated."""
    return linear(patches.flatten(1), proj.weight.flatten(1), proj.bias)


def _of_tiles(proj: nn.Conv2d, tiles_NCSS: Tensor) -> Tensor:
    """Returns N x H x R x R like a convolution, as a view of N x P x H. Pixels beyond the last whole patch are
    ignored."""
    down, across = proj.kernel_size
    tiles, channels, height, width = tiles_NCSS.shape
    rows, columns = height // down, width // across
    seen = tiles_NCSS[:, :, : rows * down, : columns * across].view(tiles, channels, rows, down, columns, across)
    patches = seen.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return linear(patches, proj.weight.flatten(1), proj.bias).transpose(1, 2).view(tiles, -1, rows, columns)
