"""Routers trained on a card: the step never waits for it, and gives the gradient of the CPU. Run with `pytest -m gpu`
on a machine that has one."""

import pytest
import torch

from finefit.artifacts.records import Levers
from finefit.data.collate import pack
from finefit.objective.batch import Batch
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import apply_levers
from tests.gpu.waiting import waiting_forbidden
from tests.step.conftest import cut, take_gradients, unequal_examples
from tests.step.test_mixtures import FAMILIES_ROUTER_STEP, mixture, objective_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _on_card(batches: list[Batch]) -> list[Batch]:
    return [batch.moved(lambda tensor: tensor.to("cuda")) for batch in batches]


@pytest.mark.parametrize("family", FAMILIES_ROUTER_STEP)
@pytest.mark.parametrize("recompute", [0, 2])
def test_the_routers_gradient_is_that_of_the_cpu(family: str, recompute: int) -> None:
    batches, here, there = cut(unequal_examples(), 3), mixture(family), mixture(family).cuda()
    apply_levers(there, Levers(micro_batch=3, recompute=recompute))
    wanted = take_gradients(here, batches, objective=objective_of(here))
    found = take_gradients(there, _on_card(batches), objective=objective_of(there))
    torch.testing.assert_close(found.outcome.loss.cpu(), wanted.outcome.loss, rtol=1e-4, atol=1e-4)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name].cpu(), gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES_ROUTER_STEP)
def test_loss_and_backward_of_packed_rows_wait_for_nothing(family: str) -> None:
    """Of padded ones transformers looks for packed rows among the positions, once for all layers, and waits for what it
    finds."""
    model = mixture(family, packing=True).cuda()
    (batch,) = _on_card([pack(unequal_examples())])
    forward, objective = bind(model, autocast=autocast_for("cuda", "bf16")), objective_of(model)
    objective(forward, batch).total.backward()  # type: ignore[no-untyped-call]
    with waiting_forbidden():
        objective(forward, batch).total.backward()  # type: ignore[no-untyped-call]
