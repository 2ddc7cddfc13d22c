"""Before the first step of a custom model: its loss is checked to be a sum over rows, on two rows of the training set.
Otherwise the cut into micro-batches would change what is trained."""

from collections.abc import Sequence

from finefit.custom.model import CustomFamily, custom_family_of
from finefit.errors import is_out_of_memory
from finefit.objective.batch import Batch, Forward
from finefit.objective.custom import custom_loss
from finefit.step.forward import eval_without_grad
from finefit.step.state import random_state, restore_random
from finefit.train.batches import cut_batches, on_device
from finefit.train.context import TrainContext

_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Of the sum: a mean of two rows is half of it."""


def prove_sum(ctx: TrainContext) -> None:
    """Leaves the random number generators as they were."""
    family = custom_family_of(ctx.model)
    if family is None or ctx.compose is None or len(ctx.examples) < 2:
        return
    (both,), parts = (
        [on_device(batch, ctx.stage.device) for batch in cut_batches(ctx, ctx.examples, (0, 1), 0, micro_batch=size)]
        for size in (2, 1)
    )
    random_before = random_state()
    try:
        with eval_without_grad(ctx.model):
            require_sum(family, ctx.forward, both, parts, tolerance=_TOLERANCE[ctx.stage.precision])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        ctx.metrics.write(event="sum_not_proved", step=0, note="two rows at once did not fit")
    finally:
        restore_random(random_before)


def require_sum(
    family: CustomFamily, forward: Forward, both: Batch, parts: Sequence[Batch], *, tolerance: float
) -> None:
    """Sum and count of rows together equal the sums over each alone. To be called without gradients and dropout, on
    rows with the same seeds."""
    together, apart = custom_loss.count(both), sum(custom_loss.count(part) for part in parts)
    if together != apart:
        raise family.fault(
            f"counts {together} for {both.num_rows} rows together and {apart} for each alone: the cut into "
            "micro-batches would change the result"
        )
    whole, alone = forward(both).item(), sum(forward(part).item() for part in parts)
    if abs(whole - alone) > tolerance * max(abs(whole), abs(alone)):
        raise family.fault(
            f"has a loss of {whole:.6g} for {both.num_rows} rows together and of {alone:.6g} for each alone: give the "
            "sum over what count counts, never a mean, and let no row see another"
        )
