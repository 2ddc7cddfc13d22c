"""What two configs must agree on before their models are made into one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finefit.errors import ModelError
from finefit.facts.model import read_config
from finefit.model.alike import differing, require_alike, resolved
from finefit.model.moe import average, build_moe
from finefit.model.moe_proof import prove_experts
from tests.mixtures import DENSE
from tests.model.test_moe import built, edited, make_base, make_expert

torch.set_num_threads(1)
KINDS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"rms_norm_eps": 1e-2}, {"rms_norm_eps": (1e-6, 1e-2)}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": (True, False)}),
        ({"rope_theta": 500.0}, {"rope_parameters.rope_theta": (10000.0, 500.0)}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"rope_parameters.rope_theta": (10000.0, 500.0)},
        ),
        ({"hidden_act": "gelu"}, {"hidden_act": ("silu", "gelu")}),
    ],
)
def test_what_decides_the_answers_is_told_with_both_values(
    kind: str, other: dict[str, Any], found: dict[str, Any]
) -> None:
    base = {"model_type": kind, **DENSE}
    assert differing(base, base | other) == found


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_decide_them_may_differ(kind: str) -> None:
    base = {"model_type": kind, **DENSE}
    names = {
        "dtype": "bfloat16",
        "torch_dtype": "float16",
        "_name_or_path": "a/b",
        "transformers_version": "4.40.0",
        "architectures": ["X"],
    }
    others = {
        "eos_token_id": 3,
        "bos_token_id": 2,
        "pad_token_id": 4,
        "use_cache": False,
        "attention_dropout": 0.1,
        "of_somebody": "else",
    }
    assert differing(base, base | names | others) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [{}, {"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 2.0}}],
    ids=["plain", "theta", "scaled"],
)
def test_a_default_is_the_same_written_or_left_out(kind: str, more: dict[str, Any]) -> None:
    base = {"model_type": kind, **DENSE, **more}
    assert differing(base, resolved(base)) == {}


def test_layers_with_a_window_are_compared_however_they_are_named() -> None:
    base = {"model_type": "qwen2", **DENSE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    named = base | {"max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"]}
    assert differing(base, named) == {}
    assert list(differing(base, base | {"max_window_layers": 0})) == ["layer_types"]


def test_another_architecture_is_all_that_is_told_and_one_that_nobody_knows_is_compared_as_it_stands() -> None:
    assert differing({"model_type": "llama", **DENSE}, {"model_type": "qwen2"}) == {"model_type": ("llama", "qwen2")}
    assert differing({"model_type": "my-own", "width": 3}, {"model_type": "my-own", "width": 4}) == {"width": (3, 4)}


def test_an_expert_that_computes_otherwise_is_named_with_the_key_and_both_values() -> None:
    base = {"model_type": "llama", **DENSE}
    with pytest.raises(
        ModelError,
        match=r"expert law computes otherwise than the base: its config.json has rms_norm_eps 0.01 where the base has 1e-06",
    ):
        require_alike("law", base, base | {"rms_norm_eps": 1e-2})


def test_a_config_that_its_class_refuses_is_told() -> None:
    with pytest.raises(ModelError, match=r"the config.json of a llama cannot be read: .*hidden_size"):
        differing({"model_type": "llama"}, {"model_type": "llama", "hidden_size": "wide"})


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("family", "other", "told"),
    [
        ("llama", {"rms_norm_eps": 1e-2}, "rms_norm_eps 0.01 where the base has 1e-06"),
        (
            "llama tied",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            "rope_parameters.rope_theta 9.0 where the base has 500.0",
        ),
        ("qwen2 sliding", {"sliding_window": 41}, "sliding_window 41 where the base has 40"),
        ("llama tied", {"tie_word_embeddings": False}, "tie_word_embeddings False where the base has True"),
    ],
)
def test_an_expert_that_computes_otherwise_is_refused_by_key(
    tmp_path: Path, merge: str, family: str, other: dict[str, Any], told: str
) -> None:
    base = make_base(tmp_path / "base", family)
    experts = {
        "fine": make_expert(base, tmp_path / "fine", 2),
        "odd": edited(make_expert(base, tmp_path / "odd", 3), **other),
    }
    tensors = load_file(experts["odd"] / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head + 1}, experts["odd"] / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=f"expert odd computes otherwise than the base: its config.json has {told}"):
        build_moe(base, experts, tmp_path / "out", top_k=2) if merge == "mixture" else average(
            base, experts, tmp_path / "out"
        )
    assert not list((tmp_path / "out").iterdir())


def test_experts_may_leave_out_what_their_class_says_and_name_other_tokens(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    experts = {
        "a": edited(make_expert(base, tmp_path / "a", 2), eos_token_id=7, use_cache=False, _name_or_path="a/b"),
        "b": tmp_path / "b",
    }
    config = read_config(make_expert(base, experts["b"], 3))
    (experts["b"] / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("rms_norm_eps", "layer_types")})
    )
    prove_experts(built(tmp_path, base, **experts), experts)
