"""The step of a model of the user's own on fake tensors: its memory, its gradients, and what cannot be rehearsed, by
line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.errors import ModelError, SpecError
from finefit.model.resolve_model import custom_source
from finefit.plan.forecast import require_custom
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.layer_kinds import memo_key, rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from finefit.spec.load import parse_spec
from finefit.spec.models import CustomModel, FolderModel, Full, Lora
from finefit.spec.schema import AdamW
from tests.custom_models import CODE, CONFIG, make_custom_project

LOSS = "    def loss(self, inputs):\n"
LARGE = CONFIG | {"width": 64, "depth": 4}


def cfg(folder: Path, code: str = CODE, config: dict[str, Any] = CONFIG, **changes: Any) -> StepConfig:
    (folder / "my_model.py").write_text(code, encoding="utf-8")
    asked = CustomModel(
        kind="custom", file="my_model.py", config=config, tokenizer=FolderModel(kind="folder", path="t")
    )
    plain: dict[str, Any] = {
        "config": custom_source(asked, folder).as_config(),
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
    return StepConfig(**(plain | changes))


def allocated(found: Rehearsal) -> int:
    return replay(found.trace.stream(), expandable=True).allocated_bytes


def test_every_adapter_is_reached_and_validation_is_part_of_the_rehearsal(tmp_path: Path) -> None:
    found = rehearse(cfg(tmp_path, validation=(30, 4)))
    assert found.unreached == ()
    assert "validation" in found.trace.peaks()
    assert measure_size(cfg(tmp_path)).trainable_tensors == 8
    assert rehearse(cfg(tmp_path, tuning=Full(kind="full"))).unreached == ()


def test_memory_grows_with_rows_and_tokens_and_shrinks_with_recomputation(tmp_path: Path) -> None:
    plain = cfg(tmp_path, config=LARGE, tokens=200)
    small = allocated(rehearse(plain))
    more = allocated(rehearse(cfg(tmp_path, config=LARGE, tokens=200, levers=Levers(micro_batch=4))))
    again = allocated(
        rehearse_extrapolated(cfg(tmp_path, config=LARGE, tokens=200, levers=Levers(micro_batch=2, recompute=4)))
    )
    assert more > 1.5 * small
    assert again < 0.9 * small


DEEP = CONFIG | {"depth": 14}
TWO_BACK = CODE.replace("            hidden = block(hidden)\n", "            before, hidden = hidden, block(hidden)\n")
"""What the last layer was given is held to the next one."""
COUNTING = CODE.replace("for block in self.blocks:\n", "for at, block in enumerate(self.blocks):\n", 1).replace(
    "            hidden = block(hidden)\n",
    "            hidden = block(hidden) if at != 7 else block(hidden) + block(hidden)\n",
)
"""One layer is called twice, by its number: of fewer layers none is."""
BOUND = CODE.replace("for block in self.blocks:\n", "for block, _ in zip(self.blocks, range(14), strict=True):\n", 1)


@pytest.mark.parametrize("code", [CODE, TWO_BACK])
@pytest.mark.parametrize("recompute", [0, 7, 14])
def test_candidates_are_compared_by_a_few_layers_that_come_to_what_all_come_to(
    recompute: int, code: str, tmp_path: Path
) -> None:
    first, memo = cfg(tmp_path, code, DEEP, is_quick=True), dict[str, Rehearsal]()
    assert rehearse_extrapolated(first, memo) is memo[memo_key(first)]  # the proof: all layers, and a few
    other = replace(first, levers=Levers(micro_batch=3, recompute=recompute))
    few, whole = rehearse_extrapolated(other, memo).trace, rehearse(other).trace
    assert repr(other) not in memo
    assert replay(few.stream()) == replay(whole.stream())
    assert len(few.events) == len(whole.events)
    assert total_flops(few) == total_flops(whole)


@pytest.mark.parametrize("code", [COUNTING, BOUND])
def test_code_that_counts_on_all_of_its_layers_is_rehearsed_whole(code: str, tmp_path: Path) -> None:
    first, memo = cfg(tmp_path, code, DEEP, is_quick=True), dict[str, Rehearsal]()
    rehearse_extrapolated(first, memo)
    other = replace(first, levers=Levers(micro_batch=3))
    assert rehearse_extrapolated(other, memo) is memo[memo_key(other)]


def test_what_is_chosen_is_rehearsed_whole(tmp_path: Path) -> None:
    quick, memo = cfg(tmp_path, CODE, DEEP, is_quick=True), dict[str, Rehearsal]()
    rehearse_extrapolated(quick, memo)
    chosen = replace(quick, is_quick=False)
    assert rehearse_extrapolated(chosen, memo) is memo[memo_key(chosen)]


def test_a_tensor_that_no_gradient_reaches_is_named_with_its_reason(tmp_path: Path) -> None:
    found = rehearse(cfg(tmp_path, CODE.replace("hidden = block(hidden)", "hidden = block(hidden.detach())")))
    assert {name.split(".")[3] for name in found.unreached} == {"0"}
    assert any("does not reach the loss" in cause for cause in found.causes)
    detached = rehearse(cfg(tmp_path, CODE.replace('reduction="sum")', 'reduction="sum").detach()')))
    assert len(detached.unreached) == 8


@pytest.mark.parametrize(
    "statement", ["inputs['ids'].sum().item()", "inputs['ids'][inputs['ids'] > 3]", "bool(inputs['ids'].any())"]
)
def test_what_needs_a_value_is_named_by_line(statement: str, tmp_path: Path) -> None:
    line = CODE.split(LOSS)[0].count("\n") + 2
    with pytest.raises(ModelError, match=rf"my_model.py:{line} failed in loss") as told:
        rehearse(cfg(tmp_path, CODE.replace(LOSS, f"{LOSS}        {statement}\n")))
    assert "shapes but no values" in told.value.remedy


def test_all_that_cannot_be_had_is_refused_at_once_and_by_name(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "objective": {"kind": "dpo"},
        "engine": {"kind": "fsdp2", "devices": 2},
        "tuning": {"kind": "lora", "base_bits": 4},
        "levers": {"loss_chunk": 8, "mlp_tiles": 2, "recompute": 1},
        "evaluate": [{"task": "hallucination"}, {"task": "exact_match"}],
    }
    path = make_custom_project(tmp_path, code=CODE.replace("def generate(", "def speak("), **changes)
    spec = parse_spec(path.read_text(), where="spec.yaml", overrides=())
    assert isinstance(spec.model, CustomModel)
    config = custom_source(spec.model, tmp_path).as_config()
    with pytest.raises(SpecError) as told:
        require_custom(spec, config)
    for words in (
        "objective.kind dpo",
        "engine.kind fsdp2",
        "tuning.base_bits",
        "levers.loss_chunk 8",
        "levers.mlp_tiles 2",
        "evaluate hallucination asks for likelihoods",
        "evaluate exact_match needs answers, but my_model.py has no generate",
    ):
        assert words in told.value.problem
    assert "recompute" not in told.value.problem
    require_custom(spec, {"model_type": "llama"})
