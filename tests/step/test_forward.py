import pytest
import torch

from finefit.data.collate import collate
from finefit.spec.schema import Tuning
from finefit.step.forward import autocast_for, bind
from tests.conftest import make_model
from tests.step.conftest import TUNINGS, tuned, unequal_examples


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_logits_at_supervised_positions_are_those_of_the_full_forward(tuning: Tuning) -> None:
    model, batch = tuned(tuning), collate(unequal_examples(), pad=1)
    logits_NV = bind(model)(batch.input_ids_BT, batch.positions_N)
    full_BTV = model(input_ids=batch.input_ids_BT, attention_mask=(batch.input_ids_BT != 1).long()).logits
    assert logits_NV.shape == (batch.num_supervised, 261)
    torch.testing.assert_close(logits_NV, full_BTV.flatten(0, 1)[batch.positions_N], rtol=1e-5, atol=1e-6)


def test_the_model_answers_with_full_logits_again_after_a_forward() -> None:
    model, batch = make_model(), collate(unequal_examples(), pad=1)
    bind(model)(batch.input_ids_BT, batch.positions_N)
    assert model(input_ids=batch.input_ids_BT).logits.shape[:2] == batch.input_ids_BT.shape


def test_a_forward_that_fails_leaves_no_hook_behind() -> None:
    model, batch = make_model(), collate(unequal_examples(), pad=1)
    with pytest.raises(IndexError):
        bind(model)(batch.input_ids_BT + 1000, batch.positions_N)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_bf16_is_autocast_and_fp32_is_not() -> None:
    model, batch = make_model(), collate(unequal_examples(), pad=1)
    found = {p: bind(model, autocast=autocast_for("cpu", p))(batch.input_ids_BT, batch.positions_N).dtype for p in ("bf16", "fp32")}
    assert found == {"bf16": torch.bfloat16, "fp32": torch.float32}
