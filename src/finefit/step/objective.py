"""The objective that a spec asks for, bound to the model that is trained: training and rehearsal get theirs here."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import peft
import torch
from torch import Tensor, nn

from finefit.errors import SpecError
from finefit.model.adapter import as_reference, freeze_reference
from finefit.model.custom import own_of
from finefit.model.routers import heard, is_normalised, routers_of, top_k_of
from finefit.objective.batch import Batch, Forward, Objective
from finefit.objective.custom import own_loss
from finefit.objective.dpo import Dpo, Reference, from_batch, paired_of, sequence_sums
from finefit.objective.router import RouterLoss
from finefit.objective.sft import sft
from finefit.spec import schema
from finefit.spec.models import Lora, Tuning


def make_objective(asked: schema.Objective, tuning: Tuning, model: nn.Module, forward: Forward) -> Objective:
    if own_of(model) is not None:
        return own_loss
    match asked:
        case schema.Sft():
            return sft
        case schema.Dpo(beta=beta):
            return Dpo(beta=beta, reference=from_batch if is_cached(asked, tuning) else starting(model, forward))
        case schema.Router(balance=balance):
            return RouterLoss(balance=balance, listen=partial(heard, trained_routers(model)))


def trained_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a mixture, where they can be trained; else it is said why not."""
    routers = routers_of(model)
    if not routers:
        raise SpecError(
            f"objective.kind: router, and {_architecture(model)} has no routers: it is no mixture of experts",
            "build one with a stage of kind build_moe, or set objective: {kind: sft}",
        )
    if all(top_k_of(router) == 1 and is_normalised(router) for router in routers.values()):
        raise SpecError(
            "objective.kind: router, and one expert answers each token at full weight: whatever the router says, that weight is one, so the "
            "language-model loss gives it no gradient",
            "build the mixture with top_k: 2 or more, or with routing: weighted_sum",
        )
    if not any(router.weight.requires_grad for router in routers.values()):
        name = next(iter(routers)).rsplit(".", 2)
        raise SpecError(
            f"objective.kind: router, and tuning trains none of the {len(routers)} routers",
            f"set tuning: {{kind: subset, trainable: [{'.'.join(name[-2:])}]}}, or train all weights with tuning: {{kind: full}}",
        )
    return list(routers.values())


def _architecture(model: nn.Module) -> str:
    return type(model.get_base_model() if isinstance(model, peft.PeftModel) else model).__name__


def keep_start(asked: schema.Objective, tuning: Tuning, model: nn.Module) -> None:
    """Before a checkpoint is restored: where training goes on from an adapter, a frozen copy of it stays. A new adapter is simply left out later."""
    goes_on = isinstance(tuning, Lora) and tuning.adapter is not None
    if isinstance(asked, schema.Dpo) and goes_on and not is_cached(asked, tuning):
        assert isinstance(model, peft.PeftModel)
        freeze_reference(model)


def is_cached(asked: schema.Objective, tuning: Tuning) -> bool:
    """Whether the reference is computed before the first step: without an adapter the starting weights are gone after it."""
    return isinstance(asked, schema.Dpo) and (asked.reference == "cached" or not isinstance(tuning, Lora))


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
