"""Proof that frozen weights did not move: an exact checksum of every frozen tensor's bytes, taken where they lie.

Eight bytes at a time are mixed with their position and summed in 64-bit integers, which wrap and do not round: the order of the sum does not matter,
and any single word that changes, or two that change places, change the sum.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finefit.errors import FinefitError

_WORD = 8
_PIECE_BYTES = 8 << 20
"""Looked at at once: what is needed besides is a few times that."""
_ODD, _FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_SHIFT = 29
_WITHOUT_SIGN = (1 << (64 - _SHIFT)) - 1
"""Of a word shifted right: torch fills with the sign, by which a word and its complement would come out alike."""

Sums = dict[str, str]
"""Kind, shape and checksum of frozen tensors by name."""


def frozen_digest(model: nn.Module) -> str:
    """Of all frozen tensors with their names; equal digests are equal bytes."""
    return digest_of(frozen_sums(model))


def digest_of(sums: Sums) -> str:
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()


def frozen_sums(model: nn.Module) -> Sums:
    """One word is read from the device for each tensor, all of them at once."""
    tensors = dict(_frozen(model))
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device  # what bitsandbytes notes of a packed weight lies on the host
    words = torch.stack([_checksum(tensor).to(device) for tensor in tensors.values()]).tolist()
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {word}"
        for (name, tensor), word in zip(tensors.items(), words, strict=True)
    }


def require_unmoved(before: Sums, model: nn.Module) -> bool | None:
    """None where nothing is frozen. A frozen tensor that moved is a fault of ours, or of a library below."""
    after = frozen_sums(model)
    if moved := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        more = f" and {len(moved) - 5} more" if len(moved) > 5 else ""
        raise FinefitError(
            f"{len(moved)} of {len(before)} frozen tensors changed during training: {', '.join(moved[:5])}{more}"
        )
    return True if before else None


def _frozen(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """With the scales of quantised weights, which are kept beside them. A tensor of two names is looked at once, of a divided one the
    part that lies here."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            part = (
                tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
            )  # as FSDP2 and ZeRO-3 divide
            yield name, part.detach()


def _checksum(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1).view(torch.uint8)
    for at, piece in enumerate(torch.split(flat, _PIECE_BYTES)):
        total += _mixed(_words(piece), first=at * (_PIECE_BYTES // _WORD)).sum()
    return total


def _words(piece: Tensor) -> Tensor:
    """Filled up with zeros; a copy, since a tensor need not begin where a word does."""
    whole = torch.zeros(-(-piece.numel() // _WORD) * _WORD, dtype=torch.uint8, device=piece.device)
    whole[: piece.numel()] = piece
    return whole.view(torch.int64)


def _mixed(words: Tensor, *, first: int) -> Tensor:
    places = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed = words.bitwise_xor_(places.mul_(_ODD)).mul_(_FACTOR)
    return mixed.bitwise_xor_((mixed >> _SHIFT).bitwise_and_(_WITHOUT_SIGN)).mul_(_FACTOR)
