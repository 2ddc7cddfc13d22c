"""One step of a mixture of experts: the cut into micro-batches, the levers and a second rank change nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from transformers import AutoConfig, AutoModelForCausalLM

from finefit.artifacts.records import Levers
from finefit.data.collate import pack
from finefit.errors import SpecError
from finefit.model.attention import choose_attention
from finefit.model.experts import choose_experts
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch, Objective
from finefit.spec.load import parse_spec
from finefit.spec.models import Full, Lora, Subset, Tuning
from finefit.spec.schema import Router
from finefit.step.forward import autocast_for, bind, make_objective
from finefit.step.levers import apply_levers
from finefit.train.ranks import ONE_RANK, ManyRanks
from tests.conftest import make_model
from tests.micro_batches import micro_batches
from tests.mixtures import FAMILIES, make_mixture
from tests.slow_cases import slow_but
from tests.step.conftest import FULL, RENDERER, Taken, assert_same_step, cut, take_gradients, unequal_examples
from tests.step.rank_group import Left, Training, free_port, train
from tests.step.test_levers import Elsewhere

PLAIN = Levers(micro_batch=1)
LEVERS = {
    "recomputed": replace(PLAIN, recompute=2),
    "attention kept": replace(PLAIN, recompute=2, keep_attention=True),
    "loss in chunks": replace(PLAIN, loss_chunk=16),
    "fused": replace(PLAIN, kernels="fused", recompute=1),
    "tiles": replace(PLAIN, mlp_tiles=4),
}


def _mixture(family: str = "qwen2") -> nn.Module:
    model: nn.Module = make_trainable(make_mixture(family), FULL, name="tiny")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_one_row_give_the_gradients_of_all_rows_at_once(family: str) -> None:
    model, examples = _mixture(family), unequal_examples()
    assert_same_step(take_gradients(model, cut(examples, 1)), take_gradients(model, cut(examples, 8)))


@pytest.mark.parametrize("levers", LEVERS.values(), ids=LEVERS)
def test_exact_levers_leave_gradients_as_they_are(levers: Levers) -> None:
    model, batches = _mixture(), cut(unequal_examples(), 3)
    wanted = take_gradients(model, batches)
    apply_levers(model, levers)
    forward = bind(model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused")
    assert_same_step(take_gradients(model, batches, forward=forward), wanted)


# two ranks

Kind = Literal["ddp", "fsdp2"]


def _as_rank(rank: int, kind: Kind, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo")
    assert group is not None
    torch.save(train(Training(kind, ManyRanks(group), _mixture()), steps=3), folder / f"{kind}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone() -> Left:
    return train(Training(None, ONE_RANK, _mixture()), steps=3)


@pytest.mark.parametrize("kind", slow_but(["fsdp2"], ["ddp", "fsdp2"]))
def test_two_ranks_train_what_one_process_does(kind: Kind, alone: Left, tmp_path: Path) -> None:
    """Three experts divided over two ranks, one of which has no row in every second step."""
    start_processes(_as_rank, args=(kind, tmp_path, free_port()), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        found: Left = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=False)
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)
        for name, gradient in alone.gradients.items():
            torch.testing.assert_close(
                found.gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=f"the gradients of {name} differ"
            )
        for name, weight in alone.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-5, msg=f"{name} differs")


# The router's objective in a real mixture: no lever, no cut and no layout changes its gradient.

ROUTER = Router(kind="router", balance=0.3)
GATES = Subset(kind="subset", trainable=("mlp.gate",))
SHAPE: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 1,
}
FAMILIES_ROUTER_STEP = ("mixtral", "qwen2_moe", "qwen3_moe")
PLAIN_ROUTER_STEP = Levers(micro_batch=3)


def mixture(family: str = "mixtral", *, tuning: Tuning = GATES, packing: bool = False, **changed: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | changed))
    attention = choose_attention("cpu", (0, 0), "fp32", config, packing=packing)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation=choose_experts()
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    trained: nn.Module = make_trainable(model, tuning, name="tiny")
    return trained


def objective_of(model: nn.Module, *, asked: Router = ROUTER, tuning: Tuning = GATES) -> Objective:
    return make_objective(asked, tuning, model, bind(model))


def taken(
    model: nn.Module, batches: Sequence[Batch], levers: Levers = PLAIN_ROUTER_STEP, *, precision: str = "fp32"
) -> Taken:
    apply_levers(model, levers, Elsewhere())
    forward = bind(
        model, loss_chunk=levers.loss_chunk, is_fused=levers.kernels == "fused", autocast=autocast_for("cpu", precision)
    )
    return take_gradients(model, batches, objective=objective_of(model), forward=forward)


@pytest.mark.parametrize("family", FAMILIES_ROUTER_STEP)
def test_every_cut_into_micro_batches_gives_the_same_gradient(family: str) -> None:
    whole = taken(mixture(family), cut(unequal_examples(), 8))
    assert len(whole.gradients) == 2
    assert all(gradient.abs().max() > 0 for gradient in whole.gradients.values())
    for micro_batch in (1, 3):
        found = taken(mixture(family), cut(unequal_examples(), micro_batch))
        assert_same_step(found, whole)
        assert {k: v.item() for k, v in found.outcome.measures.items()} == pytest.approx(
            {k: v.item() for k, v in whole.outcome.measures.items()}
        )


@pytest.mark.parametrize("family", FAMILIES_ROUTER_STEP)
def test_packed_rows_give_the_gradient_of_padded_ones(family: str) -> None:
    examples = unequal_examples()
    padded = taken(mixture(family), micro_batches(examples, micro_batch=4, pad=RENDERER.pad))
    packed = taken(mixture(family, packing=True), [pack(examples[:3]), pack(examples[3:])])
    assert_same_step(packed, padded)


@pytest.mark.parametrize(
    "levers",
    [
        replace(PLAIN_ROUTER_STEP, recompute=1),
        replace(PLAIN_ROUTER_STEP, recompute=2, keep_attention=True),
        replace(PLAIN_ROUTER_STEP, recompute=2, offload=True),
        replace(PLAIN_ROUTER_STEP, loss_chunk=11),
        replace(PLAIN_ROUTER_STEP, mlp_tiles=3),
        replace(PLAIN_ROUTER_STEP, kernels="fused", recompute=2),
    ],
    ids=["recomputed", "attention kept", "offloaded", "loss in chunks", "tiles", "fused"],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_an_exact_lever_leaves_the_routers_gradient_equal(family: str, levers: Levers) -> None:
    batches = cut(unequal_examples(), levers.micro_batch)
    assert_same_step(taken(mixture(family), batches, levers), taken(mixture(family), batches))


def test_balance_reaches_the_gradient_and_only_the_routers_move() -> None:
    model, batches = mixture(), cut(unequal_examples(), 8)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"model.layers.{at}.mlp.gate.weight" for at in range(2)
    }
    with_balance = take_gradients(model, batches, objective=objective_of(model))
    without = take_gradients(model, batches, objective=objective_of(model, asked=Router(kind="router", balance=0.0)))
    means = {name: value.item() for name, value in with_balance.outcome.measures.items()}
    assert with_balance.outcome.loss.item() == pytest.approx(means["lm_loss"] + 0.3 * means["balance"], rel=1e-6)
    assert without.outcome.loss.item() == pytest.approx(means["lm_loss"], rel=1e-6)
    assert all(
        (with_balance.gradients[name] - without.gradients[name]).abs().max() > 1e-4 for name in without.gradients
    )


def test_under_autocast_the_balance_is_taken_in_fp32() -> None:
    batches = cut(unequal_examples(), 8)
    whole, half = taken(mixture(), batches), taken(mixture(), batches, precision="bf16")
    assert half.outcome.measures["balance"].dtype == torch.float32
    assert half.outcome.measures["balance"].item() == pytest.approx(whole.outcome.measures["balance"].item(), rel=0.05)
    assert all(gradient.dtype == torch.float32 for gradient in half.gradients.values())


def test_the_objective_leaves_no_hooks_behind() -> None:
    model = mixture()
    taken(model, cut(unequal_examples(), 8))
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_layers_are_refused_since_their_routers_cannot_be_heard() -> None:
    spec = (
        "name: x\nmodel: {kind: folder, path: m}\ntuning: {kind: full}\ndata: {train: [{path: a.jsonl}]}\n"
        "objective: {kind: router}\noptimizer: {lr: 1e-3}\n"
    )
    assert parse_spec(spec, where="spec.yaml").objective == Router(kind="router")
    with pytest.raises(SpecError, match=r"levers\.compile: true hides"):
        parse_spec(spec, where="spec.yaml", overrides=("levers.compile=true",))


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(SpecError, match="LlamaForCausalLM has no routers"):
        objective_of(make_trainable(make_model(), Full(kind="full"), name="tiny"))


@pytest.mark.parametrize("family", FAMILIES_ROUTER_STEP)
def test_normalised_top_1_is_refused_because_the_router_would_get_no_gradient(family: str) -> None:
    model = mixture(family, num_experts_per_tok=1)
    with pytest.raises(SpecError, match="no gradient") as refused:
        objective_of(model)
    assert "top_k: 2" in refused.value.remedy


def test_unnormalised_top_1_is_trained() -> None:
    found = taken(mixture("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False), cut(unequal_examples(), 8))
    assert all(gradient.abs().max() > 0 for gradient in found.gradients.values())


def test_tuning_that_trains_no_router_is_refused_with_the_pattern_that_would() -> None:
    lora = Lora(kind="lora", rank=2, targets=("q_proj",))
    with pytest.raises(SpecError, match="tuning trains none of the 2 routers") as refused:
        objective_of(mixture(tuning=lora), tuning=lora)
    assert "trainable: [mlp.gate]" in refused.value.remedy
    assert objective_of(mixture(tuning=Full(kind="full")), tuning=Full(kind="full"))
