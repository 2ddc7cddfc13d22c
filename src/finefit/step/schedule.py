"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math
from typing import Literal


def learning_rate(
    step: int, *, peak: float, kind: Literal["cosine", "linear", "constant"], total_steps: int, warmup_steps: int
) -> float:
    """Of optimizer step `step`, which counts from 0. Warm-up rises to the peak; cosine and linear fall towards 0 after the last step."""
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    match kind:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
