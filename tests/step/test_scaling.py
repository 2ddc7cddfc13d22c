import pytest
import torch
from torch import Tensor, nn

from finefit.artifacts.trainings import LossScale
from finefit.objective.sft import sft
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import optimizer_step
from finefit.step.scaling import after_good_step, after_overflow, can_fall, start
from finefit.step.state import make_optimizer
from tests.step.conftest import ADAMW, FULL, cut, trainable, tuned, unequal_examples


def test_only_fp16_is_scaled() -> None:
    assert (start("bf16"), start("fp32")) == (None, None)
    assert start("fp16") == LossScale(scale=65536.0, good_steps=0)


def test_the_scale_doubles_after_2000_good_steps_in_a_row() -> None:
    scale = LossScale(scale=8.0, good_steps=0)
    for count in range(1, 2000):
        scale = after_good_step(scale)
        assert scale == LossScale(scale=8.0, good_steps=count)
    assert after_good_step(scale) == LossScale(scale=16.0, good_steps=0)


def test_the_scale_does_not_grow_without_end() -> None:
    scale = LossScale(scale=1.0, good_steps=0)
    for _ in range(100):
        scale = after_good_step(LossScale(scale=scale.scale, good_steps=1999))
    assert scale.scale == 2.0**24


def test_an_overflow_halves_the_scale_and_begins_the_count_anew() -> None:
    assert after_overflow(LossScale(scale=65536.0, good_steps=1999)) == LossScale(scale=32768.0, good_steps=0)


def test_the_scale_never_falls_below_1() -> None:
    assert after_overflow(LossScale(scale=1.0, good_steps=3)) == LossScale(scale=1.0, good_steps=0)
    assert after_overflow(LossScale(scale=1.5, good_steps=3)).scale == 1.0
    assert [can_fall(LossScale(scale=s, good_steps=0)) for s in (1.0, 1.5, 2.0)] == [False, True, True]


def gradients(model: nn.Module, loss_scale: float, precision: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(_: Tensor) -> bool:
        found.update({name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None})
        return False

    optimizer_step(
        cut(unequal_examples(), 4),
        forward=bind(model, autocast=autocast_for("cpu", precision)),
        objective=sft,
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
