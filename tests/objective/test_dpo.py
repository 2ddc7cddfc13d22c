import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finefit.objective.batch import Batch, Paired
from finefit.objective.dpo import Dpo, from_batch

BATCH = Batch(
    input_ids_BT=torch.zeros(4, 4, dtype=torch.long),
    positions_N=torch.arange(7),
    targets_N=torch.arange(7),
    num_supervised=7,
    num_tokens=16,
    paired=Paired(supervised=(2, 1, 3, 1)),
)
"""Two pairs: the preferred answers have 2 and 1 supervised tokens, their twins 3 and 1."""
LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0, -1.0, -4.0])
START = torch.tensor([-4.0, -0.5, -1.0, -3.0])


def test_the_loss_is_that_of_the_paper_summed_over_pairs() -> None:
    found = Dpo(beta=0.5, reference=lambda _: START)(lambda _: LOGPROBS, BATCH)
    gained = [(-3.0 - -4.0) - (-3.0 - -1.0), (-0.5 - -0.5) - (-4.0 - -3.0)]
    wanted = sum(math.log(1 + math.exp(-0.5 * gain)) for gain in gained)
    assert found.total.item() == pytest.approx(wanted, rel=1e-6)
    assert found.count == 2


def test_rewards_accuracy_and_margin_are_sums_without_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    found = Dpo(beta=0.5, reference=lambda _: START)(lambda _: logprobs, BATCH)
    measures = {name: value.item() for name, value in found.measures.items()}
    assert measures == {"rewards_chosen": 0.5, "rewards_rejected": -1.5, "accuracy": 2.0, "margin": 2.0}
    assert found.total.requires_grad
    assert not any(value.requires_grad for value in found.measures.values())


def test_a_pair_that_stands_where_it_started_is_no_win() -> None:
    found = Dpo(beta=0.1, reference=lambda _: torch.tensor([-3.0, -0.5, -3.0, -4.0]))(lambda _: LOGPROBS, BATCH)
    assert found.total.item() / found.count == pytest.approx(math.log(2), abs=1e-7)
    assert found.measures["accuracy"].item() == 0


def test_the_preferred_answer_is_pushed_up_and_its_twin_down() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    Dpo(beta=0.5, reference=lambda _: START)(lambda _: logprobs, BATCH).total.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert (logprobs.grad[:3] < 0).all()
    assert (logprobs.grad[3:] > 0).all()


def test_both_halves_go_through_one_forward_after_the_reference() -> None:
    calls: list[str] = []

    def forward(batch: Batch) -> Tensor:
        calls.append("policy" if batch is BATCH else "another batch")
        return LOGPROBS

    def reference(_: Batch) -> Tensor:
        calls.append("reference")
        return START

    Dpo(beta=0.1, reference=reference)(forward, BATCH)
    assert calls == ["reference", "policy"]


def test_a_reference_that_was_kept_comes_with_the_batch_and_moves_with_it() -> None:
    kept = replace(BATCH, paired=Paired(supervised=(2, 1, 3, 1), reference_R=START))
    assert from_batch(kept.moved(lambda tensor: tensor + 1)).tolist() == (START + 1).tolist()
    assert from_batch(kept).tolist() == START.tolist()


def test_a_pair_is_one_row_of_two_sequences() -> None:
    assert (BATCH.num_rows, BATCH.num_sequences) == (2, 4)
    assert (replace(BATCH, paired=None).num_rows, Dpo(beta=0.1, reference=from_batch).count(BATCH)) == (4, 2)
