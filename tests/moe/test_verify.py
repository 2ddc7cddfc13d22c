"""A mixture that is not what it was built from is found out before anybody trains it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finefit.errors import FinefitError
from finefit.moe.build import build_moe, prove_experts
from tests.moe.test_build import make_base, make_expert

torch.set_num_threads(1)
Made = tuple[Path, dict[str, Path], Path | None]


def _make(tmp_path: Path, family: str, shared: Any = "none") -> Made:
    base, moe = make_base(tmp_path / "base", family), tmp_path / "moe"
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    moe.mkdir()
    build_moe(base, experts, moe, top_k=2, shared=shared)
    return moe, experts, base if shared == "base" else None


@pytest.fixture(params=[("llama", "none"), ("qwen2", "none"), ("qwen2", "base"), ("qwen3", "none")], ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    family, shared = request.param
    return _make(tmp_path, family, shared)


def test_every_expert_alone_answers_as_it_did(made: Made) -> None:
    moe, experts, shared = made
    found = prove_experts(moe, experts, shared=shared)
    assert set(found) == {"a", "b"}
    assert max(found.values()) < 1e-3


def _change(folder: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: change(tensor) if part in name else tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("part", [".experts.1.", "layernorm", "o_proj"])
def test_a_tensor_that_is_not_the_experts_is_found_out(made: Made, part: str) -> None:
    moe, experts, shared = made
    _change(moe, part, lambda tensor: tensor * 1.01)
    with pytest.raises(FinefitError, match=r"sent to [ab] does not answer as [ab] does: logits differ by"):
        prove_experts(moe, experts, shared=shared)


@pytest.mark.parametrize(
    ("part", "change"), [("shared_expert.up_proj", lambda w: w * 1.01), ("shared_expert_gate", lambda w: w + 0.01)]
)
def test_a_shared_expert_that_is_not_half_the_base_is_found_out(
    tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    moe, experts, base = _make(tmp_path, "qwen2", "base")
    _change(moe, part, change)
    with pytest.raises(FinefitError, match="by its shared expert alone does not answer as the base does"):
        prove_experts(moe, experts, shared=base)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("qwen2 sliding", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("qwen2 sliding", {"sliding_window": 30}),
        ("mistral long", {"sliding_window": None}),
        ("mistral long", {"sliding_window": 41}),
        ("qwen3 sliding", {"use_sliding_window": False}),
        ("llama", {"sliding_window": 5}),
    ],
)
def test_a_window_that_is_not_the_bases_is_found_out_by_a_probe_that_is_shorter_than_it(
    tmp_path: Path, family: str, told: dict[str, Any]
) -> None:
    moe, experts, _ = _make(tmp_path, family)
    prove_experts(moe, experts)
    (moe / "config.json").write_text(json.dumps(json.loads((moe / "config.json").read_text()) | told))
    with pytest.raises(FinefitError, match="sent to a does not answer as a does"):
        prove_experts(moe, experts)
