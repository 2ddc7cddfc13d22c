"""Preference pairs in a rehearsal: two sequences a row, a pass through the reference, and the fault that leaves a policy without gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.objective.batch import Batch, Forward
from finefit.rehearse.allocator import replay
from finefit.rehearse.clock import Rates, phase_seconds
from finefit.rehearse.depth import rehearse_depth
from finefit.rehearse.rehearsal import Rehearsed, rehearse
from finefit.rehearse.scene import Scene
from finefit.spec.models import Lora
from finefit.spec.schema import Dpo
from tests.rehearse.conftest import FULL, LORA, make_config, make_scene

PAIRS, CACHED = Dpo(kind="dpo"), Dpo(kind="dpo", reference="cached")
GOES_ON = Lora(kind="lora", rank=8, alpha=16, adapter="adapter")
RATES = Rates(half_flops=100e12, full_flops=10e12, bytes_per_second=1e12, launch_seconds=1e-6)


def _scene(**changes: Any) -> Scene:
    return make_scene(make_config(layers=2), **({"objective": PAIRS} | changes))


def _kept_after_forward(found: Rehearsed) -> int:
    last = max(at for at, instant in enumerate(found.trace.instants) if instant == "forward")
    return found.trace.components(last)["activations"]


def test_a_pair_takes_what_two_rows_do() -> None:
    rows = make_scene(make_config(layers=2), levers={"micro_batch": 2})
    assert _kept_after_forward(rehearse(_scene())) == _kept_after_forward(rehearse(rows))


def test_the_reference_is_a_pass_of_its_own_that_keeps_nothing_for_backward() -> None:
    peaks = rehearse(_scene()).trace.peaks()
    assert 0 < peaks["reference"] < peaks["backward"]
    assert "reference" not in rehearse(make_scene(make_config(layers=2))).trace.peaks()


def test_the_reference_comes_before_the_policy() -> None:
    """While nothing is kept for backward yet."""
    found = rehearse(_scene()).trace
    step = found.instants[found.marks["step"] :]
    assert step.index("reference") < step.index("forward")


def _reference_seconds(scene: Scene) -> float:
    return phase_seconds(rehearse(scene).trace, RATES)["reference"]


def test_a_reference_in_every_step_takes_about_as_long_as_the_forward_pass() -> None:
    phases = phase_seconds(rehearse(_scene()).trace, RATES)
    assert phases["reference"] == pytest.approx(phases["forward"] + phases["loss"], rel=0.35)


@pytest.mark.parametrize(("objective", "tuning"), [(CACHED, LORA), (PAIRS, FULL)], ids=["cached", "without an adapter"])
def test_a_kept_reference_is_computed_before_the_first_step_and_never_again(objective: Dpo, tuning: Any) -> None:
    scene = _scene(objective=objective, tuning=tuning)
    found = rehearse(scene).trace
    assert _reference_seconds(scene) == 0
    assert found.instants.index("reference") < found.instants.index("forward")
    assert found.peaks()["reference"] < found.peaks()["backward"]
    assert "reference" not in found.instants[found.marks["step"] :]


def test_going_on_from_an_adapter_holds_a_frozen_copy_of_it() -> None:
    fresh, going_on = (rehearse(_scene(tuning=tuning)) for tuning in (LORA, GOES_ON))
    held = [found.trace.components(found.trace.marks["step"] - 1) for found in (fresh, going_on)]
    assert held[1]["adapters"] == 2 * held[0]["adapters"]
    assert held[1]["optimizer"] == held[0]["optimizer"]
    assert going_on.unreached == ()


def test_a_kept_reference_needs_no_copy() -> None:
    fresh, cached = (rehearse(_scene(objective=CACHED, tuning=tuning)).trace for tuning in (LORA, GOES_ON))
    assert (
        cached.components(cached.marks["step"] - 1)["adapters"] == fresh.components(fresh.marks["step"] - 1)["adapters"]
    )


def test_validation_of_pairs_has_a_reference_too() -> None:
    """A pass more, but none of what it makes is left when the policy answers."""
    scene = _scene(validation=(512, 511))
    peaks = rehearse(scene).trace.peaks()
    assert 0 < peaks["validation"] < peaks["backward"]


DEEP: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"levers": {"recompute": 6, "loss_chunk": 256}},
    "cached": {"objective": CACHED, "levers": {"recompute": 6}},
    "goes on": {"tuning": GOES_ON},
}


@pytest.mark.parametrize("changes", DEEP.values(), ids=DEEP)
def test_a_few_layers_stand_for_all_with_pairs_too(changes: dict[str, Any]) -> None:
    scene = make_scene(make_config(layers=6), **({"objective": PAIRS} | changes))
    whole, stretched = (replay(found(scene).trace.stream()) for found in (rehearse, rehearse_depth))
    assert (stretched.allocated_bytes, stretched.reserved_bytes) == (whole.allocated_bytes, whole.reserved_bytes)


# the policy under no_grad


def _blind(forward: Forward) -> Forward:
    """As one writes it who means the reference."""

    def through(batch: Batch) -> Tensor:
        with torch.no_grad():
            return forward(batch)

    return through


def _blind_backbone(model: nn.Module) -> None:
    backbone = model.get_submodule("base_model.model.model")
    backbone.forward = torch.no_grad()(backbone.forward)


def _blind_layers(model: nn.Module) -> None:
    for layer in model.get_submodule("base_model.model.model").layers:  # type: ignore[union-attr]
        layer.forward = torch.no_grad()(layer.forward)


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "the whole call": {"bend": _blind},
    "the backbone": {"adjust": _blind_backbone},
    "its layers": {"adjust": _blind_layers},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("objective", [PAIRS, CACHED], ids=["auto", "cached"])
def test_a_policy_under_no_grad_is_found_and_named(fault: dict[str, Callable[..., Any]], objective: Dpo) -> None:
    """The reference is rightly computed so, and must not hide that the policy is too."""
    sound, found = rehearse(_scene(objective=objective)), rehearse(_scene(objective=objective), **fault)
    assert sound.unreached == ()
    assert len(found.unreached) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert found.causes
    assert all("is computed under no_grad" in cause for cause in found.causes)
