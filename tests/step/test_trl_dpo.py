"""finefit against TRL's DPOTrainer: the same pairs, the same tiny model, gradient accumulation on both sides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer

from finefit.data.collate import collate, micro_batches
from finefit.data.pairs import Pair
from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.model.adapter import freeze_reference
from finefit.objective.batch import Objective
from finefit.objective.dpo import Dpo, from_batch, paired_of, sequence_sums
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.objective import starting
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from tests.conftest import make_model, make_tokenizer
from tests.data.conftest import render_one
from tests.step.conftest import FULL, LORA, RENDERER, trainable, tuned

NUM_STEPS = 3
GLOBAL_BATCH = 4
BETA = 0.3
PAIRS = [
    {"prompt": "add 1 and 2 = ", "chosen": "three", "rejected": "four, I should think, or five"},
    {"prompt": "x", "chosen": "an answer that is a good deal longer than its prompt", "rejected": "short"},
    {"prompt": "a prompt that is a good deal longer than its answers " * 3, "chosen": "y", "rejected": "z"},
    {"prompt": "naïve ", "chosen": "déjà vu", "rejected": "deja vu"},
    {"prompt": "Q: why?\nA:", "chosen": " because\nit is so", "rejected": " because"},
    {"prompt": "one two three ", "chosen": "four five six seven", "rejected": "seven"},
    {"prompt": "z" * 70, "chosen": "z" * 70, "rejected": "y" * 7},
    {"prompt": "p", "chosen": "q", "rejected": "qq"},
    {"prompt": "count ", "chosen": "1 2 3 4 5 6 7 8 9 10", "rejected": "10 9 8 7 6 5 4 3 2 1"},
    {"prompt": "the end of a ", "chosen": "sentence.", "rejected": ""},
    {"prompt": "again ", "chosen": "and again " * 9, "rejected": "never"},
    {"prompt": "last ", "chosen": "row", "rejected": "column"},
]
TOKENIZER = make_tokenizer(chat=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    first_gradients: dict[str, Tensor]
    losses: list[float]
    rewards: list[tuple[float, float, float, float]]
    """Of the preferred, of the others, how often the former is larger, by how much."""
    weights: dict[str, Tensor]


class _Gradients(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.taken: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if not self.taken:
            self.taken = {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}


def _trainer(model: nn.Module, folder: Path, *, micro_batch: int, **more: Any) -> tuple[DPOTrainer, _Gradients]:
    disable_progress_bars()
    config = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=GLOBAL_BATCH // micro_batch,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=0.0,
        weight_decay=0.0,
        train_sampling_strategy="sequential",
        beta=BETA,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    gradients = _Gradients()
    rows = Dataset.from_list(PAIRS)
    return DPOTrainer(
        model=model, args=config, train_dataset=rows, processing_class=TOKENIZER, callbacks=[gradients], **more
    ), gradients


def _train_with_trl(trainer: DPOTrainer, gradients: _Gradients) -> Trained:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    return Trained(
        first_gradients=gradients.taken,
        losses=[entry["loss"] for entry in logs],
        rewards=[
            tuple(entry[f"rewards/{name}"] for name in ("chosen", "rejected", "accuracies", "margins"))
            for entry in logs
        ],
        weights={name: p.detach().clone() for name, p in trainable(trainer.model).items()},
    )


def _train_with_finefit(model: nn.Module, objective: Objective, pairs: Sequence[Pair], *, micro_batch: int) -> Trained:
    optimizer, forward = make_optimizer(model, AdamW(lr=1e-2)), bind(model)
    taken: list[dict[str, Tensor]] = []

    def note(finite: Tensor) -> bool:
        taken.append({name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None})
        return bool(finite)

    outcomes = []
    for at in range(0, NUM_STEPS * GLOBAL_BATCH, GLOBAL_BATCH):
        batches = micro_batches(pairs[at : at + GLOBAL_BATCH], micro_batch=micro_batch, pad=RENDERER.pad)
        outcomes.append(
            optimizer_step(batches, forward=forward, objective=objective, optimizer=optimizer, clip=None, decide=note)
        )
    names = ("rewards_chosen", "rewards_rejected", "accuracy", "margin")
    return Trained(
        first_gradients=taken[0],
        losses=[outcome.loss.item() for outcome in outcomes],
        rewards=[tuple(outcome.measures[name].item() for name in names) for outcome in outcomes],  # type: ignore[misc]
        weights={name: p.detach().clone() for name, p in trainable(model).items()},
    )


def _pairs() -> list[Pair]:
    renderer = Renderer(TOKENIZER, "plain")
    made = []
    for row in PAIRS:
        messages = (Message("user", row["prompt"]), Message("assistant", row["chosen"]))
        found = render_one(renderer, messages, num_given=1, rejected=(Message("assistant", row["rejected"]),))
        made.append(Pair(found.examples[0], found.rejected[0]))
    return made


def _away(model: nn.Module) -> None:
    """Training has gone some way from the reference."""
    torch.manual_seed(3)
    for parameter in trainable(model).values():
        parameter.data.add_(0.05 * torch.randn_like(parameter))


def _assert_same(ours: Trained, theirs: Trained, *, tolerance: float = 1e-6) -> None:
    """Gradients to `tolerance` of the norm of all of them."""
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6, abs=1e-6)
    assert ours.rewards[0] == pytest.approx(
        theirs.rewards[0], rel=1e-6, abs=5e-6
    )  # of sums of 100 nats, whose last bit is 8e-6
    assert min(abs(reward) for reward in ours.rewards[0]) > 1e-3  # a reference that is the policy would pass otherwise
    assert min(gradient.abs().max() for gradient in ours.first_gradients.values()) > 1e-4
    assert ours.first_gradients.keys() == theirs.first_gradients.keys()
    norm = torch.nn.utils.get_total_norm(list(theirs.first_gradients.values())).item()
    for name, gradient in ours.first_gradients.items():
        torch.testing.assert_close(
            gradient,
            theirs.first_gradients[name],
            rtol=1e-6,
            atol=tolerance * norm,
            msg=f"the gradients of {name} differ",
        )
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(
            tensor, theirs.weights[name], rtol=1e-4, atol=1e-5, msg=f"{name} differs after {NUM_STEPS} steps"
        )


def test_both_sides_are_the_tokens_of_trl(tmp_path: Path) -> None:
    trainer, _ = _trainer(_base(), tmp_path, micro_batch=2, peft_config=_lora_config())
    for ours, theirs in zip(_pairs(), trainer.train_dataset, strict=True):
        for side, name in ((ours.chosen, "chosen_ids"), (ours.rejected, "rejected_ids")):
            assert list(side.tokens) == theirs["prompt_ids"] + theirs[name]
            assert list(side.supervised) == [False] * len(theirs["prompt_ids"]) + [True] * len(theirs[name])


def _base() -> nn.Module:
    """As `tuned` has it below its adapter."""
    base: nn.Module = make_model()
    for parameter in base.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)
    return base


def _lora_config() -> peft.LoraConfig:
    adapted = tuned(LORA)
    assert isinstance(adapted, peft.PeftModel)
    config = adapted.peft_config["default"]
    assert isinstance(config, peft.LoraConfig)
    config.base_model_name_or_path = None
    return config


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_new_adapter_is_measured_from_the_model_without_it_as_trl_does(micro_batch: int, tmp_path: Path) -> None:
    trainer, gradients = _trainer(_base(), tmp_path, micro_batch=2, peft_config=_lora_config())
    model = tuned(LORA)
    trainer.model.load_state_dict(model.state_dict())
    theirs = _train_with_trl(trainer, gradients)
    objective = Dpo(beta=BETA, reference=starting(model, bind(model)))
    _assert_same(_train_with_finefit(model, objective, _pairs(), micro_batch=micro_batch), theirs)


def test_an_adapter_that_goes_on_is_measured_from_its_start_as_trl_does(tmp_path: Path) -> None:
    trainer, gradients = _trainer(tuned(LORA), tmp_path, micro_batch=2)
    model = tuned(LORA)
    assert isinstance(model, peft.PeftModel)
    freeze_reference(model)
    for some in (model, trainer.model):
        _away(some)
    theirs = _train_with_trl(trainer, gradients)
    objective = Dpo(beta=BETA, reference=starting(model, bind(model)))
    _assert_same(_train_with_finefit(model, objective, _pairs(), micro_batch=2), theirs)


def test_a_whole_model_is_measured_from_kept_numbers_as_trl_does_from_a_second_model(tmp_path: Path) -> None:
    policy = tuned(FULL)
    pairs = _with_numbers_of(tuned(FULL))
    _away(policy)
    trainer, gradients = _trainer(tuned(FULL), tmp_path, micro_batch=2, ref_model=tuned(FULL))
    trainer.model.load_state_dict(policy.state_dict())
    theirs = _train_with_trl(trainer, gradients)
    ours = _train_with_finefit(policy, Dpo(beta=BETA, reference=from_batch), pairs, micro_batch=2)
    _assert_same(ours, theirs, tolerance=5e-6)  # the kept sums were made in other batches, and are 100 nats large


def _with_numbers_of(model: nn.Module) -> list[Pair]:
    forward: Callable[..., Tensor] = bind(model)
    found = []
    for pair in _pairs():
        batch = collate([pair], pad=RENDERER.pad)
        with torch.no_grad():
            chosen, rejected = sequence_sums(forward(batch), paired_of(batch)).tolist()
        found.append(Pair(pair.chosen, pair.rejected, (chosen, rejected)))
    return found
