"""What an objective is given and what it returns.

Shapes: B rows, T tokens, N supervised tokens, V vocabulary, R packed rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

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

    @property
    def num_rows(self) -> int:
        return self.input_ids_BT.shape[0] if self.packed is None else len(self.packed.lengths)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """Every tensor elsewhere: on a device, in pinned memory."""
        packed = self.packed
        if packed is not None:
            packed = replace(packed, position_ids_BT=move(packed.position_ids_BT), boundaries_R1=move(packed.boundaries_R1))
        return replace(self, input_ids_BT=move(self.input_ids_BT), positions_N=move(self.positions_N), targets_N=move(self.targets_N), packed=packed)


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
