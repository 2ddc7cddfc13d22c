"""Mixtures of experts: training and answers are rehearsed as they will be run, and what is predicted holds for any
routing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from finefit.model.load import make_trainable
from finefit.objective.batch import Batch
from finefit.objective.losses import sft_loss
from finefit.rehearse.cost_model import total_flops
from finefit.rehearse.fake_kernels import GROUPED_MM, device_kernels
from finefit.rehearse.fake_model import StepConfig, measure_size
from finefit.rehearse.generation import GENERATION, GenerationRehearsal, rehearse_answers
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.rehearse.rehearsal import rehearse
from finefit.rehearse.trace import Cost
from finefit.spec.models import Lora, Subset, Tuning
from finefit.spec.schema import Router
from finefit.step.forward import bind
from finefit.step.levers import apply_levers
from finefit.step.optimize import optimizer_step
from finefit.step.state import make_optimizer
from tests.mixtures import FAMILIES, make_mixture, mixture_config
from tests.rehearse.conftest import FULL, kept_after_forward, make_cfg, peak

ROUTERS = Subset(kind="subset", trainable=("mlp.gate",))
ATTENTION = Lora(kind="lora", rank=8, targets=("q_proj", "v_proj"))
TUNINGS: dict[str, Tuning] = {"full": FULL, "routers": ROUTERS, "attention": ATTENTION}
PROCESSOR: dict[str, Any] = {"device": "cpu", "capability": (0, 0), "precision": "fp32"}
DEVICES: dict[str, dict[str, Any]] = {
    "processor": PROCESSOR,
    "hopper": {"capability": (9, 0)},
    "ampere": {"capability": (8, 0)},
    "turing": {"capability": (7, 5), "precision": "fp16"},
}
WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}


def _cfg(family: str = "qwen3", *, num_experts: int = 4, layers: int = 2, **changes: Any) -> StepConfig:
    shape = {"tokens": 256, "supervised": 200, "levers": {"micro_batch": 2}}
    return make_cfg(
        mixture_config(family, num_experts=num_experts, num_hidden_layers=layers, **WIDE), **(shape | changes)
    )


# what is trained


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tuning_is_rehearsed_and_every_trained_tensor_is_reached(
    family: str, tuning: Tuning, device: dict[str, Any]
) -> None:
    found = rehearse(_cfg(family, tuning=tuning, is_quick=True, **device))
    assert found.unreached == ()
    assert found.trace.peaks()["backward"] > measure_size(_cfg(family, tuning=tuning, **device)).weight_bytes


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_routers_are_rehearsed_with_the_loss_that_balances_them(packing: bool) -> None:
    """What routers say is kept for it: of two layers and all tokens, in what they say it."""
    plain = _cfg(tuning=ROUTERS, is_quick=True, levers={"micro_batch": 2, "packing": packing}, **PROCESSOR)
    balanced = rehearse(replace(plain, objective=Router(kind="router")))
    assert balanced.unreached == ()
    assert peak(balanced) > peak(rehearse(plain))


@pytest.mark.parametrize("tuning", [FULL, ROUTERS], ids=["full", "routers"])
def test_a_few_layers_stand_for_all_of_them(tuning: Tuning) -> None:
    cfg = _cfg("qwen2", layers=6, tuning=tuning, is_quick=True, levers={"micro_batch": 1, "recompute": 6})
    assert peak(rehearse_extrapolated(cfg)) == peak(rehearse(cfg))


def test_products_of_experts_are_taken_in_halves_where_weights_are_kept_in_fp32() -> None:
    """A card that takes 16 bits twenty times as fast would be planned, and used, as one that takes 32."""
    trace = rehearse(_cfg(tuning=FULL, capability=(9, 0), is_quick=True)).trace
    grouped = [cost for costs in trace.costs.values() for cost in costs if _is_of_experts(cost)]
    assert grouped
    assert all(cost.is_half for cost in grouped)


def _is_of_experts(cost: Cost) -> bool:
    """Of 2 x 256 tokens, two experts each: the first product, and its two gradients."""
    return cost.flops == 2 * (2 * 256 * 2) * 64 * 2 * 256


# what it takes


def _real_peak(cfg: StepConfig, *, is_collapsed: bool) -> int:
    """What torch allocates beyond the weights in two real steps, by its own profiler."""
    text = cfg.config
    model = make_mixture("qwen3", num_experts=text["num_experts"], num_hidden_layers=text["num_hidden_layers"], **WIDE)
    if is_collapsed:  # every token prefers the same two experts
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data.zero_()
    trained = make_trainable(model, cfg.tuning, name="tiny")
    apply_levers(trained, cfg.levers)
    optimizer, forward = (
        make_optimizer(trained, cfg.optimizer, device="cpu"),
        bind(trained, loss_chunk=cfg.levers.loss_chunk),
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for _ in range(2):
            optimizer_step(
                _batches(cfg), forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=bool
            )
    return _highest(
        [
            (event.start_ns(), event.nbytes())
            for event in watched.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
    )


def _batches(cfg: StepConfig) -> list[Batch]:
    rows, count = cfg.levers.micro_batch, cfg.levers.micro_batch * cfg.supervised
    ids_BT = torch.randint(5, 261, (rows, cfg.tokens), generator=torch.Generator().manual_seed(3))
    positions_N, targets_N = torch.arange(count), torch.ones(count, dtype=torch.long)
    return [
        Batch(
            input_ids_BT=ids_BT,
            positions_N=positions_N,
            targets_N=targets_N,
            num_supervised=count,
            num_tokens=ids_BT.numel(),
        )
    ]


def _highest(changes: Sequence[tuple[int, int]]) -> int:
    now = highest = 0
    for _, num_bytes in sorted(changes):
        now += num_bytes
        highest = max(highest, now)
    return highest


@pytest.mark.parametrize("recompute", [0, 2], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_a_real_step_takes_what_was_predicted_whether_its_routing_is_even_or_has_collapsed(
    tuning: Tuning, recompute: int
) -> None:
    """To the same few per cent as a dense model's on a processor, and never more."""
    cfg = _cfg(tuning=tuning, levers={"micro_batch": 2, "recompute": recompute, "adapter_inputs": "fp32"}, **PROCESSOR)
    found = rehearse(cfg)
    predicted = peak(found) - sum(block.num_bytes for block in found.trace.blocks if block.instant == "load")
    even, collapsed = (_real_peak(cfg, is_collapsed=is_collapsed) for is_collapsed in (False, True))
    assert even == collapsed
    assert 0.88 < even / predicted <= 1.0


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
def test_more_experts_keep_no_more_activations(tuning: Tuning) -> None:
    """As many tokens meet an expert as before; only what routers say of each is more, and that is kept once or
    twice."""
    few, many = (
        kept_after_forward(rehearse(_cfg(num_experts=count, tuning=tuning, is_quick=True, **PROCESSOR)))
        for count in (4, 32)
    )
    one_layer = (32 - 4) * 512 * 4
    assert 0 <= many - few <= 2 * 2 * one_layer


def test_a_mixture_holds_all_of_its_parameters_and_a_token_meets_few() -> None:
    size = measure_size(_cfg("llama", num_experts=8, tuning=FULL))
    one = 2 * 3 * 64 * 256  # of both layers
    assert size.active == size.parameters - 6 * one
    assert size.expert_bytes == 8 * one * 4
    dense = measure_size(make_cfg(tuning=FULL))
    assert (dense.active, dense.expert_bytes) == (None, 0)


# how long it takes


def test_work_grows_with_the_experts_of_a_token_and_not_with_those_of_the_model() -> None:
    def flops(num_experts: int, top_k: int) -> float:
        config = mixture_config("qwen3", num_experts=num_experts, top_k=top_k, **WIDE)
        return total_flops(rehearse(replace(_cfg(tuning=FULL, is_quick=True), config=config)).trace)

    router = 3 * 2 * 2 * 512 * 64  # for each expert more, in both layers
    assert flops(16, 2) - flops(8, 2) == 8 * router
    one_expert = 3 * 2 * 2 * 512 * 3 * 64 * 256
    assert flops(8, 3) - flops(8, 2) == one_expert


def _bytes_read(found: GenerationRehearsal) -> float:
    return sum(
        count * cost.num_bytes
        for (instant, _), costs in found.trace.costs.items()
        if instant == GENERATION
        for cost, count in costs.items()
    )


def test_a_single_answer_reads_the_experts_of_its_token_and_not_all_of_them() -> None:
    few, many = (
        rehearse_answers(_cfg(num_experts=count, tuning=FULL), rows=1, prompt_tokens=8, new_tokens=4)
        for count in (4, 64)
    )
    of_one = 3 * 64 * 256 * 2
    assert _bytes_read(many) - _bytes_read(few) < 2 * of_one


def test_where_no_kernel_takes_all_groups_each_expert_is_launched_by_itself() -> None:
    """Hopper takes them at once in bf16; an A100, and any card in fp16 or fp32, one after the other."""
    assert device_kernels("cuda", (9, 0), "bf16").has_grouped
    assert not device_kernels("cuda", (8, 0), "bf16").has_grouped
    assert not device_kernels("cuda", (9, 0), "fp32").has_grouped

    def launched(capability: tuple[int, int]) -> int:
        trace = rehearse(_cfg(num_experts=16, tuning=FULL, capability=capability, is_quick=True)).trace
        return trace.operations["forward", 0].total()

    of_two_products = 2 * (16 - 1)
    assert launched((8, 0)) - launched((9, 0)) >= of_two_products
    assert device_kernels("cpu", (0, 0), "fp32").launches(GROUPED_MM, ()) == 1


# answers


@pytest.mark.parametrize("device", [{"capability": (9, 0)}, PROCESSOR], ids=["card", "processor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_a_mixture_are_rehearsed(family: str, device: dict[str, Any]) -> None:
    cfg = _cfg(family, tuning=FULL, **device)
    one, many = (rehearse_answers(cfg, rows=rows, prompt_tokens=32, new_tokens=16).allocated_bytes for rows in (1, 16))
    weights = measure_size(cfg).weight_bytes // (2 if cfg.precision == "bf16" else 1)
    assert weights <= one < many
