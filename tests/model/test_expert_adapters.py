"""Adapters on experts' weights, computed by grouped products of their own, are those that peft adds to the weights."""

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from finefit.errors import FinefitError
from finefit.model.adapter import REFERENCE, as_reference, freeze_reference, load_adapter
from finefit.model.experts import GROUPED
from finefit.model.family import save_weights
from finefit.model.load import make_trainable
from finefit.rehearse.rehearsal import rehearse
from finefit.spec.models import Lora
from tests.families import family_config, make_family
from tests.rehearse.conftest import make_cfg, peak

EXPERTS = Lora(kind="lora", rank=8, experts=True)
KINDS = ("qwen3_moe", "gpt_oss", "olmoe", "mixtral", "glm4_moe")
IDS_BT = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(1))


def _adapted(kind: str, tuning: Lora = EXPERTS) -> peft.PeftModel:
    """Weights and adapters so large that each makes a difference."""
    model = make_trainable(make_family(kind), tuning, name="tiny")
    assert isinstance(model, peft.PeftModel)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def _taken(model: peft.PeftModel, implementation: str) -> tuple[float, dict[str, Tensor]]:
    model.get_base_model().set_experts_implementation(implementation)
    model.zero_grad()
    loss = model(input_ids=IDS_BT, labels=IDS_BT).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS_BT).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft_and_the_plain_loop(kind: str) -> None:
    model = _adapted(kind)
    loss, gradients = _taken(model, GROUPED)
    plain, wanted = _taken(model, "eager")  # peft adds the adapters to copies of the experts
    assert loss == pytest.approx(plain, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    assert sum(".experts." in name for name in gradients) >= 4
    for name, gradient in gradients.items():
        assert float((gradient - wanted[name]).norm() / wanted[name].norm()) < 2e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_is_read_by_peft_and_by_finefit(kind: str, tmp_path: Path) -> None:
    model = _adapted(kind).eval()
    model.get_base_model().save_pretrained(tmp_path / "base")
    save_weights(model, tmp_path / "adapter")
    weights = {name: p for name, p in model.get_base_model().named_parameters() if ".lora_" not in name}
    for load in (peft.PeftModel.from_pretrained, load_adapter):
        base = make_family(kind)
        for name, parameter in base.named_parameters():
            parameter.data = _of(weights, name)
        again = load(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(_logits(again), _logits(model), rtol=1e-4, atol=1e-4)
        again.disable_adapter_layers()
        assert not torch.allclose(_logits(again), _logits(model), atol=0.01)


def _of(weights: dict[str, Tensor], name: str) -> Tensor:
    """The weight of this name in a model that peft has wrapped."""
    plain = (key for key in weights if key.replace(".base_layer", "") == name)
    return weights[next(plain)].detach()


@pytest.mark.parametrize("starts_with_one", [False, True])
def test_the_reference_is_the_model_without_the_adapter_or_with_the_first(starts_with_one: bool) -> None:
    model = _adapted("qwen3_moe").eval()
    if starts_with_one:
        freeze_reference(model)
    with as_reference(model), model.disable_adapter() if not starts_with_one else torch.no_grad():
        wanted = _logits(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name and REFERENCE not in name:
            parameter.data += 0.2
    with as_reference(model):
        torch.testing.assert_close(_logits(model), wanted)
    assert not torch.allclose(_logits(model), wanted, atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_experts_are_planned_and_every_one_is_reached(kind: str) -> None:
    found = rehearse(make_cfg(family_config(kind), tuning=EXPERTS, tokens=16, supervised=12))
    assert found.unreached == ()


def test_no_copy_of_the_experts_is_made_for_their_adapters() -> None:
    config = family_config("qwen3_moe", num_experts=64, moe_intermediate_size=256, hidden_size=128)
    without, with_experts = (
        peak(
            rehearse(make_cfg(config, tuning=EXPERTS.model_copy(update={"experts": experts}), tokens=16, supervised=8))
        )
        for experts in (False, True)
    )
    one_layer = 64 * 3 * 256 * 128 * 2  # bytes of its experts in bf16
    adapters = 3 * 64 * 8 * ((128 + 512) + (256 + 128)) * 4  # of three layers, in fp32
    assert with_experts - without < 4 * adapters + one_layer


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen3_moe", {"dropout": 0.1}, "cannot have tuning.dropout"),
        ("qwen3_moe", {"dora": True}, "cannot have tuning.dora"),
        ("qwen3_moe", {"rank": 4}, "a rank that is a multiple of 8"),
        ("mamba2", {}, "has no experts that hold their weights together"),
    ],
)
def test_what_adapters_on_experts_cannot_have_is_refused(kind: str, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(FinefitError, match=problem):
        make_trainable(make_family(kind), EXPERTS.model_copy(update=changes), name="tiny")
