"""finefit against TRL's SFTTrainer: the same rows, the same tiny model, gradient accumulation on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from finefit.data.examples import Example
from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.objective.losses import sft_loss
from finefit.spec.models import Tuning
from tests.conftest import make_tokenizer
from tests.data.conftest import only_example
from tests.step.conftest import RENDERER, TUNINGS, trainable, tuned
from tests.step.trl_comparison import FirstGradients, finefit_steps, trl_settings, weights_of

PLAIN = [
    {"prompt": "add 1 and 2 = ", "completion": "three"},
    {"prompt": "x", "completion": "an answer that is a good deal longer than its prompt, and longer than the others"},
    {"prompt": "a prompt that is a good deal longer than its answer " * 4, "completion": "y"},
    {"prompt": "naïve ", "completion": "déjà vu"},
    {"prompt": "Q: why?\nA:", "completion": " because\nit is so"},
    {"prompt": "one two three ", "completion": "four five six seven"},
    {"prompt": "z" * 70, "completion": "z" * 70},
    {"prompt": "p", "completion": "q"},
    {"prompt": "count ", "completion": "1 2 3 4 5 6 7 8 9 10"},
    {"prompt": "the end of a ", "completion": "sentence."},
    {"prompt": "again ", "completion": "and again " * 9},
    {"prompt": "last ", "completion": "row"},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    first_gradients: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def _train_with_trl(
    model: nn.Module,
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
    folder: Path,
    *,
    micro_batch: int,
    clip: float | None,
) -> Trained:
    config = SFTConfig(
        **trl_settings(folder, micro_batch),
        max_grad_norm=clip or 0.0,
        completion_only_loss=True,
        packing=False,
        padding_free=False,
    )
    gradients = FirstGradients()
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=[gradients],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained(
        first_gradients=gradients.taken,
        losses=[entry["loss"] for entry in logs],
        grad_norms=[entry["grad_norm"] for entry in logs],
        weights=weights_of(trainer.model),
    )


def _train_with_finefit(
    model: nn.Module, examples: Sequence[Example], *, micro_batch: int, clip: float | None
) -> Trained:
    gradients, outcomes = finefit_steps(model, examples, sft_loss, micro_batch=micro_batch, clip=clip)
    return Trained(
        first_gradients=gradients,
        losses=[outcome.loss.item() for outcome in outcomes],
        grad_norms=[outcome.grad_norm.item() for outcome in outcomes],
        weights=weights_of(model),
    )


def _plain_examples(tokenizer: Any) -> list[Example]:
    renderer = Renderer(tokenizer, "plain")
    return [
        only_example(renderer, (Message("user", row["prompt"]), Message("assistant", row["completion"])))
        for row in PLAIN
    ]


def _chat_examples() -> list[Example]:
    """Two turns in every third row."""
    rows = []
    for at, row in enumerate(PLAIN):
        turns = (Message("user", row["prompt"]), Message("assistant", row["completion"]))
        rows.append(
            only_example(
                RENDERER,
                (Message("system", "Be brief."), *turns, Message("user", "more"), *turns[1:]) if at % 3 == 0 else turns,
            )
        )
    return rows


def _labelled(examples: Sequence[Example]) -> list[dict[str, Any]]:
    return [
        {"input_ids": list(e.tokens), "labels": [t if s else -100 for t, s in zip(e.tokens, e.supervised, strict=True)]}
        for e in examples
    ]


def _close(left: dict[str, Tensor], right: dict[str, Tensor], *, atol: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-6, atol=atol, msg=f"{name} differs")


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_loss_and_gradients_of_plain_rows_are_those_of_trl(tuning: Tuning, micro_batch: int, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat=False)
    theirs = _train_with_trl(tuned(tuning), PLAIN, tokenizer, tmp_path, micro_batch=micro_batch, clip=None)
    ours = _train_with_finefit(tuned(tuning), _plain_examples(tokenizer), micro_batch=4, clip=None)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6, abs=1e-6)
    assert min(gradient.abs().max() for gradient in ours.first_gradients.values()) > 1e-3
    _close(ours.first_gradients, theirs.first_gradients, atol=1e-6)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_loss_and_gradients_of_chat_rows_are_those_of_trl(tuning: Tuning, tmp_path: Path) -> None:
    examples = _chat_examples()
    theirs = _train_with_trl(tuned(tuning), _labelled(examples), make_tokenizer(), tmp_path, micro_batch=2, clip=None)
    ours = _train_with_finefit(tuned(tuning), examples, micro_batch=1, clip=None)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6, abs=1e-6)
    _close(ours.first_gradients, theirs.first_gradients, atol=1e-6)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_weights_after_three_clipped_steps_are_those_of_trl(tuning: Tuning, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat=False)
    start = {name: p.detach().clone() for name, p in trainable(tuned(tuning)).items()}
    theirs = _train_with_trl(tuned(tuning), PLAIN, tokenizer, tmp_path, micro_batch=2, clip=1.0)
    ours = _train_with_finefit(tuned(tuning), _plain_examples(tokenizer), micro_batch=2, clip=1.0)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
    assert min(ours.grad_norms) > 1
    assert all((ours.weights[name] - start[name]).abs().max() > 0.01 for name in start)
    _close(ours.weights, theirs.weights, atol=1e-6)


def test_conversational_rows_are_tokenised_as_trl_does_up_to_the_end_of_the_turn(tmp_path: Path) -> None:
    """TRL also supervises the line break that the template writes after the end token; generation never gets that
    far."""
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in PLAIN
    ]
    config = SFTConfig(
        output_dir=str(tmp_path), completion_only_loss=True, max_length=None, use_cpu=True, bf16=False, report_to="none"
    )
    prepared = SFTTrainer(
        model=tuned(TUNINGS[0]), args=config, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer()
    ).train_dataset
    line_break = RENDERER.tokenizer("\n")["input_ids"]
    for row, theirs in zip(PLAIN, prepared, strict=True):
        ours = _labelled(
            [only_example(RENDERER, (Message("user", row["prompt"]), Message("assistant", row["completion"])))]
        )[0]
        assert [ours["input_ids"] + line_break, ours["labels"] + line_break] == [theirs["input_ids"], theirs["labels"]]
