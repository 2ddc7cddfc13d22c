"""The input and the output of an objective.

Shapes: B rows, T tokens, N supervised tokens, V vocabulary, R sequences, P preference pairs.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Boundaries of rows that are concatenated into one flat sequence, B = 1. No row attends to another."""

    position_ids_BT: Tensor
    """Positions that start from 0 in every row."""
    boundaries_R1: Tensor
    """int32 on the batch's device: row r lies from boundaries[r] to boundaries[r + 1]."""
    lengths: tuple[int, ...]
    """The row lengths on the host, where they can be read without waiting for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Pairs of sequences, padded or packed: first all preferred ones, then the others in the same order, R = 2 P."""

    supervised: tuple[int, ...]
    """The number of supervised tokens of each sequence, on the host; splits a batch's log-probabilities into those of
    its sequences."""
    reference_R: Tensor | None = None
    """Summed log-probabilities under the starting weights, in fp32, if they were computed before the first step."""

    @property
    def num_pairs(self) -> int:
        return len(self.supervised) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Inputs of a model beside its tokens: images, or whatever a custom model takes."""

    tensors: Mapping[str, Tensor]
    """Keyed by the names of the model's arguments."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be known without waiting for the device, such as sizes and lengths."""
    identity: str = ""
    """Identifies the content where tensors are too large to be hashed."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Extra":
        return replace(self, tensors={name: move(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right, or packed. Attention is causal, so no row attends to padding and no mask is needed."""

    input_ids_BT: Tensor
    positions_N: Tensor
    """Flat positions in B x T whose *next* token is supervised, row by row: only these reach the head."""
    targets_N: Tensor
    num_supervised: int
    num_tokens: int
    """The number of tokens without padding."""
    packed: Packed | None = None
    paired: Paired | None = None
    """None if a row is one sequence."""
    lengths: tuple[int, ...] = ()
    """Lengths of the sequences without padding, on the host; for objectives that work row by row."""
    supervised: tuple[int, ...] = ()
    """The number of supervised tokens of each sequence, likewise on the host."""
    extra: Extra | None = None
    """None if the model takes only tokens."""

    @property
    def num_rows(self) -> int:
        """A pair is one row."""
        return self.num_sequences if self.paired is None else self.paired.num_pairs

    @property
    def num_sequences(self) -> int:
        return self.input_ids_BT.shape[0] if self.packed is None else len(self.packed.lengths)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """Every tensor on another device, or in pinned memory."""
        packed, paired = self.packed, self.paired
        if packed is not None:
            ids_BT, boundaries_R1 = move(packed.position_ids_BT), move(packed.boundaries_R1)
            packed = replace(packed, position_ids_BT=ids_BT, boundaries_R1=boundaries_R1)
        if paired is not None and paired.reference_R is not None:
            paired = replace(paired, reference_R=move(paired.reference_R))
        own: dict[str, Any] = {name: move(getattr(self, name)) for name in ("input_ids_BT", "positions_N", "targets_N")}
        extra = None if self.extra is None else self.extra.moved(move)
        return replace(self, **own, packed=packed, paired=paired, extra=extra)


@dataclass(frozen=True, slots=True)
class LossSum:
    """The sum over what the loss is a mean of (tokens, pairs), and their number. The step divides by the global
    count."""

    total: Tensor
    count: int
    measures: dict[str, Tensor] = field(default_factory=dict)
    """Further sums over the same tokens or pairs, without gradient: rewards, accuracies."""


Forward = Callable[[Batch], Tensor]
"""Computes Logprobs_N of the batch's targets in fp32. Logits stay inside, so that they never have to exist all at
once."""


class Objective(Protocol):
    """An objective. What it needs besides the policy (a reference, a coefficient) is bound into it before the first
    step."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum: ...

    def count(self, batch: Batch) -> int:
        """The number that its loss is a mean over, known before anything is computed: see `LossSum`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRow:
    """A row as a custom model gets it, with the tokens that its tokenizer and template make of prompt and answer."""

    tokens: NDArray[np.int64]
    supervised: NDArray[np.bool_]
    """Marks the tokens that are trained on; as long as `tokens`."""
    images: tuple[PIL.Image.Image, ...] = ()
    """RGB images, in the order of the row."""
    seed: int
    """The seed of all random numbers of this row: 0 <= seed < 2**63."""
    is_prompt: bool = False
    """Whether the model is to answer: the tokens are only a prompt, and none is supervised."""


def seed_of(run_seed: int, step: int | str, row: int) -> int:
    """`step` is a number in training and a word elsewhere."""
    return int.from_bytes(hashlib.sha256(f"{run_seed} {step} {row}".encode()).digest()[:8]) >> 1
