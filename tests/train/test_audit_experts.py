"""Experts that share a tensor: the tensor has a gradient, and those that no token was sent to are named."""

from typing import Any

import pytest
import torch
from torch import nn

from finefit.model.load import load_base
from finefit.step.engine import ALONE
from finefit.train.audit import Audit
from finefit.train.ranks import ONE_RANK
from tests.mixtures import make_mixture_folder

TOKENS = torch.arange(5, 205).view(1, 200)


@pytest.fixture
def mixture(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Four experts, of which a token meets two."""
    folder = make_mixture_folder(tmp_path_factory.mktemp("mixture") / "model", "qwen3", num_experts=4, top_k=2)
    model: nn.Module = load_base(folder, device="cpu", dtype=torch.float32).requires_grad_(True)
    return model


def _audited(model: nn.Module, *, inside: bool = False) -> dict[str, Any]:
    told: list[dict[str, Any]] = []
    audit = Audit(model, ALONE, ONE_RANK, lambda **event: told.append(event))
    if inside:
        audit.hear()
    model(input_ids=TOKENS).logits.logsumexp(-1).sum().backward()
    audit.decide(1, lambda: None, torch.tensor(True))
    return told[0]


def _leave_out(model: nn.Module, experts: list[int]) -> None:
    """No token is sent to them: whatever a router says of them is lowered."""

    def lowered(logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.index_fill(1, torch.tensor(experts), -1e4)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, __, given: _routed(lowered(given[0])))


def _routed(logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights_NK, chosen_NK = torch.topk(logits_NE.softmax(-1), 2, dim=-1)
    return logits_NE, weights_NK / weights_NK.sum(-1, keepdim=True), chosen_NK


@pytest.mark.parametrize("inside", [False, True], ids=["after backward", "within backward"])
def test_experts_without_tokens_are_named_by_their_numbers_and_no_error(mixture: nn.Module, inside: bool) -> None:
    _leave_out(mixture, [0, 3])
    found = _audited(mixture, inside=inside)
    assert set(found["idle"]) == {
        "model.layers.{0..1}.mlp.experts.{0,3}.down_proj",
        "model.layers.{0..1}.mlp.experts.{0,3}.gate_up_proj",
    }
    assert found["tensors"] == found["reached"] == len(list(mixture.parameters()))
    assert "zero" not in found


def test_experts_that_all_have_tokens_are_not_named(mixture: nn.Module) -> None:
    assert "idle" not in _audited(mixture)
