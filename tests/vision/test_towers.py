"""Adapters and trained parts by tower, exactly; and models that see, saved and read again by plain transformers and
peft."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from finefit.errors import ModelError
from finefit.model.family import save_weights
from finefit.model.load import counts, load_base, make_trainable
from finefit.model.merge import merge_adapter
from finefit.model.saved_weights import restore_weights
from finefit.spec.models import Full, Lora, Subset
from finefit.vision import tower_in
from tests.conftest import make_model
from tests.vision_batches import EVERYWHERE, trained, vision_model
from tests.vision_models import make_vlm

MERGER = ("model.visual.merger.mlp.0", "model.visual.merger.mlp.2")


def _lora(targets: Any) -> Lora:
    return Lora(kind="lora", rank=4, targets=targets)


def _carrying(model: nn.Module) -> set[str]:
    return {
        name.partition(".lora_")[0].removeprefix("base_model.model.")
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def test_targets_without_a_tower_are_those_of_the_language_tower() -> None:
    for targets in ("all-linear", ("q_proj", "v_proj")):
        carrying = _carrying(make_trainable(vision_model("llava"), _lora(targets), name="llava"))
        assert carrying
        assert all(name.startswith("model.language_model.layers.") for name in carrying)
    assert len(carrying) == 2 * 2  # its tower has layers of these names, too


def test_targets_by_tower_are_these_and_no_others() -> None:
    carrying = _carrying(
        make_trainable(vision_model("qwen2_5_vl"), _lora({"vision": ("qkv",), "projector": "all-linear"}), name="qwen")
    )
    assert carrying == {*(f"model.visual.blocks.{at}.attn.qkv" for at in range(2)), *MERGER}


def test_all_of_the_vision_tower_leaves_its_projector_and_what_no_image_passes_alone() -> None:
    carrying = _carrying(make_trainable(vision_model("qwen2_5_vl"), _lora({"vision": "all-linear"}), name="qwen"))
    assert carrying.isdisjoint(MERGER)
    assert all(name.startswith("model.visual.blocks.") for name in carrying)
    carrying = _carrying(make_trainable(vision_model("llava"), _lora({"vision": "all-linear"}), name="llava"))
    assert {name.split(".")[4] for name in carrying} == {"0"}  # features are those before the last of two layers


@pytest.mark.parametrize(
    ("family", "targets", "problem"),
    [
        ("llava", ("qkv",), "qkv matches no linear layer of the tower language"),
        ("qwen2_5_vl", {"vision": ("q_proj",)}, "q_proj matches no linear layer of the tower vision"),
        (
            "gemma3",
            {"projector": "all-linear"},
            "the tower projector of Gemma3ForConditionalGeneration has no linear layer",
        ),
    ],
)
def test_a_target_that_matches_nothing_in_its_tower_is_refused_with_what_is_there(
    family: str, targets: Any, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem) as raised:
        make_trainable(vision_model(family), _lora(targets), name=family)
    remedy = str(raised.value.remedy)
    assert {"llava": "q_proj", "qwen2_5_vl": "qkv", "gemma3": "trainable: [projector]"}[family] in remedy


def test_a_text_model_has_a_language_tower_and_no_other() -> None:
    assert _carrying(make_trainable(make_model(), _lora({"language": ("q_proj",)}), name="text"))
    with pytest.raises(ModelError, match="layers of the tower vision, and LlamaForCausalLM has none"):
        make_trainable(make_model(), _lora({"language": "all-linear", "vision": "all-linear"}), name="text")


@pytest.mark.parametrize("tower", ["language", "vision", "projector"])
def test_a_tower_is_trained_as_a_whole_and_all_else_is_frozen(tower: str) -> None:
    model = make_trainable(vision_model("qwen2_5_vl"), Subset(kind="subset", trainable=(tower,)), name="qwen")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (tower_in(model, name) == tower), name


def test_training_all_weights_leaves_out_what_no_image_passes() -> None:
    model = make_trainable(vision_model("llava"), Full(kind="full"), name="llava")
    frozen = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(
        name.startswith(("model.vision_tower.encoder.layers.1", "model.vision_tower.post_layernorm")) for name in frozen
    )


# saved and read again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen")


def _moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.full_like(parameter, 0.01))
    return model


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(20)[None] + 40).logits
    return found


def _loaded(folder: Path) -> PreTrainedModel:
    return load_base(folder, device="cpu", dtype=torch.float32)


def test_an_adapter_in_all_towers_is_read_by_peft_and_restored_by_us(folder: Path, tmp_path: Path) -> None:
    model = _moved(make_trainable(_loaded(folder), EVERYWHERE, name="qwen"))
    save_weights(model, tmp_path)
    plain = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder), tmp_path)
    stored = {name for name in peft.load_peft_weights(str(tmp_path)) if ".visual." in name}
    assert stored
    assert torch.equal(_logits(plain), _logits(model))
    again = make_trainable(_loaded(folder), EVERYWHERE, name="qwen")
    restore_weights(again, tmp_path)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_whole_weights_are_read_by_plain_transformers_and_restored_by_us(folder: Path, tmp_path: Path) -> None:
    model = _moved(make_trainable(_loaded(folder), Full(kind="full"), name="qwen"))
    save_weights(model, tmp_path)
    plain, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(_logits(plain), _logits(model))
    again = make_trainable(_loaded(folder), Full(kind="full"), name="qwen")
    restore_weights(again, tmp_path)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), again.parameters(), strict=True))


def test_an_adapter_in_all_towers_is_merged_into_a_whole_model(folder: Path, tmp_path: Path) -> None:
    model = _moved(make_trainable(_loaded(folder), EVERYWHERE, name="qwen"))
    save_weights(model, tmp_path / "adapter")
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    before = AutoModelForImageTextToText.from_pretrained(folder)
    torch.testing.assert_close(_logits(merged), _logits(model), rtol=1e-4, atol=1e-5)
    moved = {name for name, p in merged.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert {tower_in(merged, name) for name in moved} == {"language", "vision", "projector"}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == "qwen2_5_vl"


def test_four_bits_pack_the_language_tower_alone(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = load_base(folder, device="cpu", dtype=torch.float32, bits=4)
    packed = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert packed == {
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and tower_in(model, name) == "language"
    } - {"lm_head"}
    whole = _loaded(folder)
    tuned = make_trainable(model, EVERYWHERE, name="qwen")
    assert counts(tuned).total - counts(tuned).trainable == counts(whole).total
    assert counts(trained("qwen2_5_vl")).trainable == counts(tuned).trainable
