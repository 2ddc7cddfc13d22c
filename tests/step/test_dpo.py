"""DPO as the step carries it out: no exact lever changes a gradient, and the reference is where training started."""

import math
import random
from typing import Any

import peft
import pytest
import torch
from torch import nn

from finefit.artifacts.records import Levers
from finefit.data.collate import micro_batches
from finefit.data.examples import Example
from finefit.data.packing import capacity_of
from finefit.data.pairs import Pair
from finefit.model.attention import choose_attention
from finefit.objective.batch import Batch
from finefit.objective.dpo import Dpo, from_batch
from finefit.spec import schema
from finefit.spec.models import Lora
from finefit.step.forward import bind
from finefit.step.levers import pull
from finefit.step.objective import is_cached, keep_start, make_objective, starting, still
from tests.step.conftest import FULL, LORA, RENDERER, Taken, take_gradients, trainable, tuned

BETA = 0.2
SIDES = (
    ((3, 2), (3, 9)),
    ((60, 5), (60, 50)),
    ((1, 90), (1, 4)),
    ((40, 40), (40, 39)),
    ((7, 1), (7, 2)),
    ((50, 30), (50, 3)),
)


def make_pairs(*, seed: int = 0) -> list[Pair]:
    """Six pairs whose sides have 2 to 90 supervised tokens."""
    chance = random.Random(seed)

    def side(prompt: int, answer: int) -> Example:
        return Example(
            tuple(chance.randrange(5, 200) for _ in range(prompt + answer)), (False,) * prompt + (True,) * answer
        )

    return [Pair(side(*chosen), side(*rejected)) for chosen, rejected in SIDES]


def taken(model: nn.Module, batches: list[Batch], **bound: Any) -> Taken:
    forward = bind(model, **bound)
    return take_gradients(model, batches, objective=Dpo(beta=BETA, reference=starting(model, forward)), forward=forward)


def assert_same(left: Taken, right: Taken) -> None:
    """In fp32, up to the order of sums: to a millionth of the whole gradient's norm."""
    torch.testing.assert_close(left.outcome.loss, right.outcome.loss, rtol=1e-6, atol=1e-6)
    assert left.gradients.keys() == right.gradients.keys()
    for name, gradient in left.gradients.items():
        atol = 1e-6 * right.outcome.grad_norm.item()
        torch.testing.assert_close(
            gradient, right.gradients[name], rtol=1e-6, atol=atol, msg=f"the gradients of {name} differ"
        )


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_any_cut_of_the_pairs_gives_the_same_gradient(micro_batch: int) -> None:
    model, pairs = tuned(LORA), make_pairs()
    whole = taken(model, micro_batches(pairs, micro_batch=len(pairs), pad=RENDERER.pad))
    assert_same(taken(model, micro_batches(pairs, micro_batch=micro_batch, pad=RENDERER.pad)), whole)
    assert min(gradient.abs().max() for gradient in whole.gradients.values()) > 1e-3


@pytest.mark.parametrize("loss_chunk", [1, 7, 1000])
def test_a_chunked_loss_gives_the_same_gradient(loss_chunk: int) -> None:
    """The chunks cross the borders of sequences and of pairs."""
    model, batches = tuned(LORA), micro_batches(make_pairs(), micro_batch=3, pad=RENDERER.pad)
    assert_same(taken(model, batches, loss_chunk=loss_chunk), taken(model, batches))


@pytest.mark.parametrize(
    "levers",
    [
        Levers(micro_batch=3, recompute=2),
        Levers(micro_batch=3, recompute=2, keep_attention=True),
        Levers(micro_batch=3, recompute=1, offload=True),
        Levers(micro_batch=3, mlp_tiles=3),
        Levers(micro_batch=3, kernels="fused", loss_chunk=7),
        Levers(micro_batch=3, kernels="fused", recompute=2),
    ],
    ids=["recomputed", "attention kept", "offloaded", "tiled", "fused", "fused and recomputed"],
)
@pytest.mark.parametrize("goes_on", [False, True], ids=["new adapter", "adapter that goes on"])
def test_no_lever_changes_the_gradient_or_takes_the_reference_for_the_policy(levers: Levers, goes_on: bool) -> None:
    batches = micro_batches(make_pairs(), micro_batch=3, pad=RENDERER.pad)
    plain = taken(_gone_on(goes_on), batches)
    model = _gone_on(goes_on)
    pull(model, levers)
    assert_same(taken(model, batches, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused"), plain)
    assert abs(plain.outcome.loss.item() - math.log(2)) > 1e-2


def _gone_on(goes_on: bool) -> nn.Module:
    """With an adapter that is away from its reference: from nothing, or from the copy of where it was."""
    model = tuned(LORA)
    if goes_on:
        keep_start(schema.Dpo(kind="dpo"), LORA.model_copy(update={"adapter": "before"}), model)
        torch.manual_seed(3)
        for parameter in trainable(model).values():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def test_packed_pairs_give_the_gradient_of_padded_ones() -> None:
    model, pairs = tuned(LORA), make_pairs()
    capacity = capacity_of(micro_batch=2, longest=110, supervised=90, rows_per_step=6, sides=2)
    packs = micro_batches(pairs, micro_batch=2, pad=RENDERER.pad, capacity=capacity)
    assert 1 < len(packs) < 4
    padded = taken(model, micro_batches(pairs, micro_batch=2, pad=RENDERER.pad))
    assert_same(taken(_packing(model), packs), padded)


def _packing(model: nn.Module) -> nn.Module:
    base: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    base.set_attn_implementation(choose_attention("cpu", (0, 0), "fp32", base.config, packing=True))
    return model


def test_a_new_adapter_is_its_own_reference_exactly() -> None:
    """Also where dropout is on in training: the reference is taken without."""
    model = tuned(Lora(kind="lora", rank=4, dropout=0.5), dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    objective, forward = Dpo(beta=BETA, reference=starting(model, bind(model))), bind(model)
    for batch in micro_batches(make_pairs(), micro_batch=2, pad=RENDERER.pad):
        with still(model):
            found = objective(forward, batch)
        assert found.total.item() / found.count == pytest.approx(math.log(2), abs=1e-7)
        assert found.measures["margin"].item() == 0


def test_the_reference_leaves_mode_adapter_and_random_numbers_as_they_were() -> None:
    model = tuned(Lora(kind="lora", rank=4, dropout=0.5), dropout=0.5)
    (batch,) = micro_batches(make_pairs(), micro_batch=6, pad=RENDERER.pad)
    forward, before = bind(model), torch.get_rng_state()
    reference = starting(model, forward)
    first, second = reference(batch), reference(batch)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert forward(batch).requires_grad
    assert not torch.allclose(forward(batch), forward(batch))  # dropout is on again


def test_what_stops_within_a_still_model_leaves_it_training() -> None:
    model = tuned(LORA)
    with pytest.raises(KeyError), still(model):
        raise KeyError
    assert model.training
    assert torch.is_grad_enabled()


def test_only_without_an_adapter_or_on_request_is_the_reference_kept() -> None:
    dpo = schema.Dpo(kind="dpo")
    assert not is_cached(dpo, LORA)
    assert is_cached(dpo, FULL)
    assert is_cached(schema.Dpo(kind="dpo", reference="cached"), LORA)
    assert not is_cached(schema.Sft(kind="sft"), FULL)


def test_an_adapter_that_goes_on_keeps_a_frozen_copy_and_a_new_one_does_not() -> None:
    dpo = schema.Dpo(kind="dpo")
    for tuning, copies in ((LORA, False), (LORA.model_copy(update={"adapter": "before"}), True)):
        model = tuned(LORA)
        size = len(trainable(model))
        keep_start(dpo, tuning, model)
        assert isinstance(model, peft.PeftModel)
        assert (len(model.peft_config) == 2) is copies
        assert len(trainable(model)) == size


def test_the_objective_of_a_spec_is_bound_to_its_strength_and_reference() -> None:
    model = tuned(LORA)
    found = make_objective(schema.Dpo(kind="dpo", beta=0.7), LORA, model, bind(model))
    kept = make_objective(schema.Dpo(kind="dpo", reference="cached"), LORA, model, bind(model))
    assert isinstance(found, Dpo)
    assert isinstance(kept, Dpo)
    assert (found.beta, kept.reference is from_batch, found.reference is from_batch) == (0.7, True, False)
