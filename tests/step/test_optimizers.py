from typing import Any

import pytest
import torch

from finefit.errors import SpecError
from finefit.spec.schema import AdamW
from finefit.step.state import make_optimizer
from tests.step.conftest import FULL, tuned


def test_a_cpu_updates_tensor_by_tensor_and_a_card_in_one_kernel() -> None:
    optimizer = make_optimizer(tuned(FULL), AdamW(lr=1e-3), device="cpu")
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (True, None)


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_what_needs_a_card_is_refused_by_name_without_one(kind: Any) -> None:
    with pytest.raises(SpecError) as caught:
        make_optimizer(tuned(FULL), AdamW(kind=kind, lr=1e-3), device="cpu")
    assert caught.value.problem == f"optimizer.kind {kind} needs a CUDA device"
    assert caught.value.remedy == "set optimizer.kind: adamw"


@pytest.mark.parametrize(
    ("kind", "name", "bits", "is_paged"),
    [
        ("adamw_8bit", "AdamW8bit", 8, False),
        ("paged_adamw", "PagedAdamW", 32, True),
        ("paged_adamw_8bit", "PagedAdamW8bit", 8, True),
    ],
)
def test_each_kind_is_its_own_optimizer_with_the_settings_that_were_asked_for(
    kind: Any, name: str, bits: int, is_paged: bool
) -> None:
    pytest.importorskip("bitsandbytes")
    spec = AdamW(kind=kind, lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer: Any = make_optimizer(tuned(FULL), spec, device="cuda")
    assert type(optimizer).__name__ == name
    assert (optimizer.args.optim_bits, optimizer.is_paged) == (bits, is_paged)
    matrices, others = optimizer.param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}
    for group, decay in ((matrices, 0.1), (others, 0.0)):
        assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (
            3e-4,
            (0.8, 0.95),
            1e-6,
            decay,
        )


def test_moments_are_kept_in_what_their_weights_are_in() -> None:
    model = tuned(FULL)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(model, AdamW(lr=1e-3))
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
