"""What an objective is given and what it returns.

Shapes: B rows, T tokens, N supervised tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows padded on the right. Attention is causal, so no row sees its padding and no mask is needed."""

    input_ids_BT: Tensor
    positions_N: Tensor
    """Flat positions in B x T whose *next* token is supervised: only these meet the head."""
    targets_N: Tensor
    num_supervised: int
    num_tokens: int
    """Without padding."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """Sum over supervised tokens, and how many there were. The division by the global count happens once, in the step."""

    total: Tensor
    count: int


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(input_ids_BT, positions_N, targets_N) -> logprobs_N in fp32. Logits stay inside, so that they need never exist all at once."""

Objective = Callable[[Forward, Batch], LossSum]
