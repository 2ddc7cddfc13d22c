"""Before the first update the model is its own reference and the DPO loss is ln 2, whatever the rows; else the reference is another model."""

import math
from collections.abc import Sequence

from finefit.data.order import rows_of_step
from finefit.errors import FindingError
from finefit.objective.batch import Batch
from finefit.spec.schema import Dpo
from finefit.step.objective import is_cached, still
from finefit.step.state import random_state, restore_random
from finefit.train.batches import call_for, made, on_device
from finefit.train.live import Live

_NOISE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}
"""By which the log-probability of a token differs when the same weights see it in another batch, by precision."""
_EXACT = 1e-6
_ROWS = 4


def require_start(live: Live) -> None:
    """Asked of the first rows of the first step, one at a time, the same on every rank and without dropout. Random numbers go on as if nothing had
    been asked."""
    stage, asked = live.stage, live.stage.objective
    if not isinstance(asked, Dpo):
        return
    rows = rows_of_step(0, num_rows=len(live.examples), global_batch=stage.global_batch, seed=stage.seed)[:_ROWS]
    batches = list(made(live.workers, (call_for(live, live.examples, [row], 0) for row in rows)))
    loss, allowed = _mean_loss(live, batches), _tolerance(batches, asked.beta, stage.precision)
    live.metrics.write(event="dpo_start", found=loss if math.isfinite(loss) else str(loss), allowed=allowed)
    is_off = not abs(loss - math.log(2)) <= allowed  # so that NaN is off too
    if live.ranks.any(is_off):
        worst = next(found for found, off in live.ranks.gather((loss, is_off)) if off)
        raise _not_at_the_start(worst, allowed, is_from_file=is_cached(asked, stage.tuning))


def _mean_loss(live: Live, batches: Sequence[Batch]) -> float:
    random_before = random_state()
    with still(live.model):
        found = [live.objective(live.forward, on_device(batch, live.stage.device)) for batch in batches]
    restore_random(random_before)
    return sum(part.total.item() for part in found) / sum(part.count for part in found)


def _tolerance(batches: Sequence[Batch], beta: float, precision: str) -> float:
    """Errors of single tokens are of either sign, so those of a pair grow with the root of their number."""
    tokens = sum(batch.num_supervised for batch in batches) / len(batches)
    return _EXACT + beta * _NOISE[precision] * math.sqrt(tokens)


def _not_at_the_start(loss: float, allowed: float, *, is_from_file: bool) -> FindingError:
    anew = "remove reference.safetensors from the stage directory and give the same command again: it is made anew"
    return FindingError(
        f"before the first step the DPO loss is {loss:.6f}, and it must be ln 2 = {math.log(2):.6f} (to {allowed:.0e}): the model and its reference "
        "are the same weights there. So the reference is not where training starts, and the model would be held to something else",
        anew
        if is_from_file
        else "please report it with the spec; objective.reference: cached computes the reference beforehand",
    )
