import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import cross_entropy

from finefit.artifacts.stage_records import LossScale
from finefit.data.collate import collate
from finefit.errors import SpecError
from finefit.objective.batch import Batch, Forward, LossSum
from finefit.objective.losses import sft_loss
from finefit.spec.models import Tuning
from finefit.spec.schema import AdamW
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import (
    can_lower_scale,
    initial_loss_scale,
    learning_rate,
    optimizer_step,
    scale_after_good_step,
    scale_after_overflow,
)
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
    outcome = optimizer_step(batches, forward=bind(model), objective=sft_loss, optimizer=sgd, clip=clip, decide=bool)
    torch.testing.assert_close(outcome.grad_norm, norm, rtol=1e-6, atol=0)
    for name, parameter in trainable(model).items():
        torch.testing.assert_close(parameter, trainable(reference)[name], rtol=1e-6, atol=1e-7)


def test_gradients_are_gone_after_a_step() -> None:
    model = tuned(FULL)
    assert step(model, make_optimizer(model, ADAMW), cut(unequal_examples(), 4)).applied
    assert all(p.grad is None for p in model.parameters())


def _nan_loss(forward: Forward, batch: Batch) -> LossSum:
    found = sft_loss(forward, batch)
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
    adapted = tuned(LORA)  # and only what is trained is in the optimizer
    held = {id(p) for group in make_optimizer(adapted, ADAMW).param_groups for p in group["params"]}
    assert held == {id(p) for p in trainable(adapted).values()}


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
                objective=sft_loss,
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
        [batch], forward=bind(model), objective=sft_loss, optimizer=optimizer, clip=None, decide=bool, update="inside"
    )
    assert not outcome.applied
    assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(
        model.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )


Kind = Literal["cosine", "linear", "constant"]
KINDS: tuple[Kind, ...] = ("cosine", "linear", "constant")


def _rates(kind: Kind, *, total: int = 20, warmup: int = 4, peak: float = 0.5) -> list[float]:
    return [learning_rate(step, peak=peak, kind=kind, total_steps=total, warmup_steps=warmup) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_in_equal_steps_to_the_peak(kind: Kind) -> None:
    assert _rates(kind)[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert _rates(kind, warmup=0)[0] == 0.5
    assert set(_rates("constant")[4:]) == {0.5}


def test_linear_falls_in_equal_steps_to_zero_after_the_last_step() -> None:
    rates = _rates("linear")
    assert all(math.isclose(a - b, 0.5 / 16) for a, b in pairwise(rates[4:]))
    assert math.isclose(rates[-1], 0.5 / 16)
    assert learning_rate(20, peak=0.5, kind="linear", total_steps=20, warmup_steps=4) == 0


def test_cosine_is_half_way_at_half_time_and_zero_after_the_last_step() -> None:
    rates = _rates("cosine")
    assert math.isclose(rates[12], 0.25)
    assert math.isclose(rates[8], 0.25 * (1 + math.cos(math.pi / 4)))
    assert 0 < rates[-1] < 0.01
    assert math.isclose(learning_rate(20, peak=0.5, kind="cosine", total_steps=20, warmup_steps=4), 0, abs_tol=1e-12)


@given(kind=st.sampled_from(KINDS), total=st.integers(1, 300), share=st.floats(0, 0.99), peak=st.floats(1e-6, 1))
def test_it_never_falls_in_warm_up_nor_rises_after_it_and_stays_in_bounds(
    kind: Kind, total: int, share: float, peak: float
) -> None:
    warmup = int(share * total)
    rates = _rates(kind, total=total, warmup=warmup, peak=peak)
    assert all(0 < rate <= peak for rate in rates)
    assert all(a <= b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert max(rates) == peak


def test_only_fp16_is_scaled() -> None:
    assert (initial_loss_scale("bf16"), initial_loss_scale("fp32")) == (None, None)
    assert initial_loss_scale("fp16") == LossScale(scale=65536.0, good_steps=0)


def test_the_scale_doubles_after_2000_good_steps_in_a_row() -> None:
    scale = LossScale(scale=8.0, good_steps=0)
    for count in range(1, 2000):
        scale = scale_after_good_step(scale)
        assert scale == LossScale(scale=8.0, good_steps=count)
    assert scale_after_good_step(scale) == LossScale(scale=16.0, good_steps=0)


def test_the_scale_does_not_grow_without_end() -> None:
    scale = LossScale(scale=1.0, good_steps=0)
    for _ in range(100):
        scale = scale_after_good_step(LossScale(scale=scale.scale, good_steps=1999))
    assert scale.scale == 2.0**24


def test_an_overflow_halves_the_scale_down_to_1_and_begins_the_count_anew() -> None:
    assert scale_after_overflow(LossScale(scale=65536.0, good_steps=1999)) == LossScale(scale=32768.0, good_steps=0)
    assert scale_after_overflow(LossScale(scale=1.0, good_steps=3)) == LossScale(scale=1.0, good_steps=0)
    assert scale_after_overflow(LossScale(scale=1.5, good_steps=3)).scale == 1.0
    assert [can_lower_scale(LossScale(scale=s, good_steps=0)) for s in (1.0, 1.5, 2.0)] == [False, True, True]


def gradients(model: nn.Module, loss_scale: float, precision: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(_: Tensor) -> bool:
        found.update({name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None})
        return False

    optimizer_step(
        cut(unequal_examples(), 4),
        forward=bind(model, autocast=autocast_for("cpu", precision)),
        objective=sft_loss,
        optimizer=make_optimizer(model, ADAMW),
        clip=None,
        decide=note,
        loss_scale=loss_scale,
    )
    return found


def test_a_power_of_two_is_taken_out_of_fp32_gradients_without_a_trace() -> None:
    model = tuned(FULL)
    plain, scaled = gradients(model, 1.0, "fp32"), gradients(model, 65536.0, "fp32")
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_fp16_gradients_that_would_vanish_are_kept_by_the_scale() -> None:
    model = tuned(FULL)
    exact = gradients(model, 1.0, "fp32")
    for parameter in model.get_output_embeddings().parameters():  # type: ignore[operator]
        assert parameter.dtype == torch.float32
    errors = {}
    for scale in (2.0**-12, 1024.0):  # so small that fp16 rounds most to zero; well within it
        found = gradients(model, scale, "fp16")
        errors[scale] = max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
    assert errors[1024.0] < 0.02 < errors[2.0**-12]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_products_are_taken_in_the_precision_that_was_asked_for(precision: str, dtype: torch.dtype) -> None:
    with autocast_for("cpu", precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_cpu_updates_tensor_by_tensor_and_a_card_in_one_kernel() -> None:
    optimizer = make_optimizer(tuned(FULL), AdamW(lr=1e-3), device="cpu")
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (True, None)


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_what_needs_a_card_is_refused_by_name_without_one(kind: Any) -> None:
    with pytest.raises(SpecError) as caught:
        make_optimizer(tuned(FULL), AdamW(kind=kind, lr=1e-3), device="cpu")
    assert caught.value.problem == f"optimizer.kind {kind} needs a CUDA device"
    assert caught.value.remedy == "set optimizer.kind: adamw"


@pytest.mark.parametrize(
    ("kind", "name", "bits", "is_paged"),
    [
        ("adamw_8bit", "AdamW8bit", 8, False),
        ("paged_adamw", "PagedAdamW", 32, True),
        ("paged_adamw_8bit", "PagedAdamW8bit", 8, True),
    ],
)
def test_each_kind_is_its_own_optimizer_with_the_settings_that_were_asked_for(
    kind: Any, name: str, bits: int, is_paged: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    spec = AdamW(kind=kind, lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer: Any = make_optimizer(tuned(FULL), spec, device="cuda")
    assert type(optimizer).__name__ == name
    assert (optimizer.args.optim_bits, optimizer.is_paged) == (bits, is_paged)
    matrices, others = optimizer.param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    for group, decay in ((matrices, 0.1), (others, 0.0)):
        assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (
            3e-4,
            (0.8, 0.95),
            1e-6,
            decay,
        )


def test_moments_are_kept_in_what_their_weights_are_in() -> None:
    model = tuned(FULL)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(model, AdamW(lr=1e-3))
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


# The step reads no tensor on the host: it runs under FakeTensorMode exactly as it is.


def _fake_model(tuning: Tuning, mode: FakeTensorMode) -> nn.Module:
    with torch.device("meta"):
        model = tuned(tuning)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                with mode:
                    made[id(parameter)] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                    )
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            with mode:
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch], *, precision: str) -> set[str]:
    """Names of the tensors that a gradient reached."""
    reached: set[str] = set()

    def decide(finite: Tensor) -> bool:
        assert isinstance(finite, FakeTensor)
        reached.update(name for name, p in model.named_parameters() if p.grad is not None)
        return True

    forward = bind(model, autocast=autocast_for("cpu", precision))
    outcome = optimizer_step(batches, forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=decide)
    assert outcome.applied
    assert isinstance(outcome.loss, FakeTensor)
    return reached


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_steps_run_on_fake_tensors_and_reach_every_trainable_tensor(tuning: Tuning, precision: str) -> None:
    mode = FakeTensorMode()
    model = _fake_model(tuning, mode)
    optimizer = make_optimizer(model, ADAMW)
    with mode:
        batches = cut(unequal_examples(), 3)
        for _ in range(2):
            assert _step(model, optimizer, batches, precision=precision) == trainable(model).keys()
    slots = {name.rsplit("/", 1)[0] for name in optimizer_tensors(model, optimizer) if name.endswith("/exp_avg")}
    assert slots == trainable(model).keys()
