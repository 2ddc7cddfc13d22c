"""Which adapters vLLM and SGLang take, by their config and tensors alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from finefit.errors import ModelError
from finefit.export.servable import ServeNote, servable

USUAL = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def _notes(
    folder: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    modules: tuple[str, ...] = USUAL,
    more: tuple[str, ...] = (),
    **config: Any,
) -> dict[str, ServeNote]:
    adapter, base = folder / "my adapter", folder / "base"
    for place in (adapter, base):
        place.mkdir(parents=True)
    prefix = "base_model.model.model.layers.0"
    names = [f"{prefix}.{module}.lora_{side}.weight" for module in modules for side in "AB"]
    save_file({name: np.zeros((2, 2), np.float32) for name in (*names, *more)}, adapter / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": list(modules), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(values | config))
    (base / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return {note.server: note for note in servable(adapter, base, name="orders-1")}


@pytest.mark.parametrize(("rank", "listed"), [(1, 1), (4, 8), (16, 16), (24, 32), (200, 256), (300, 320), (512, 512)])
def test_a_rank_is_served_with_the_next_one_that_vllm_lists(tmp_path: Path, rank: int, listed: int) -> None:
    notes = _notes(tmp_path, r=rank)
    assert all(note.accepted for note in notes.values())
    assert f"--enable-lora --max-lora-rank {listed} --lora-modules" in notes["vLLM"].command
    assert "sglang.launch_server" in notes["SGLang"].command
    assert f"'orders-1={tmp_path}/my adapter'" in notes["vLLM"].command


def test_the_command_names_where_the_adapter_will_lie_and_what_requests_call_it(tmp_path: Path) -> None:
    _notes(tmp_path)
    adapter, base = tmp_path / "my adapter", tmp_path / "base"
    for note in servable(adapter, base, name="a=b", named="ann/base", place=Path("taken/adapter")):
        assert note.command.endswith(" a-b=taken/adapter")
        assert "ann/base" in note.command


def test_a_rank_above_the_list_is_refused_by_vllm_alone(tmp_path: Path) -> None:
    notes = _notes(tmp_path, r=513)
    assert not notes["vLLM"].accepted
    assert "513" in notes["vLLM"].reason
    assert notes["SGLang"].accepted


HEAD = "base_model.model.lm_head"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("DoRA", {"use_dora": True}),
    ("lm_head", {"modules_to_save": ["lm_head"], "more": (f"{HEAD}.weight",)}),
    ("lm_head", {"more": (f"{HEAD}.lora_A.weight", f"{HEAD}.lora_B.weight")}),
    ("embed_tokens", {"more": ("base_model.model.model.embed_tokens.lora_embedding_A",)}),
    ("experts", {"architecture": "MixtralForCausalLM", "modules": ("block_sparse_moe.experts.0.w1",)}),
    ("experts", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    ("bias", {"bias": "lora_only"}),
    ("rank", {"rank_pattern": {"q_proj": 8}}),
    ("alpha", {"alpha_pattern": {"q_proj": 8}}),
    ("BloomForCausalLM", {"architecture": "BloomForCausalLM", "modules": ("self_attention.query_key_value",)}),
    ("in_proj", {"modules": ("mixer.in_proj",)}),
    ("norm", {"more": ("base_model.model.model.norm.weight",)}),
]


@pytest.mark.parametrize(("named", "adapter"), REFUSED)
def test_what_neither_server_takes_is_refused_with_its_name_and_no_command(
    tmp_path: Path, named: str, adapter: dict[str, Any]
) -> None:
    for note in _notes(tmp_path, **adapter).values():
        assert (note.accepted, note.command) == (False, "")
        assert named in note.reason


def test_a_rank_stabilised_adapter_is_scaled_rightly_by_vllm_alone(tmp_path: Path) -> None:
    notes = _notes(tmp_path, use_rslora=True)
    assert (notes["vLLM"].accepted, notes["SGLang"].accepted) == (True, False)


def test_other_kinds_of_adapters_are_the_users_to_merge(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="IA3"):
        _notes(tmp_path, peft_type="IA3")
