"""Adapters on all linear layers that can carry one, in every family; the others are known by name and reason."""

import pytest
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from finefit.errors import ModelError
from finefit.model.load import make_trainable
from finefit.model.targets import linear_layers, unadaptable
from finefit.spec.models import Lora
from tests.families import FAMILIES, make_family

ALL = Lora(kind="lora", rank=2)
MLP = {"gate_proj", "up_proj", "down_proj"}
LEFT_OUT = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "ernie4_5_moe", "qwen3_moe"), MLP),
    **{key: {"x_proj", "dt_proj", "out_proj"} for key in ("mamba", "falcon_mamba", "jamba")},
    **{key: {"out_proj"} for key in ("mamba2", "bamba", "falcon_h1", "granitemoehybrid")},
    "zamba2": {"out_proj", "0", "1"},  # the latter in the low-rank layers of its shared block
    "phimoe": {"router"},
}


def _last(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_linear_adapts_all_but_the_layers_that_cannot_carry_an_adapter(kind: str) -> None:
    model = make_family(kind)
    linear, left_out = linear_layers(model), unadaptable(model)
    assert _last(set(left_out)) == LEFT_OUT.get(kind, set())
    adapted = make_trainable(model, ALL, name="tiny")
    assert isinstance(adapted, PeftModel)
    carrying = {name for name, module in adapted.get_base_model().named_modules() if isinstance(module, LoraLayer)}
    assert carrying == linear - left_out.keys()
    assert unadaptable(adapted.get_base_model()) == left_out  # also of a model that has its adapters


@pytest.mark.parametrize(
    ("kind", "target", "problem", "able"),
    [
        ("mamba", "out_proj", "a kernel reads the weights", "in_proj"),
        (
            "deepseek_v2",
            "shared_experts.down_proj",
            "peft takes these names for those of the experts",
            "o_proj, q_proj",
        ),
        ("phimoe", "router", "a router answers with a choice of experts", "q_proj"),
    ],
)
def test_a_target_that_cannot_carry_an_adapter_is_refused_with_the_reason_and_those_that_can(
    kind: str, target: str, problem: str, able: str
) -> None:
    with pytest.raises(ModelError, match=f"{target} of .* cannot carry an adapter: {problem}") as refused:
        make_trainable(make_family(kind), ALL.model_copy(update={"targets": ("in_proj", target)}), name="tiny")
    assert able in refused.value.remedy
