"""The worst batch that there can be, once, when the optimizer's state is there: what the card must hold is then known, at step 1 and not in the
night. Nothing is applied, and the random numbers go on as if it had not happened."""

import torch

from finefit.artifacts.measurements import Measurement, keep_measurement
from finefit.artifacts.records import Levers
from finefit.data.collate import worst_of
from finefit.facts.cards import find_kind
from finefit.step.optimize import optimizer_step
from finefit.step.state import random_state, restore_random
from finefit.train.batches import capacity_under, cut, on_device
from finefit.train.live import Live
from finefit.train.rescue import is_shortage


def measure(live: Live, levers: Levers) -> None:
    """Not where one of several ranks that ran out would leave the others waiting, nor where backward itself updates."""
    if live.ranks.size > 1 or levers.update == "inside":
        return
    rows = min(2 * levers.micro_batch, live.stage.global_batch, len(live.examples))
    worst, capacity = [worst_of(live.examples)] * rows, capacity_under(live, levers)
    batches = cut(live, worst, range(rows), "measure", micro_batch=levers.micro_batch, capacity=capacity)
    random_before = random_state()
    try:
        optimizer_step(
            [on_device(batch, live.stage.device) for batch in batches],
            forward=live.forward,
            objective=live.objective,
            optimizer=live.optimizer,
            clip=None,
            decide=lambda _: False,
            engine=live.engine,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        # no row need be as long as the longest and as much supervised as any, so training may go on all the same
        live.metrics.write(event="worst_does_not_fit", step=1, foretold_bytes=live.stage.foretold_bytes)
        live.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return
    finally:
        restore_random(random_before)
    kind = find_kind(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    found = Measurement(
        card=kind.name if kind else torch.cuda.get_device_name(),
        foretold_bytes=live.stage.foretold_bytes,
        measured_bytes=torch.cuda.max_memory_reserved(),
    )
    keep_measurement(found)
    live.metrics.write(
        event="measured",
        step=1,
        foretold_bytes=found.foretold_bytes,
        measured_bytes=found.measured_bytes,
        error=round(found.error, 5),
    )
