"""Before the first step of a model of the user's own: its loss is proved to be a sum over rows, on two rows of the training set."""

from finefit.model.custom import own_of
from finefit.step.custom import require_sum
from finefit.step.objective import still
from finefit.step.shortage import is_shortage
from finefit.step.state import random_state, restore_random
from finefit.train.batches import cut, on_device
from finefit.train.live import Live

_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Of the sum: a mean of two rows is half of it."""


def prove_sum(live: Live) -> None:
    """The random numbers go on as if it had not happened."""
    own = own_of(live.model)
    if own is None or live.compose is None or len(live.examples) < 2:
        return
    (both,), parts = (
        [on_device(batch, live.stage.device) for batch in cut(live, live.examples, (0, 1), 0, micro_batch=size)]
        for size in (2, 1)
    )
    random_before = random_state()
    try:
        with still(live.model):
            require_sum(own, live.forward, both, parts, tolerance=_TOLERANCE[live.stage.precision])
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        live.metrics.write(event="sum_not_proved", step=0, note="two rows at once did not fit")
    finally:
        restore_random(random_before)
