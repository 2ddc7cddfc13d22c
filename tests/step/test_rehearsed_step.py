"""The step reads no tensor on the host: it runs under FakeTensorMode exactly as it is."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from finefit.objective.batch import Batch
from finefit.objective.sft import sft
from finefit.spec.models import Tuning
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer, optimizer_tensors
from tests.step.conftest import ADAMW, LORA, TUNINGS, cut, trainable, tuned, unequal_examples


def _fake_model(tuning: Tuning, mode: FakeTensorMode) -> nn.Module:
    with torch.device("meta"):
        model = tuned(tuning)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                with mode:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                    )
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            with mode:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], *, precision: str) -> set[str]:
    """Names of the tensors that a gradient reached."""
    reached: set[str] = set()

    def decide(finite: Tensor) -> bool:
        assert isinstance(finite, FakeTensor)
        reached.update(name for name, p in model.named_parameters() if p.grad is not None)
        return True

    forward = bind(model, autocast=autocast_for("cpu", precision))
    outcome = optimizer_step(batches, forward=forward, objective=sft, optimizer=optimizer, clip=1.0, decide=decide)
    assert outcome.applied
    assert isinstance(outcome.loss, FakeTensor)
    return reached


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_steps_run_on_fake_tensors_and_reach_every_trainable_tensor(tuning: Tuning, precision: str) -> None:
    mode = FakeTensorMode()
    model = _fake_model(tuning, mode)
    optimizer = make_optimizer(model, ADAMW)
    with mode:
        batches = cut(unequal_examples(), 3)
        for _ in range(2):
            assert _step(model, optimizer, batches, precision=precision) == trainable(model).keys()
    slots = {name.rsplit("/", 1)[0] for name in optimizer_tensors(model, optimizer) if name.endswith("/exp_avg")}
    assert slots == trainable(model).keys()


def test_a_tensor_that_no_gradient_reaches_shows_in_the_fake_step() -> None:
    mode = FakeTensorMode()
    model = _fake_model(LORA, mode)
    with mode:
        model.register_parameter("idle", nn.Parameter(torch.empty(3)))
        reached = _step(model, make_optimizer(model, ADAMW), cut(unequal_examples(), 3), precision="fp32")
    assert trainable(model).keys() - reached == {"idle"}
