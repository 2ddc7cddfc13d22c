"""The sizes that `finefit init` proposes have as many parameters as a model of that config."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finefit.drafts.sizes import SIZES, ProposedSize, size_named


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.id)
def test_the_counted_parameters_are_those_of_the_model(size: ProposedSize) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(**size.config)
        model = AutoModelForCausalLM.from_config(config)
    assert size.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-3)


def test_sizes_grow_and_are_named_by_their_parameters() -> None:
    parameters = [size.parameters for size in SIZES]
    assert parameters == sorted(parameters)
    for size in SIZES:
        assert float(size.id.rpartition("-")[2].rstrip("B")) == pytest.approx(size.parameters / 1e9, rel=0.07)


def test_a_size_is_found_by_its_id_in_any_case() -> None:
    assert size_named("qwen/qwen3-4b") == SIZES[2] == size_named(SIZES[2].id)
    assert size_named("Qwen/Qwen9") is None
