"""What the comparisons with TRL's trainers share: their settings, their first gradients, and the same steps here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from torch import Tensor, nn
from transformers import TrainerCallback

from finefit.data.examples import Example, Pair
from finefit.objective.batch import Objective
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.optimize import StepOutcome, optimizer_step
from finefit.step.state import make_optimizer
from tests.micro_batches import micro_batches
from tests.step.conftest import RENDERER, trainable

NUM_STEPS = 3
GLOBAL_BATCH = 4


class FirstGradients(TrainerCallback):  # type: ignore[misc]
    """Takes down the gradients of the first step; the trainer has clipped them by then."""

    def __init__(self) -> None:
        self.taken: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if not self.taken:
            self.taken = gradients_of(model)


def trl_settings(folder: Path, micro_batch: int) -> dict[str, Any]:
    disable_progress_bars()
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": GLOBAL_BATCH // micro_batch,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def finefit_steps(
    model: nn.Module, rows: Sequence[Example | Pair], objective: Objective, *, micro_batch: int, clip: float | None
) -> tuple[dict[str, Tensor], list[StepOutcome]]:
    """The first step's gradients, and the outcome of every step."""
    optimizer, forward = make_optimizer(model, AdamW(lr=1e-2)), bind(model)
    taken: list[dict[str, Tensor]] = []

    def note(finite: Tensor) -> bool:
        taken.append(gradients_of(model))
        return bool(finite)

    outcomes = []
    for at in range(0, NUM_STEPS * GLOBAL_BATCH, GLOBAL_BATCH):
        batches = micro_batches(rows[at : at + GLOBAL_BATCH], micro_batch=micro_batch, pad=RENDERER.pad)
        outcomes.append(
            optimizer_step(batches, forward=forward, objective=objective, optimizer=optimizer, clip=clip, decide=note)
        )
    return taken[0], outcomes


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable(model).items()}
