"""Rows of very unequal length, a tiny model to tune on them, and one step whose gradients are taken down before the
update."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finefit.data.examples import Example
from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch, Forward, Objective
from finefit.objective.losses import sft_loss
from finefit.spec.models import Full, Lora, Tuning
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.optimize import StepOutcome, optimizer_step
from finefit.step.state import make_optimizer
from tests.conftest import make_model, make_tokenizer
from tests.data.conftest import only_example
from tests.micro_batches import micro_batches

torch.set_num_threads(1)

LORA = Lora(kind="lora", rank=4, alpha=8)
FULL = Full(kind="full")
TUNINGS = (LORA, FULL)
ADAMW = AdamW(lr=1e-2)
RENDERER = Renderer(make_tokenizer(), "chat")
LETTERS = "abcdefghijklmnopqrstuvwxyz "
LENGTHS = ((3, 2), (200, 5), (1, 120), (40, 40), (7, 1), (150, 150), (2, 3), (60, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    outcome: StepOutcome
    gradients: dict[str, Tensor]


def unequal_examples(*, seed: int = 0) -> list[Example]:
    """Eight rows of 7 to 303 tokens, 2 to 151 of them supervised."""
    chance = random.Random(seed)

    def text(length: int) -> str:
        return "x" + "".join(chance.choice(LETTERS) for _ in range(length - 1))

    return [
        only_example(RENDERER, (Message("user", text(prompt)), Message("assistant", text(answer))))
        for prompt, answer in LENGTHS
    ]


def cut(examples: Sequence[Example], micro_batch: int) -> list[Batch]:
    return micro_batches(examples, micro_batch=micro_batch, pad=RENDERER.pad)


def tuned(tuning: Tuning, *, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Weights ten times as large as a fresh model's and adapters away from zero: every tensor gets a gradient worth
    comparing."""
    base = make_model(seed=seed, dropout=dropout)
    for parameter in base.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)
    model: nn.Module = make_trainable(base, tuning, name="tiny")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def take_gradients(
    model: nn.Module, batches: Sequence[Batch], *, objective: Objective = sft_loss, forward: Forward | None = None
) -> Taken:
    """One step that is not applied."""
    gradients: dict[str, Tensor] = {}

    def note(_: Tensor) -> bool:
        gradients.update({name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None})
        return False

    optimizer = make_optimizer(model, ADAMW)
    outcome = optimizer_step(
        batches, forward=forward or bind(model), objective=objective, optimizer=optimizer, clip=None, decide=note
    )
    return Taken(outcome=outcome, gradients=gradients)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], *, objective: Objective = sft_loss
) -> StepOutcome:
    return optimizer_step(batches, forward=bind(model), objective=objective, optimizer=optimizer, clip=1.0, decide=bool)


def assert_same_step(left: Taken, right: Taken) -> None:
    """In fp32, up to the order of sums."""
    torch.testing.assert_close(left.outcome.loss, right.outcome.loss, rtol=1e-6, atol=1e-6)
    assert left.gradients.keys() == right.gradients.keys()
    for name, gradient in left.gradients.items():
        torch.testing.assert_close(
            gradient, right.gradients[name], rtol=1e-6, atol=1e-6, msg=f"the gradients of {name} differ"
        )
