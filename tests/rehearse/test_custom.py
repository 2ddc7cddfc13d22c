"""The step of a model of the user's own on fake tensors: its memory, its gradients, and what cannot be rehearsed, by line."""

from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.errors import ModelError, SpecError
from finefit.model.custom_files import written
from finefit.plan.custom import require_own
from finefit.rehearse.allocator import replay
from finefit.rehearse.depth import rehearse_depth
from finefit.rehearse.rehearsal import Rehearsed, Scene, rehearse, survey
from finefit.spec.load import parse_spec
from finefit.spec.models import CustomModel, FolderModel, Full, Lora
from finefit.spec.schema import AdamW
from tests.own import CODE, CONFIG, make_own_project

LOSS = "    def loss(self, inputs):\n"
LARGE = CONFIG | {"width": 64, "depth": 4}


def scene(folder: Path, code: str = CODE, config: dict[str, Any] = CONFIG, **changes: Any) -> Scene:
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    asked = CustomModel(kind="custom", file="my_model.py", config=config, tokenizer=FolderModel(kind="folder", path="t"))
    plain: dict[str, Any] = {
        "config": written(asked, folder).as_config(),
        "tuning": Lora(kind="lora", rank=2),
        "optimizer": AdamW(lr=1e-3),
        "device": "cpu",
        "capability": (0, 0),
        "precision": "fp32",
        "levers": Levers(micro_batch=2),
        "tokens": 40,
        "supervised": 8,
        "accumulates": True,
    }
    return Scene(**(plain | changes))


def allocated(found: Rehearsed) -> int:
    return replay(found.trace.stream(), expandable=True).allocated_bytes


def test_every_adapter_is_reached_and_validation_is_part_of_the_rehearsal(tmp_path: Path) -> None:
    found = rehearse(scene(tmp_path, validation=(30, 4)))
    assert found.unreached == ()
    assert "validation" in found.trace.peaks()
    assert survey(scene(tmp_path)).trainable_tensors == 8
    assert rehearse(scene(tmp_path, tuning=Full(kind="full"))).unreached == ()


def test_memory_grows_with_rows_and_tokens_and_shrinks_with_recomputation(tmp_path: Path) -> None:
    plain = scene(tmp_path, config=LARGE, tokens=200)
    small = allocated(rehearse(plain))
    more = allocated(rehearse(scene(tmp_path, config=LARGE, tokens=200, levers=Levers(micro_batch=4))))
    again = allocated(rehearse_depth(scene(tmp_path, config=LARGE, tokens=200, levers=Levers(micro_batch=2, recompute=4))))
    assert more > 1.5 * small
    assert again < 0.9 * small


def test_a_tensor_that_no_gradient_reaches_is_named_with_its_reason(tmp_path: Path) -> None:
    found = rehearse(scene(tmp_path, CODE.replace("hidden = block(hidden)", "hidden = block(hidden.detach())")))
    assert {name.split(".")[3] for name in found.unreached} == {"0"}
    assert any("has no part in the loss" in cause for cause in found.causes)
    detached = rehearse(scene(tmp_path, CODE.replace('reduction="sum")', 'reduction="sum").detach()')))
    assert len(detached.unreached) == 8


@pytest.mark.parametrize("statement", ["inputs['ids'].sum().item()", "inputs['ids'][inputs['ids'] > 3]", "bool(inputs['ids'].any())"])
def test_what_needs_a_value_is_named_by_line(statement: str, tmp_path: Path) -> None:
    line = CODE.split(LOSS)[0].count("\n") + 2
    with pytest.raises(ModelError, match=rf"my_model.py:{line} failed in loss") as told:
        rehearse(scene(tmp_path, CODE.replace(LOSS, f"{LOSS}        {statement}\n")))
    assert "shapes but no values" in told.value.remedy


def test_all_that_cannot_be_had_is_refused_at_once_and_by_name(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "objective": {"kind": "dpo"},
        "engine": {"kind": "fsdp2", "devices": 2},
        "tuning": {"kind": "lora", "base_bits": 4},
        "levers": {"loss_chunk": 8, "mlp_tiles": 2, "recompute": 1},
        "evaluate": [{"task": "hallucination"}, {"task": "exact_match"}],
    }
    path = make_own_project(tmp_path, code=CODE.replace("def generate(", "def speak("), **changes)
    spec = parse_spec(path.read_text(), where="spec.yaml", overrides=())
    assert isinstance(spec.model, CustomModel)
    config = written(spec.model, tmp_path).as_config()
    with pytest.raises(SpecError) as told:
        require_own(spec, config)
    for words in (
        "objective.kind dpo",
        "engine.kind fsdp2",
        "tuning.base_bits",
        "levers.loss_chunk 8",
        "levers.mlp_tiles 2",
        "evaluate hallucination asks how likely",
        "evaluate exact_match needs answers, and my_model.py has no generate",
    ):
        assert words in told.value.problem
    assert "recompute" not in told.value.problem
    require_own(spec, {"model_type": "llama"})
