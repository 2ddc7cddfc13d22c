"""The objective that a spec asks for, bound to the model that is trained: training and rehearsal get theirs here."""

from collections.abc import Iterator
from contextlib import contextmanager

import peft
import torch
from torch import Tensor, nn

from finefit.errors import SpecError
from finefit.model.adapter import as_reference, freeze_reference
from finefit.objective.batch import Batch, Forward, Objective
from finefit.objective.dpo import Dpo, Reference, from_batch, paired_of, sequence_sums
from finefit.objective.sft import sft
from finefit.spec import schema


def make_objective(asked: schema.Objective, tuning: schema.Tuning, model: nn.Module, forward: Forward) -> Objective:
    match asked:
        case schema.Sft():
            return sft
        case schema.Dpo(beta=beta):
            return Dpo(beta=beta, reference=from_batch if is_cached(asked, tuning) else starting(model, forward))
        case schema.Router():
            raise SpecError("objective.kind: router is not offered yet")


def keep_start(asked: schema.Objective, tuning: schema.Tuning, model: nn.Module) -> None:
    """Before a checkpoint is restored: where training goes on from an adapter, a frozen copy of it stays. A new adapter is simply left out later."""
    goes_on = isinstance(tuning, schema.Lora) and tuning.adapter is not None
    if isinstance(asked, schema.Dpo) and goes_on and not is_cached(asked, tuning):
        assert isinstance(model, peft.PeftModel)
        freeze_reference(model)


def is_cached(asked: schema.Objective, tuning: schema.Tuning) -> bool:
    """Whether the reference is computed before the first step: without an adapter the starting weights are gone after it."""
    return isinstance(asked, schema.Dpo) and (asked.reference == "cached" or not isinstance(tuning, schema.Lora))


def starting(model: nn.Module, forward: Forward) -> Reference:
    """The same weights without what training adds to them: never a second model."""

    def reference(batch: Batch) -> Tensor:
        with still(model), as_reference(model):
            return sequence_sums(forward(batch), paired_of(batch))

    return reference


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; then the model is as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
