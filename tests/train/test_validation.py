"""Validation: means over all held-out rows, whatever the cut and however many ranks, without dropout and without a trace in the model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.data.collate import Collator
from finefit.data.pairs import Trained
from finefit.data.workers import Workers
from finefit.objective.batch import Batch, Forward, Objective
from finefit.objective.dpo import Dpo
from finefit.objective.sft import sft
from finefit.spec import schema
from finefit.spec.models import Lora
from finefit.step.engine import Alone
from finefit.step.forward import bind
from finefit.step.objective import starting
from finefit.train.ranks import OneRank
from finefit.train.validation import validate
from tests.step.conftest import LORA, RENDERER, tuned, unequal_examples
from tests.step.test_dpo import make_pairs


class _Rank(OneRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass
class _Noting(Alone):
    """Keeps what this rank gives to the sum over all."""

    given: list[Tensor] = field(default_factory=list)
    of_others: float = 0.0

    def sum(self, value: Tensor) -> Tensor:
        self.given.append(value)
        return value + self.of_others


def _live(
    model: nn.Module,
    rows: Sequence[Trained],
    *,
    objective: Objective = sft,
    asked: Any = None,
    forward: Forward | None = None,
    rank: int = 0,
    size: int = 1,
) -> Any:
    return SimpleNamespace(
        stage=SimpleNamespace(device="cpu", objective=asked or schema.Sft(kind="sft")),
        model=model,
        forward=forward or bind(model),
        objective=objective,
        engine=_Noting(of_others=float(size > 1)),
        ranks=_Rank(rank, size),
        validation=rows,
        collator=Collator(pad=RENDERER.pad),
        workers=Workers(1),
        compose=None,
    )


def _dpo_live(model: nn.Module, **rest: Any) -> Any:
    objective = Dpo(beta=0.2, reference=starting(model, bind(model)))
    return _live(model, make_pairs(), objective=objective, asked=schema.Dpo(kind="dpo"), **rest)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_loss_and_perplexity_are_those_of_every_supervised_token(micro_batch: int) -> None:
    model, rows = tuned(LORA), unequal_examples()
    found = validate(_live(model, rows), micro_batch)
    surprise, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor([row.tokens])).logits[0].double()
            for at in range(1, len(row.tokens)):
                if row.supervised[at]:
                    surprise -= logits[at - 1].log_softmax(-1)[row.tokens[at]].item()
                    count += 1
    assert found["validation_loss"] == pytest.approx(surprise / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(surprise / count), rel=1e-5)
    assert set(found) == {"validation_loss", "perplexity"}


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_pairs_have_accuracy_and_margin_in_place_of_perplexity(micro_batch: int) -> None:
    model = tuned(LORA)
    found, alone = validate(_dpo_live(model), micro_batch), [validate(_one_pair(model, at), 1) for at in range(6)]
    assert set(found) == {"validation_loss", "accuracy", "margin", "rewards_chosen", "rewards_rejected"}
    for name, value in found.items():
        assert value == pytest.approx(sum(part[name] for part in alone) / 6, rel=1e-5, abs=1e-6)
    assert 0 < found["accuracy"] < 1


def _one_pair(model: nn.Module, at: int) -> Any:
    live = _dpo_live(model)
    live.validation = make_pairs()[at : at + 1]
    return live


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize(
    "make", [lambda model, **rest: _live(model, unequal_examples()[:5], **rest), _dpo_live], ids=["sft", "dpo"]
)
def test_the_parts_of_all_ranks_are_the_whole_and_every_rank_calls_the_model_equally_often(
    make: Any, size: int
) -> None:
    model = tuned(LORA)
    whole = make(model)
    validate(whole, 2)
    parts, calls = [], []
    for rank in range(size):
        live = make(model, rank=rank, size=size)
        forward, counted = live.forward, [0]

        def counting(batch: Batch, forward: Forward = forward, counted: list[int] = counted) -> Tensor:
            counted[0] += 1
            return forward(batch)

        live.forward = counting
        validate(live, 2)
        parts.append(live.engine.given[0])
        calls.append(counted[0])
    assert len(set(calls)) == 1
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), whole.engine.given[0])


def test_dropout_is_off_and_on_again_and_random_numbers_stand_still() -> None:
    model = tuned(Lora(kind="lora", rank=4, dropout=0.5), dropout=0.5)
    before = torch.get_rng_state()
    assert validate(_live(model, unequal_examples()), 2) == validate(_live(model, unequal_examples()), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())


def test_a_validation_that_runs_out_of_memory_leaves_the_model_training() -> None:
    model = tuned(LORA)

    def out(_: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        validate(_live(model, unequal_examples(), forward=out), 2)
    assert model.training
    assert torch.is_grad_enabled()


def test_a_loss_beyond_all_numbers_has_no_perplexity() -> None:
    model = tuned(LORA)
    found = validate(
        _live(model, unequal_examples(), forward=lambda batch: torch.full((batch.num_supervised,), -1000.0)), 2
    )
    assert found == {"validation_loss": 1000.0}
