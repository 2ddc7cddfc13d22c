"""The process that counts a model's parameters, seen from outside. Elsewhere tests count in their own."""

from typing import Any

import pytest

from finefit.errors import ModelError
from finefit.pipeline.sizes import _counted as counted_apart
from finefit.pipeline.sizes import count
from tests.conftest import make_model


def _config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = make_model().config.to_dict()
    return config | changes


def test_a_process_of_its_own_counts_what_the_model_has() -> None:
    model = make_model()
    size = counted_apart(_config())
    assert size == count(_config())
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.largest_layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert size.outside == size.parameters - 2 * size.largest_layer


def test_a_model_that_cannot_be_counted_is_told_with_the_last_words_of_the_process() -> None:
    with pytest.raises(ModelError, match=r"a model of type no such model cannot be counted: .*no such model"):
        counted_apart(_config(model_type="no such model"))
