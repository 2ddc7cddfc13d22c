"""A mixture is saved as others expect it, reads back in plain transformers, and goes back into a live model bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finefit.errors import RunError
from finefit.model.load import make_trainable, restore_weights, save_weights
from finefit.spec.models import Subset
from tests.mixtures import DENSE, FAMILIES, make_mixture

IDS = torch.arange(5, 25).view(2, 10)
TRANSPOSED = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def _equal(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours
    )


def _shaken(model: PreTrainedModel) -> PreTrainedModel:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_mixture_is_read_by_plain_transformers_with_equal_logits(family: str, tmp_path: Path) -> None:
    model = make_mixture(family)
    save_weights(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._experts_implementation == "grouped_mm"  # what it is computed by is not written into its config
    torch.testing.assert_close(_logits(plain), _logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_experts_are_stored_one_by_one_under_the_names_of_its_architecture(family: str, tmp_path: Path) -> None:
    save_weights(make_mixture(family), tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    part = "block_sparse_moe.experts.2.w1.weight" if family == "llama" else "mlp.experts.2.gate_proj.weight"
    assert names[f"model.layers.1.{part}"].shape == (32, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_mixture_is_put_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    saved, live = make_mixture(family), _shaken(make_mixture(family))
    save_weights(saved, tmp_path)
    assert not _equal(saved, live)
    restore_weights(live, tmp_path)
    assert _equal(saved, live)


def test_a_mixture_whose_experts_are_stored_as_they_lie_in_memory_is_put_back_too(tmp_path: Path) -> None:
    saved, live = (
        _shaken(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **DENSE, **TRANSPOSED)))
        for _ in range(2)
    )
    save_weights(saved, tmp_path)
    restore_weights(live, tmp_path)
    assert _equal(saved, live)


def test_routers_in_fp32_over_frozen_halves_keep_their_precisions(tmp_path: Path) -> None:
    routers = Subset(kind="subset", trainable=("mlp.gate",))
    saved, live = (make_trainable(make_mixture("llama").to(torch.bfloat16), routers, name="tiny") for _ in range(2))
    for name, parameter in saved.named_parameters():
        if parameter.requires_grad:
            assert name.endswith("mlp.gate.weight")
            parameter.data.add_(1e-4)
    save_weights(saved, tmp_path)
    restore_weights(live, tmp_path)
    assert _equal(saved, live)


def _rewritten(folder: Path, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    match change:
        case "lost":
            del tensors[name]
        case "narrow":
            tensors[name] = tensors[name][:, :8].contiguous()
        case "one more":
            tensors[name.replace("experts.1", "experts.7")] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"), [("lost", "holds"), ("narrow", "holds"), ("one more", r"experts\.7\.up_proj\.weight")]
)
def test_a_checkpoint_with_other_experts_is_refused_by_name(change: str, words: str, tmp_path: Path) -> None:
    model = make_mixture("qwen3")
    save_weights(model, tmp_path)
    _rewritten(tmp_path, change)
    with pytest.raises(RunError, match=words):
        restore_weights(model, tmp_path)
