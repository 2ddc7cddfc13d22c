from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax

from finefit.data.collate import collate
from finefit.errors import ModelError
from finefit.objective.batch import Batch
from finefit.spec.models import Tuning
from finefit.step.forward import autocast_for, bind
from tests.conftest import make_model
from tests.step.conftest import TUNINGS, tuned, unequal_examples


def _batch() -> Batch:
    return collate(unequal_examples(), pad=1)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("chunk", [None, 7, 10_000])
def test_logprobs_at_supervised_positions_are_those_of_the_full_forward(tuning: Tuning, chunk: int | None) -> None:
    model, batch = tuned(tuning), _batch()
    logprobs_N = bind(model, loss_chunk=chunk)(batch)
    full_BTV = model(input_ids=batch.input_ids_BT, attention_mask=(batch.input_ids_BT != 1).long()).logits
    wanted_N = log_softmax(full_BTV.flatten(0, 1)[batch.positions_N], dim=1).gather(1, batch.targets_N[:, None])[:, 0]
    torch.testing.assert_close(logprobs_N, wanted_N, rtol=1e-5, atol=1e-5)


def test_the_model_answers_with_full_logits_again_after_a_forward() -> None:
    model, batch = make_model(), _batch()
    bind(model)(batch)
    assert model(input_ids=batch.input_ids_BT).logits.shape[:2] == batch.input_ids_BT.shape


def test_a_head_that_fails_leaves_the_backbone_in_its_place() -> None:
    model, batch = make_model(), _batch()
    backbone = model.model
    with pytest.raises(IndexError):
        bind(model)(replace(batch, targets_N=batch.targets_N + 1000))
    assert model.model is backbone


def test_logprobs_are_fp32_under_bf16_too() -> None:
    model, batch = make_model(), _batch()
    found = {p: bind(model, autocast=autocast_for("cpu", p))(batch) for p in ("bf16", "fp32")}
    assert {logprobs.dtype for logprobs in found.values()} == {torch.float32}
    assert not torch.equal(found["bf16"], found["fp32"])


def test_a_model_without_a_backbone_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no backbone"):
        bind(nn.Linear(2, 2))
