"""A checkpoint of a part of a model differs from its base in what was trained, whatever precision was computed in."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from finefit.errors import FinefitError, RunError
from finefit.model.family import save_weights
from finefit.model.load import load_base, make_trainable, weight_dtype
from finefit.model.saved_weights import (
    frozen_weights_of,
    require_frozen_unchanged,
    restore_weights,
    save_with_frozen,
    weight_bytes,
)
from finefit.spec.models import Subset
from tests.conftest import make_model
from tests.mixtures import DENSE, FAMILIES, make_mixture

torch.set_num_threads(1)
MLP = Subset(kind="subset", trainable=("layers.*.mlp",))
ROUTERS = Subset(kind="subset", trainable=("mlp.gate",))
STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _live(base: Path, precision: str, tuning: Subset) -> Any:
    return make_trainable(load_base(base, device="cpu", dtype=weight_dtype(precision, tuning)), tuning, name="tiny")


def _trained(base: Path, folder: Path, precision: str, tuning: Subset, *, seed: int = 0) -> Any:
    model = _live(base, precision, tuning)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 1e-5)
    folder.mkdir()
    save_weights(model, folder, frozen=frozen_weights_of(model, base))
    return model


def _moved(base: Path, checkpoint: Path) -> set[str]:
    before, after = _tensors(base), _tensors(checkpoint)
    assert before.keys() == after.keys()
    return {
        name for name in before if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name])
    }


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("precision", STORED)
def test_what_is_frozen_is_saved_as_the_base_stores_it(stored: str, precision: str, tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_model().to(STORED[stored]).save_pretrained(base)
    model = _trained(base, checkpoint, precision, MLP)
    moved = _moved(base, checkpoint)
    assert moved == {name for name in _tensors(base) if ".mlp." in name}
    assert {_tensors(checkpoint)[name].dtype for name in moved} == {torch.float32}
    require_frozen_unchanged(frozen_weights_of(model, base), checkpoint)  # type: ignore[arg-type]
    other = _live(base, precision, MLP)
    restore_weights(other, checkpoint)
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    (file,) = checkpoint.glob("*.safetensors")
    size = weight_bytes(model, frozen_weights_of(model, base))
    assert size <= file.stat().st_size <= size + 8192
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert plain.dtype == STORED[stored]
    assert plain.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_router_leaves_the_files_of_the_experts_as_they_are(family: str, tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_mixture(family).save_pretrained(base)
    model = _trained(base, checkpoint, "bf16", ROUTERS)
    assert all(name.endswith(".gate.weight") for name in _moved(base, checkpoint))
    other = _live(base, "bf16", ROUTERS)
    restore_weights(other, checkpoint)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_experts_are_saved_one_by_one(family: str, tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_mixture(family).save_pretrained(base)
    _trained(base, checkpoint, "bf16", Subset(kind="subset", trainable=("mlp.experts",)))
    assert _moved(base, checkpoint) == {name for name in _tensors(base) if ".experts." in name}


def test_what_the_model_does_not_take_from_its_base_is_not_saved(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_model().save_pretrained(base)  # its head is tied
    tensors = load_file(base / "model.safetensors")
    more = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(tensors | more, base / "model.safetensors", metadata={"format": "pt"})
    _trained(base, checkpoint, "bf16", MLP)
    assert _tensors(checkpoint).keys() == tensors.keys()
    restore_weights(_live(base, "bf16", MLP), checkpoint)


def test_a_base_that_is_stored_without_its_prefix_is_found(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16)).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    _trained(base, checkpoint, "bf16", Subset(kind="subset", trainable=("mlp",)))
    found = _tensors(checkpoint)
    assert found.keys() == tensors.keys()
    assert {name for name in tensors if not torch.equal(found[name], tensors[name])} == {
        name for name in tensors if ".mlp." in name
    }


def test_a_large_one_is_divided_into_files_that_an_index_names(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_model().save_pretrained(base)
    model = _live(base, "bf16", MLP)
    kept = frozen_weights_of(model, base)
    assert kept is not None
    checkpoint.mkdir()
    save_with_frozen(
        model, checkpoint, kept, {name: p for name, p in model.named_parameters() if p.requires_grad}, shard_bytes=8000
    )
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    restore_weights(model, checkpoint)
    require_frozen_unchanged(kept, checkpoint)
    plain, start = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (checkpoint, base))
    assert all(torch.equal(plain[name], start[name]) for name in start if ".mlp." not in name)


def test_a_base_that_changes_under_a_run_is_told_before_its_weights_are_mixed_with_others(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_model().save_pretrained(base)
    model = _live(base, "bf16", MLP)
    kept = frozen_weights_of(model, base)
    checkpoint.mkdir()
    make_model(seed=1).save_pretrained(base)
    with pytest.raises(RunError, match=r"model.safetensors has changed since training began"):
        save_weights(model, checkpoint, frozen=kept)
    shutil.rmtree(base)
    with pytest.raises(RunError, match=r"model.safetensors is gone since training began"):
        save_weights(model, checkpoint, frozen=kept)


def test_a_frozen_tensor_that_was_written_otherwise_is_found_out(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_model().save_pretrained(base)
    model = _trained(base, checkpoint, "bf16", MLP)
    kept = frozen_weights_of(model, base)
    assert kept is not None
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        FinefitError, match=r"1 of \d+ frozen tensors of checkpoint are not the base's: model.norm.weight"
    ):
        require_frozen_unchanged(kept, checkpoint)


def test_of_a_whole_model_nothing_is_kept(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    assert frozen_weights_of(make_model().requires_grad_(True), tmp_path) is None


# A mixture is saved as others expect it, reads back in plain transformers, and goes back into a live model bit for
# bit.

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
def test_a_mixture_is_saved_expert_by_expert_read_by_plain_transformers_and_put_back_bit_for_bit(
    family: str, tmp_path: Path
) -> None:
    saved, live = make_mixture(family), _shaken(make_mixture(family))
    save_weights(saved, tmp_path)
    part = "block_sparse_moe.experts.2.w1.weight" if family == "llama" else "mlp.experts.2.gate_proj.weight"
    assert load_file(tmp_path / "model.safetensors")[f"model.layers.1.{part}"].shape == (32, 16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._experts_implementation == "grouped_mm"  # what it is computed by is not written into its config
    torch.testing.assert_close(_logits(plain), _logits(saved), rtol=1e-5, atol=1e-6)
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
