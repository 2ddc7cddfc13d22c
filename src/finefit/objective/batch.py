"""What an objective is given and what it returns.

Shapes: B rows, T tokens, N supervised tokens, V vocabulary, R sequences, P preference pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Where rows stand that lie behind one another in one flat sequence, B = 1. None of them sees another."""

    position_ids_BT: Tensor
    """Start from 0 with every row."""
    boundaries_R1: Tensor
    """In int32 on the batch's device: row r lies from boundaries[r] to boundaries[r + 1]."""
    lengths: tuple[int, ...]
    """The same on the host, where it can be read without waiting for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Preference pairs are two sequences each: first all that are preferred, then their twins in the same order, R = 2 P. Padded and packed alike."""

    supervised: tuple[int, ...]
    """Of each sequence, on the host: so the log-probabilities of a batch are cut into those of its sequences."""
    reference_R: Tensor | None = None
    """Summed log-probabilities under the starting weights, in fp32, where they were computed before the first step."""

    @property
    def num_pairs(self) -> int:
        return len(self.supervised) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What a model is given beside its tokens: what the images of the rows show, or whatever a model of the user's own takes."""

    tensors: Mapping[str, Tensor]
    """By the names that the model knows them under."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """What has to be known without waiting for the device: sizes, lengths."""
    identity: str = ""
    """Names the content where tensors are too large to be read for that."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Extra":
        return replace(self, tensors={name: move(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right, or packed. Attention is causal, so no row sees its padding and no mask is needed."""

    input_ids_BT: Tensor
    positions_N: Tensor
    """Flat positions in B x T whose *next* token is supervised, row by row: only these meet the head."""
    targets_N: Tensor
    num_supervised: int
    num_tokens: int
    """Without padding."""
    packed: Packed | None = None
    paired: Paired | None = None
    """None where a row is one sequence."""
    lengths: tuple[int, ...] = ()
    """Of the sequences, without padding, on the host; for objectives that look at rows one by one."""
    supervised: tuple[int, ...] = ()
    """Of each sequence's tokens, in the same way."""
    extra: Extra | None = None
    """None where tokens are all that the model is given."""

    @property
    def num_rows(self) -> int:
        """Of the order: a pair is one of them."""
        return self.num_sequences if self.paired is None else self.paired.num_pairs

    @property
    def num_sequences(self) -> int:
        return self.input_ids_BT.shape[0] if self.packed is None else len(self.packed.lengths)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """Every tensor elsewhere: on a device, in pinned memory."""
        packed, paired = self.packed, self.paired
        if packed is not None:
            packed = replace(
                packed, position_ids_BT=move(packed.position_ids_BT), boundaries_R1=move(packed.boundaries_R1)
            )
        if paired is not None and paired.reference_R is not None:
            paired = replace(paired, reference_R=move(paired.reference_R))
        input_ids_BT, positions_N, targets_N = move(self.input_ids_BT), move(self.positions_N), move(self.targets_N)
        extra = None if self.extra is None else self.extra.moved(move)
        return replace(
            self,
            input_ids_BT=input_ids_BT,
            positions_N=positions_N,
            targets_N=targets_N,
            packed=packed,
            paired=paired,
            extra=extra,
        )


@dataclass(frozen=True, slots=True)
class LossSum:
    """Sum over what the loss is a mean of (supervised tokens, pairs), and how many there were. The division by the global count happens once, in the
    step."""

    total: Tensor
    count: int
    measures: dict[str, Tensor] = field(default_factory=dict)
    """Further sums over the same, without gradient: rewards, accuracies."""


Forward = Callable[[Batch], Tensor]
"""Logprobs_N of the batch's targets in fp32. Logits stay inside, so that they need never exist all at once."""


class Objective(Protocol):
    """What it needs beside the policy (a reference, a strength) is bound into it before the first step."""

    def __call__(self, forward: Forward, batch: Batch) -> LossSum: ...

    def count(self, batch: Batch) -> int:
        """What its loss is a mean of, known before anything is computed: the step divides by the sum of it over the global batch."""
        ...
