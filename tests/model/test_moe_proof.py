"""A mixture that is not what it was built from is found out before anybody trains it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from finefit.errors import FinefitError
from finefit.model.moe import build_moe
from finefit.model.moe_proof import prove_experts
from tests.model.test_moe import make_base, make_expert

torch.set_num_threads(1)


@pytest.fixture(params=[("llama", "none"), ("qwen2", "none"), ("qwen2", "base"), ("qwen3", "none")], ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Path], bool]:
    family, shared = request.param
    base = make_base(tmp_path / "base", family)
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    moe = tmp_path / "moe"
    moe.mkdir()
    build_moe(base, experts, moe, top_k=2, shared=shared)
    return moe, experts, shared == "base"


def test_every_expert_alone_answers_as_it_did(made: tuple[Path, dict[str, Path], bool]) -> None:
    moe, experts, is_shared = made
    found = prove_experts(moe, experts, is_shared=is_shared)
    assert set(found) == {"a", "b"}
    assert max(found.values()) < 1e-3


@pytest.mark.parametrize("part", [".experts.1.", "layernorm", "o_proj"])
def test_a_tensor_that_is_not_the_experts_is_found_out(made: tuple[Path, dict[str, Path], bool], part: str) -> None:
    moe, experts, is_shared = made
    for file in sorted(moe.glob("*.safetensors")):
        tensors = load_file(file)
        save_file({name: tensor * 1.01 if part in name else tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    with pytest.raises(FinefitError, match=r"sent to [ab] does not answer as [ab] does: logits differ by"):
        prove_experts(moe, experts, is_shared=is_shared)
