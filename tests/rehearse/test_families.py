"""Families that differ from a plain transformer are rehearsed with the default adapters on cards and on the processor,
and a few of their layers represent the others only where they are alike."""

from importlib.util import find_spec
from typing import Any

import pytest

from finefit.errors import ModelError
from finefit.rehearse.fake_model import StepConfig, layer_shapes
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.rehearsal import Rehearsal, rehearse
from tests.families import FAMILIES, family_config
from tests.rehearse.conftest import make_cfg, peak
from tests.slow_cases import slow_but
from tests.tiny_types import tiny_config

DEVICES: dict[str, dict[str, Any]] = {
    "ada": {"capability": (8, 9)},
    "hopper": {"capability": (9, 0)},
    "processor": {"device": "cpu", "capability": (0, 0), "precision": "fp32"},
}
CASES = {f"{kind}-{device}": (kind, device) for kind in FAMILIES for device in DEVICES}
QUICK = ("deepseek_v2-ada", "qwen3_next-hopper", "mamba2-processor", "falcon_h1-ada", "zamba2-processor")
DEEP: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 9, "first_k_dense_replace": 3},
    "ernie4_5_moe": {"num_hidden_layers": 8, "moe_layer_start_index": 5},
    "qwen3_next": {"num_hidden_layers": 20},
    "mamba2": {"num_hidden_layers": 8},
    "jamba": {"num_hidden_layers": 12},
    "bamba": {"num_hidden_layers": 8, "attn_layer_indices": [1, 6]},
    "zamba2": {
        "num_hidden_layers": 12,
        "hybrid_layer_ids": list(range(1, 12, 2)),
        "layers_block_type": ["mamba", "hybrid"] * 6,
    },
    "recurrent_gemma": {"num_hidden_layers": 18},
}


def _cfg(config: dict[str, Any], device: str = "ada", **levers: Any) -> StepConfig:
    given = {"tokens": 16, "supervised": 12, "levers": {"micro_batch": 2} | levers}
    return make_cfg(config, **given, **DEVICES[device])


@pytest.mark.parametrize(("kind", "device"), slow_but(QUICK, CASES))
def test_the_default_adapters_are_rehearsed_and_every_one_is_reached(kind: str, device: str) -> None:
    cfg = _cfg(family_config(kind), device, recompute=2)
    assert cfg.tuning.targets == "all-linear"  # type: ignore[union-attr]
    assert rehearse(cfg).unreached == ()


@pytest.mark.parametrize("kind", slow_but(("ernie4_5_moe",), DEEP.keys()))
def test_a_few_layers_give_the_same_as_all_of_them(kind: str) -> None:
    def seen(found: Rehearsal) -> tuple[int, int]:
        return peak(found), len(found.trace.events)

    cfg = _cfg(family_config(kind, **DEEP[kind]), recompute=DEEP[kind]["num_hidden_layers"])
    assert seen(rehearse_extrapolated(cfg)) == seen(rehearse(cfg))


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_package_that_a_family_needs_and_nobody_has_installed_is_named_with_its_command() -> None:
    with pytest.raises(ModelError, match="gemma3n model needs a package that is not installed: timm") as refused:
        rehearse(_cfg({"model_type": "gemma3n"}))
    assert refused.value.remedy == "pip install timm"


def test_a_model_that_is_not_causal_is_refused_in_a_sentence_wherever_it_is_built() -> None:
    told = r"^transformers has no causal language model of type t5, and finefit trains no other\n"
    with pytest.raises(ModelError, match=told):
        rehearse(_cfg({"model_type": "t5"}))
    with pytest.raises(ModelError, match=told):  # as an evaluation asks first
        layer_shapes('{"model_type": "t5"}')


@pytest.mark.parametrize("kind", ["aria", "internvl", "mistral3"])
def test_a_model_that_takes_images_and_has_no_module_here_is_refused_in_a_sentence(kind: str) -> None:
    with pytest.raises(ModelError, match=f"^{kind} takes images, and finefit has no module that makes its batches\n"):
        rehearse(_cfg({"model_type": kind}))


@pytest.mark.parametrize("kind", ["llama4_text", "gemma3n_text", "phi4_multimodal"])
def test_families_of_other_makes_are_rehearsed_and_every_adapter_gets_a_gradient(kind: str) -> None:
    """A backbone by another name, layers that no text passes."""
    assert rehearse(_cfg(tiny_config(kind).to_dict())).unreached == ()


def test_a_model_that_reads_values_is_refused_by_the_module_that_does() -> None:
    with pytest.raises(ModelError, match=r"experts\.router reads values of tensors to choose what it computes") as told:
        rehearse(_cfg(tiny_config("jetmoe").to_dict()))
    assert "remove `.item()`" in told.value.remedy
