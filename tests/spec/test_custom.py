"""A model of the user's own in a spec: of several stages it is trained and evaluated, and what takes models apart refuses it by name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from finefit.spec.models import CustomModel
from finefit.spec.schema import Spec
from finefit.spec.stages import Pipeline
from tests.own import SPEC

TRAIN: dict[str, Any] = {key: SPEC[key] for key in ("tuning", "optimizer", "schedule", "global_batch")} | {
    "kind": "train",
    "data": {"train": [{"path": "train.jsonl"}]},
}


def pipeline(**stages: dict[str, Any]) -> Pipeline:
    return Pipeline.model_validate_json(json.dumps({"name": "own", "stages": stages}))


def test_a_spec_names_file_and_tokenizer_and_the_entry_is_build_by_default() -> None:
    spec = Spec.model_validate_json(json.dumps(SPEC))
    assert isinstance(spec.model, CustomModel)
    assert (spec.model.entry, spec.model.weights) == ("build", None)
    with pytest.raises(ValidationError, match="tokenizer"):
        CustomModel.model_validate({"kind": "custom", "file": "my_model.py"})


def test_a_stage_goes_on_with_the_model_of_another() -> None:
    found = pipeline(
        first=TRAIN | {"model": SPEC["model"], "tuning": {"kind": "full"}},
        second=TRAIN | {"model": {"kind": "stage", "name": "first"}},
    )
    assert found.order() == ("first", "second")


@pytest.mark.parametrize("model", [SPEC["model"], {"kind": "stage", "name": "first"}], ids=["named", "trained"])
def test_what_takes_models_apart_refuses_one_of_the_users_own(model: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"stage merged takes models of transformers"):
        pipeline(
            first=TRAIN | {"model": SPEC["model"]},
            merged={"kind": "merge_adapter", "model": model, "adapter": "a" if model["kind"] == "custom" else None},
        )
