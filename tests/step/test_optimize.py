import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from finefit.data.collate import collate
from finefit.objective.batch import Batch, Forward, LossSum
from finefit.objective.sft import sft
from finefit.spec.models import Tuning
from finefit.spec.schema import AdamW
from finefit.step.forward import bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer, optimizer_tensors
from tests.conftest import Bent
from tests.step.conftest import (
    ADAMW,
    FULL,
    LORA,
    TUNINGS,
    Taken,
    assert_same_step,
    cut,
    step,
    take_gradients,
    trainable,
    tuned,
    unequal_examples,
)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradients(tuning: Tuning, micro_batch: int) -> None:
    model, examples = tuned(tuning), unequal_examples()
    whole = take_gradients(model, cut(examples, 8))
    assert min(gradient.abs().max() for gradient in whole.gradients.values()) > 1e-3
    assert_same_step(take_gradients(model, cut(examples, micro_batch)), whole)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_loss_and_gradients_are_those_of_masked_labels_over_full_logits(tuning: Tuning) -> None:
    model, examples = tuned(tuning), unequal_examples()
    width = max(len(e.tokens) for e in examples)
    input_ids = torch.tensor([[*e.tokens, *[1] * (width - len(e.tokens))] for e in examples])
    mask = torch.tensor([[1] * len(e.tokens) + [0] * (width - len(e.tokens)) for e in examples])
    labels = torch.tensor(
        [
            [t if s else -100 for t, s in zip(e.tokens, e.supervised, strict=True)] + [-100] * (width - len(e.tokens))
            for e in examples
        ]
    )
    logits = model(input_ids=input_ids, attention_mask=mask).logits
    total = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    loss = total / (labels != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}
    model.zero_grad()
    taken = take_gradients(model, cut(examples, 3))
    assert_same_step(taken, Taken(outcome=replace(taken.outcome, loss=loss.detach()), gradients=gradients))


@pytest.mark.parametrize("pad", [0, 1, 97])
def test_the_padding_token_never_changes_the_step(pad: int) -> None:
    model, examples = tuned(FULL), unequal_examples()
    alone = [collate([e], pad=0) for e in examples]
    assert_same_step(take_gradients(model, [collate(examples, pad=pad)]), take_gradients(model, alone))


def test_the_width_of_the_padding_never_changes_the_step() -> None:
    model, examples = tuned(LORA), unequal_examples()
    batch = collate(examples, pad=1)
    assert_same_step(take_gradients(model, [_widened(batch, 57)]), take_gradients(model, [batch]))


def _widened(batch: Batch, by: int) -> Batch:
    rows, width = batch.input_ids_BT.shape
    padding = torch.full((rows, by), 1)
    row, at = batch.positions_N // width, batch.positions_N % width
    return replace(
        batch, input_ids_BT=torch.cat([batch.input_ids_BT, padding], dim=1), positions_N=row * (width + by) + at
    )


@pytest.mark.parametrize("clip", [1e-3, 0.5, 1e6])
def test_the_applied_gradient_is_clipped_as_torch_clips_it(clip: float) -> None:
    model, batches = tuned(LORA), cut(unequal_examples(), 4)
    reference = deepcopy(model)
    gradients = take_gradients(model, batches).gradients
    for name, parameter in trainable(reference).items():
        parameter.grad = gradients[name]
    norm = torch.nn.utils.clip_grad_norm_(trainable(reference).values(), clip)
    torch.optim.SGD(trainable(reference).values(), lr=1.0).step()
    sgd = torch.optim.SGD(trainable(model).values(), lr=1.0)
    outcome = optimizer_step(batches, forward=bind(model), objective=sft, optimizer=sgd, clip=clip, decide=bool)
    torch.testing.assert_close(outcome.grad_norm, norm, rtol=1e-6, atol=0)
    for name, parameter in trainable(model).items():
        torch.testing.assert_close(parameter, trainable(reference)[name], rtol=1e-6, atol=1e-7)


def test_gradients_are_gone_after_a_step() -> None:
    model = tuned(FULL)
    assert step(model, make_optimizer(model, ADAMW), cut(unequal_examples(), 4)).applied
    assert all(p.grad is None for p in model.parameters())


def _nan_loss(forward: Forward, batch: Batch) -> LossSum:
    found = sft(forward, batch)
    return LossSum(found.total * math.nan, found.count)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_untouched(tuning: Tuning, fault: str) -> None:
    model, batches = tuned(tuning), cut(unequal_examples(), 2)
    optimizer = make_optimizer(model, AdamW(lr=1e-2, weight_decay=0.1))
    step(model, optimizer, batches)
    weights, state = deepcopy(model.state_dict()), deepcopy(optimizer_tensors(model, optimizer))
    if fault == "loss":
        outcome = step(model, optimizer, batches, objective=Bent(_nan_loss))
    else:
        last = next(reversed(trainable(model).values()))
        hook = last.register_hook(lambda gradient: torch.full_like(gradient, math.inf))  # type: ignore[no-untyped-call]
        outcome = step(model, optimizer, batches)
        hook.remove()
    assert not outcome.applied
    assert torch.isfinite(outcome.loss) == (fault == "gradient")
    _assert_equal_tensors(model.state_dict(), weights)
    _assert_equal_tensors(optimizer_tensors(model, optimizer), state)
    assert step(model, optimizer, batches).applied


def _assert_equal_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_weight_decay_acts_on_matrices_alone() -> None:
    model = tuned(FULL)
    groups = make_optimizer(model, AdamW(lr=1e-2, weight_decay=0.1)).param_groups
    assert [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in groups] == [(0.1, {2}), (0.0, {1})]
    assert sum(len(g["params"]) for g in groups) == len(trainable(model))


def test_only_trainable_tensors_are_in_the_optimizer() -> None:
    model = tuned(LORA)
    held = {id(p) for group in make_optimizer(model, ADAMW).param_groups for p in group["params"]}
    assert held == {id(p) for p in trainable(model).values()}


def test_training_learns_the_rows_by_heart() -> None:
    model: nn.Module = tuned(FULL)
    optimizer, batches = make_optimizer(model, ADAMW), cut(unequal_examples(), 4)
    losses = [step(model, optimizer, batches).loss.item() for _ in range(25)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_an_update_inside_backward_ends_where_one_after_it_does_and_holds_one_gradient_at_a_time(
    tuning: Tuning,
) -> None:
    after, inside = tuned(tuning), tuned(tuning)
    (batch,) = cut(unequal_examples(), 8)
    most: list[int] = []

    def count(_: Tensor) -> None:
        most.append(sum(p.grad is not None for p in trainable(inside).values()))

    for parameter in trainable(inside).values():
        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    ways = {id(after): "after", id(inside): "inside"}
    losses: dict[str, list[float]] = {"after": [], "inside": []}
    for model in (after, inside):
        optimizer = make_optimizer(model, AdamW(lr=1e-2, weight_decay=0.1))
        for _ in range(3):
            outcome = optimizer_step(
                [batch],
                forward=bind(model),
                objective=sft,
                optimizer=optimizer,
                clip=None,
                decide=bool,
                update=ways[id(model)],  # type: ignore[arg-type]
            )
            losses[ways[id(model)]] += [outcome.loss.item(), outcome.grad_norm.item()]
    assert losses["inside"] == pytest.approx(losses["after"], rel=1e-6)
    assert max(most) == 1
    for name, weight in after.state_dict().items():
        torch.testing.assert_close(inside.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def test_inside_backward_a_gradient_that_is_not_finite_leaves_its_tensor_alone() -> None:
    model = tuned(FULL)
    (batch,) = cut(unequal_examples(), 8)
    optimizer = make_optimizer(model, AdamW(lr=1e-2))
    name, last = next(reversed(trainable(model).items()))
    before = deepcopy(model.state_dict())
    last.register_hook(lambda gradient: torch.full_like(gradient, math.nan))  # type: ignore[no-untyped-call]
    outcome = optimizer_step(
        [batch], forward=bind(model), objective=sft, optimizer=optimizer, clip=None, decide=bool, update="inside"
    )
    assert not outcome.applied
    assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(
        model.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
