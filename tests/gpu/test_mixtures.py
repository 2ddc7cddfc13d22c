"""Mixtures of experts on a card: the same numbers as on a processor, the memory that was predicted, no wait for the
card. Run with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.memory import FULL, Case, alone, lora, measure, subset
from bench.moe import MANY, TWO, measured, predicted
from finefit.model.experts import GROUPED
from finefit.model.family import save_weights
from finefit.model.load import load_for_answers
from finefit.stages.build_moe import _free_bytes
from tests.conftest import SPECIAL, make_tokenizer, write_jsonl
from tests.gpu.segments import expandable_alone
from tests.gpu.test_measure import SPEC, finefit
from tests.gpu.waiting import waiting_forbidden
from tests.mixtures import FAMILIES, make_mixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CASES = {
    "full": Case(shape=TWO, layers=4, tuning=FULL, rows=2, tokens=1024, loss_chunk=1024),
    "full, recomputed": Case(shape=MANY, layers=2, tuning=FULL, rows=1, tokens=2048, recompute=2, loss_chunk=1024),
    "routers": Case(shape=TWO, layers=4, tuning=subset("mlp.gate"), rows=2, tokens=1024, loss_chunk=1024),
    "attention": Case(shape=MANY, layers=2, tuning=lora(16), rows=2, tokens=2048, loss_chunk=1024),
    "fp32": Case(shape=TWO, layers=4, tuning=FULL, rows=1, tokens=512, precision="fp32"),
}


def _gradients(model: nn.Module, *, halves: bool) -> tuple[float, dict[str, Tensor]]:
    device = next(model.parameters()).device
    ids_BT = torch.randint(5, len(SPECIAL) + 256, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    model.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=halves):
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
    loss.backward()
    return loss.item(), {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}


def _assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float) -> None:
    apart = {
        name: ((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-9)).item() for name in wanted
    }
    assert max(apart.values()) < share, max(apart, key=lambda name: apart[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_card_gives_the_gradients_of_a_processor(family: str) -> None:
    model = make_mixture(family, num_experts=8, **WIDE)
    assert model.config._experts_implementation == GROUPED
    loss, wanted = _gradients(model, halves=False)
    on_card, found = _gradients(model.cuda(), halves=False)
    assert on_card == pytest.approx(loss, rel=1e-4)
    _assert_near(found, wanted, 2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_by_groups_in_bf16_give_the_gradients_of_experts_taken_one_by_one(family: str) -> None:
    """By transformers' own loop. Of one layer: in a second one rounding alone would send tokens to other experts."""
    model = make_mixture(family, num_experts=8, num_hidden_layers=1, **WIDE).cuda()
    loss, found = _gradients(model, halves=True)
    model.set_experts_implementation("eager")
    one_by_one, wanted = _gradients(model, halves=True)
    assert loss == pytest.approx(one_by_one, rel=1e-3)
    _assert_near(found, wanted, 0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_without_tokens_have_a_gradient_of_zero_and_no_garbage(family: str) -> None:
    model = make_mixture(family, num_experts=16, top_k=1, **WIDE).cuda()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    for name, gradient in _gradients(model, halves=True)[1].items():
        if ".experts." in name:
            assert gradient.isfinite().all()
            assert gradient.abs().amax((1, 2)).count_nonzero() == 1


def test_a_second_backward_gives_the_same_bits_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        model = make_mixture("qwen3", num_experts=8, **WIDE).cuda()
        first, again = (_gradients(model, halves=True)[1] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="products by groups are one kernel on Hopper",
)
def test_a_step_in_bf16_never_waits_for_the_card() -> None:
    model = make_mixture("qwen2", num_experts=8, **WIDE).cuda()
    ids_BT = torch.ones(2, 64, dtype=torch.long, device="cuda")
    mask_11TT = torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda").tril()
    _loss(model, ids_BT, mask_11TT).backward()  # type: ignore[no-untyped-call] # the first call may set things up
    with waiting_forbidden():
        loss = _loss(model, ids_BT, mask_11TT)
        loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()


def _loss(model: nn.Module, ids_BT: Tensor, mask_11TT: Tensor) -> Tensor:
    """Without a mask transformers looks for packed rows among the positions, once for all layers, and waits for what it
    finds."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found: Tensor = model.base_model(input_ids=ids_BT, attention_mask=mask_11TT, use_cache=False).last_hidden_state  # type: ignore[operator]
    return found.float().square().mean()


@expandable_alone
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_takes_what_was_predicted_however_tokens_are_routed(case: Case) -> None:
    told = predicted(case)
    alone(dict)  # workspaces that other tests have taken would lie elsewhere
    even, collapsed = (measured(case, is_collapsed=is_collapsed) for is_collapsed in (False, True))
    print(f"\n{case.name}: {told} predicted, {even} measured, {collapsed} collapsed")
    for found in (even, collapsed):
        assert abs(told["allocated_bytes"] / found["allocated_bytes"] - 1) < 0.01
        assert told["reserved_bytes"] / found["reserved_bytes"] > 0.97


def test_a_mixture_is_saved_without_more_memory_on_the_card(tmp_path: Path) -> None:
    """Taking experts apart copies them: in host memory."""
    model = make_mixture("qwen3", num_experts=32, **WIDE).cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save_weights(model, tmp_path)
    assert torch.cuda.max_memory_allocated() == before
    again = load_for_answers(tmp_path, None, device="cuda", dtype=torch.float32)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_the_whole_command_trains_a_mixture_within_what_it_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_mixture(
        "qwen2", num_experts=4, num_hidden_layers=6, vocab_size=32000, max_position_embeddings=4096, **WIDE
    ).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * (600 - 5 * at)}]}
        for at in range(24)
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("TUNING", "{kind: full}").replace("LEVERS", "levers: {micro_batch: 2}"))
    found = finefit("plan", str(path), "--measure", cwd=tmp_path)
    assert abs(found["error"]) < 0.03 or abs(found["measured_bytes"] - found["predicted_bytes"]) <= 24 << 20
    assert finefit("run", str(path), cwd=tmp_path)["result"]["step"] == 3


def test_the_measured_case_is_alone_on_the_card() -> None:
    """Else the figures above would be of two models."""
    assert alone(lambda: measure(CASES["fp32"]))["left_bytes"] < 64 << 20


def test_what_the_base_has_left_behind_counts_as_free_for_the_mixture() -> None:
    """With the allocator, and in a circle that nobody has collected."""
    before = _free_bytes("cuda")
    circle: list[Any] = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda")]
    circle.append(circle)
    del circle
    assert _free_bytes("cuda") > before - (1 << 26)
