"""Experts as they are computed here give what transformers' plain loop over experts gives, in what precision products
are asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finefit.model.experts import GROUPED, active_parameters, choose_experts, experts_of
from tests.conftest import make_model
from tests.mixtures import DENSE, FAMILIES, make_mixture

OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""With biases and transposed weights, and with weights of the chosen that do not sum to one."""
KINDS = (*FAMILIES, *OTHERS)


def _made(kind: str) -> PreTrainedModel:
    if kind in FAMILIES:
        return make_mixture(kind, num_experts=4)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **DENSE, **OTHERS[kind]), experts_implementation=choose_experts()
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _taken(
    model: PreTrainedModel, implementation: str, *, halves: bool = False, tokens: int = 66
) -> tuple[float, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids_BT = torch.randint(5, 261, (2, tokens // 2), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halves):
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _apart(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, as a share of its norm."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-9)) for name in right)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_plain_loop(kind: str) -> None:
    model = _made(kind)
    loss, gradients = _taken(model, GROUPED)
    plain, wanted = _taken(model, "eager")
    assert loss == pytest.approx(plain, rel=1e-6)
    assert _apart(gradients, wanted) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_products_are_taken_in_halves_as_those_of_linear_layers_are(kind: str) -> None:
    """The plain loop is made of linear layers, so autocast knows it."""
    model = _made(kind)
    in_halves, wanted, whole = (
        _taken(model, GROUPED, halves=True)[1],
        _taken(model, "eager", halves=True)[1],
        _taken(model, GROUPED)[1],
    )
    of_experts = [name for name in wanted if ".experts." in name and name.endswith("_proj")]
    few = {name: in_halves[name] for name in of_experts}
    assert _apart(few, {name: wanted[name] for name in of_experts}) < 0.05
    assert _apart(few, {name: whole[name] for name in of_experts}) > 1e-4  # not in fp32
    assert {gradient.dtype for gradient in few.values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_gives_the_same_bits(kind: str) -> None:
    model = _made(kind)
    first, again = (_taken(model, GROUPED)[1] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("tokens", [4, 8])
def test_fewer_tokens_than_experts_leave_the_others_at_rest(tokens: int) -> None:
    model = make_mixture("qwen3", num_experts=16, top_k=1)
    gradients = _taken(model, GROUPED, tokens=tokens)[1]
    moved = gradients["model.layers.0.mlp.experts.down_proj"].abs().amax((1, 2)).count_nonzero()
    assert 1 <= moved <= tokens
    assert _apart(gradients, _taken(model, "eager", tokens=tokens)[1]) < 2e-6


def test_every_expert_of_a_token_may_be_the_same_number_for_all() -> None:
    """All tokens to two experts, as a router that has collapsed sends them."""
    model = make_mixture("qwen3", num_experts=4)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    assert _apart(_taken(model, GROUPED)[1], _taken(model, "eager")[1]) < 2e-6


def test_a_token_meets_its_own_experts_and_all_that_is_shared() -> None:
    model = make_mixture("llama", num_experts=4, top_k=1)
    whole = sum(p.numel() for p in model.parameters())
    of_experts = sum(p.numel() for experts in experts_of(model).values() for p in experts.parameters())
    assert of_experts == 2 * 4 * 3 * 16 * 32
    assert active_parameters(model) == whole - of_experts * 3 // 4


def test_a_dense_model_has_no_experts_and_a_token_meets_all_of_it() -> None:
    model = make_model()
    assert experts_of(model) == {}
    assert active_parameters(model) == sum(p.numel() for p in model.parameters())
