"""Whether rows are packed: by what data.packing asks for and what the model allows, with the reason in the plan."""

from typing import Any, Literal

import pytest

from finefit.artifacts.forecasts import Lengths
from finefit.errors import ModelError
from finefit.facts.cards import parse_card
from finefit.facts.machine import read_machine
from finefit.plan.forecast import decide_packing, make_forecast
from finefit.plan.target import find_target
from finefit.spec.load import parse_spec
from tests.rehearse.conftest import make_config

LLAMA = make_config(layers=2)
NARROW = make_config("mistral-7b", layers=2) | {"sliding_window": 64}
SPEC = """\
name: packed
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 8}
data: {train: [{path: train.jsonl}], packing: ASKED}
optimizer: {lr: 1e-4}
"""
Asked = Literal["auto", "best_fit", "none"]


@pytest.mark.parametrize(
    ("asked", "config", "device", "packs", "reason"),
    [
        ("auto", LLAMA, "cpu", True, "no padding, the same gradient"),
        ("auto", LLAMA, "cuda", True, "no padding, the same gradient"),
        ("best_fit", LLAMA, "cuda", True, "data.packing asks for it"),
        ("none", LLAMA, "cpu", False, "data.packing is none"),
        ("auto", NARROW, "cpu", False, "the longest row has 65 tokens, the model's window 64"),
        ("none", NARROW, "cpu", False, "data.packing is none"),
    ],
    ids=["auto", "auto on a card", "asked for", "none", "auto, not possible", "none, not possible"],
)
def test_rows_are_packed_where_that_is_asked_for_and_exact(
    asked: Asked, config: dict[str, Any], device: str, packs: bool, reason: str
) -> None:
    assert decide_packing(asked, config, 65, device) == (packs, reason)


def test_packing_that_is_asked_for_and_not_exact_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="best_fit, but the longest row has 65 tokens") as refused:
        decide_packing("best_fit", NARROW, 65, "cpu")
    assert "auto" in refused.value.remedy


@pytest.mark.parametrize("asked", ["best_fit", "none"])
def test_a_forecast_rehearses_and_names_the_packing_that_was_decided(asked: Asked) -> None:
    lengths = Lengths(num_rows=100, longest=256, mean=90.0, supervised=80, mean_supervised=30.0, source="counted")
    target = find_target(parse_card("RTX 4090"), read_machine(), "auto")
    found = make_forecast(parse_spec(SPEC.replace("ASKED", asked), where="spec.yaml"), LLAMA, lengths, target)
    assert found.levers.packing == (asked == "best_fit")
    assert "data.packing" in found.reasons["packing"]
    assert found.fits
