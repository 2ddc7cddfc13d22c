"""DPO as the step carries it out: no exact lever changes a gradient, and the reference is where training started."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer

from finefit.artifacts.records import Levers
from finefit.data.collate import collate
from finefit.data.examples import Example, Pair
from finefit.data.order import capacity_of
from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.model.adapter import freeze_reference
from finefit.model.attention import choose_attention
from finefit.objective.batch import Batch, Objective
from finefit.objective.losses import DpoLoss, paired_of, reference_from_batch, sequence_sums
from finefit.spec import schema
from finefit.spec.models import Lora
from finefit.step.forward import (
    bind,
    eval_without_grad,
    is_reference_cached,
    keep_reference_copy,
    make_objective,
    starting_reference,
)
from finefit.step.levers import apply_levers
from tests.conftest import make_model, make_tokenizer
from tests.data.conftest import render_one
from tests.micro_batches import micro_batches
from tests.step.conftest import FULL, LORA, RENDERER, Taken, take_gradients, trainable, tuned
from tests.step.trl_comparison import NUM_STEPS, FirstGradients, finefit_steps, trl_settings, weights_of

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
    return take_gradients(
        model, batches, objective=DpoLoss(beta=BETA, reference=starting_reference(model, forward)), forward=forward
    )


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
    apply_levers(model, levers)
    assert_same(taken(model, batches, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused"), plain)
    assert abs(plain.outcome.loss.item() - math.log(2)) > 1e-2


def _gone_on(goes_on: bool) -> nn.Module:
    """With an adapter that is away from its reference: from nothing, or from the copy of where it was."""
    model = tuned(LORA)
    if goes_on:
        keep_reference_copy(schema.Dpo(kind="dpo"), LORA.model_copy(update={"adapter": "before"}), model)
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
    objective, forward = DpoLoss(beta=BETA, reference=starting_reference(model, bind(model))), bind(model)
    for batch in micro_batches(make_pairs(), micro_batch=2, pad=RENDERER.pad):
        with eval_without_grad(model):
            found = objective(forward, batch)
        assert found.total.item() / found.count == pytest.approx(math.log(2), abs=1e-7)
        assert found.measures["margin"].item() == 0


def test_the_reference_leaves_mode_adapter_and_random_numbers_as_they_were() -> None:
    model = tuned(Lora(kind="lora", rank=4, dropout=0.5), dropout=0.5)
    (batch,) = micro_batches(make_pairs(), micro_batch=6, pad=RENDERER.pad)
    forward, before = bind(model), torch.get_rng_state()
    reference = starting_reference(model, forward)
    first, second = reference(batch), reference(batch)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert forward(batch).requires_grad
    assert not torch.allclose(forward(batch), forward(batch))  # dropout is on again


def test_what_stops_within_a_still_model_leaves_it_training() -> None:
    model = tuned(LORA)
    with pytest.raises(KeyError), eval_without_grad(model):
        raise KeyError
    assert model.training
    assert torch.is_grad_enabled()


def test_only_without_an_adapter_or_on_request_is_the_reference_kept() -> None:
    dpo = schema.Dpo(kind="dpo")
    assert not is_reference_cached(dpo, LORA)
    assert is_reference_cached(dpo, FULL)
    assert is_reference_cached(schema.Dpo(kind="dpo", reference="cached"), LORA)
    assert not is_reference_cached(schema.Sft(kind="sft"), FULL)


def test_an_adapter_that_goes_on_keeps_a_frozen_copy_and_a_new_one_does_not() -> None:
    dpo = schema.Dpo(kind="dpo")
    for tuning, copies in ((LORA, False), (LORA.model_copy(update={"adapter": "before"}), True)):
        model = tuned(LORA)
        size = len(trainable(model))
        keep_reference_copy(dpo, tuning, model)
        assert isinstance(model, peft.PeftModel)
        assert (len(model.peft_config) == 2) is copies
        assert len(trainable(model)) == size


def test_the_objective_of_a_spec_is_bound_to_its_strength_and_reference() -> None:
    model = tuned(LORA)
    found = make_objective(schema.Dpo(kind="dpo", beta=0.7), LORA, model, bind(model))
    kept = make_objective(schema.Dpo(kind="dpo", reference="cached"), LORA, model, bind(model))
    assert isinstance(found, DpoLoss)
    assert isinstance(kept, DpoLoss)
    assert (found.beta, kept.reference is reference_from_batch, found.reference is reference_from_batch) == (
        0.7,
        True,
        False,
    )


# finefit against TRL's DPOTrainer: the same pairs, the same tiny model, gradient accumulation on both sides.

BETA_TRL_DPO = 0.3
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


def _trainer(model: nn.Module, folder: Path, *, micro_batch: int, **more: Any) -> tuple[DPOTrainer, FirstGradients]:
    config = DPOConfig(**trl_settings(folder, micro_batch), max_grad_norm=0.0, beta=BETA_TRL_DPO)
    gradients = FirstGradients()
    rows = Dataset.from_list(PAIRS)
    return DPOTrainer(
        model=model, args=config, train_dataset=rows, processing_class=TOKENIZER, callbacks=[gradients], **more
    ), gradients


def _train_with_trl(trainer: DPOTrainer, gradients: FirstGradients) -> Trained:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    return Trained(
        first_gradients=gradients.taken,
        losses=[entry["loss"] for entry in logs],
        rewards=[
            tuple(entry[f"rewards/{name}"] for name in ("chosen", "rejected", "accuracies", "margins"))
            for entry in logs
        ],
        weights=weights_of(trainer.model),
    )


def _train_with_finefit(model: nn.Module, objective: Objective, pairs: Sequence[Pair], *, micro_batch: int) -> Trained:
    gradients, outcomes = finefit_steps(model, pairs, objective, micro_batch=micro_batch, clip=None)
    names = ("rewards_chosen", "rewards_rejected", "accuracy", "margin")
    return Trained(
        first_gradients=gradients,
        losses=[outcome.loss.item() for outcome in outcomes],
        rewards=[tuple(outcome.measures[name].item() for name in names) for outcome in outcomes],  # type: ignore[misc]
        weights=weights_of(model),
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
    # the log-probabilities of a row sum to about -100, where fp32 has steps of 8e-6, times beta
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6, abs=4e-6)
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
    objective = DpoLoss(beta=BETA_TRL_DPO, reference=starting_reference(model, bind(model)))
    _assert_same(_train_with_finefit(model, objective, _pairs(), micro_batch=micro_batch), theirs)


def test_an_adapter_that_goes_on_is_measured_from_its_start_as_trl_does(tmp_path: Path) -> None:
    trainer, gradients = _trainer(tuned(LORA), tmp_path, micro_batch=2)
    model = tuned(LORA)
    assert isinstance(model, peft.PeftModel)
    freeze_reference(model)
    for some in (model, trainer.model):
        _away(some)
    theirs = _train_with_trl(trainer, gradients)
    objective = DpoLoss(beta=BETA_TRL_DPO, reference=starting_reference(model, bind(model)))
    _assert_same(_train_with_finefit(model, objective, _pairs(), micro_batch=2), theirs)


def test_a_whole_model_is_measured_from_kept_numbers_as_trl_does_from_a_second_model(tmp_path: Path) -> None:
    policy = tuned(FULL)
    pairs = _with_numbers_of(tuned(FULL))
    _away(policy)
    trainer, gradients = _trainer(tuned(FULL), tmp_path, micro_batch=2, ref_model=tuned(FULL))
    trainer.model.load_state_dict(policy.state_dict())
    theirs = _train_with_trl(trainer, gradients)
    ours = _train_with_finefit(policy, DpoLoss(beta=BETA_TRL_DPO, reference=reference_from_batch), pairs, micro_batch=2)
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
