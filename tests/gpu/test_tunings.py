"""Tunings, precisions and optimizers as only a card has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.model.attention import attention_here
from finefit.model.load import base_bits, load_base, make_trainable, quiet, weight_dtype
from finefit.objective.losses import sft_loss
from finefit.spec.models import Full, Lora, Subset, Tuning
from finefit.spec.schema import AdamW
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import frozen_checksums, make_optimizer, restore_state, save_state
from tests.conftest import make_model_folder
from tests.step.conftest import ADAMW, cut, unequal_examples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LORA = Lora(kind="lora", rank=4, alpha=8)
quiet()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("card") / "model")


def on_card(folder: Path, tuning: Tuning, precision: str) -> nn.Module:
    base = load_base(
        folder,
        device="cuda",
        dtype=weight_dtype(precision, tuning),
        attention=attention_here("cuda", precision, folder),
        bits=base_bits(tuning),
    )
    model: nn.Module = make_trainable(base, tuning, name="model")
    return model


def train(model: nn.Module, precision: str, *, steps: int = 8) -> list[float]:
    optimizer = make_optimizer(model, ADAMW, device="cuda")
    forward = bind(model, autocast=autocast_for("cuda", precision))
    batches = [batch.moved(lambda t: t.cuda()) for batch in cut(unequal_examples(), 4)]
    scale = 1024.0 if precision == "fp16" else 1.0
    return [
        optimizer_step(
            batches, forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=bool, loss_scale=scale
        ).loss.item()
        for _ in range(steps)
    ]


TUNINGS: dict[str, Tuning] = {
    "lora": LORA,
    "dora": LORA.model_copy(update={"dora": True}),
    "nf4": LORA.model_copy(update={"base_bits": 4}),
    "int8": LORA.model_copy(update={"base_bits": 8}),
    "nf4-dora": LORA.model_copy(update={"base_bits": 4, "dora": True}),
    "int8-dora": LORA.model_copy(update={"base_bits": 8, "dora": True}),
    "bf16-weights": LORA.model_copy(update={"weights": "bf16"}),
    "subset": Subset(kind="subset", trainable=("layers.*.mlp",)),
    "full": Full(kind="full"),
}


@pytest.mark.filterwarnings(
    "ignore:inner dimension .* is not aligned for fast kernel:UserWarning"
)  # the model is that narrow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", TUNINGS)
def test_every_tuning_learns_in_every_precision_and_what_is_frozen_does_not_move(
    folder: Path, name: str, precision: str
) -> None:
    if "nf4" in name or "int8" in name:
        pytest.importorskip("bitsandbytes")
    model = on_card(folder, TUNINGS[name], precision)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    frozen = frozen_checksums(model)
    losses = train(model, precision)
    assert losses[-1] < losses[0]
    assert frozen_checksums(model) == frozen


def test_a_card_and_a_cpu_have_the_same_digest_of_the_same_weights(folder: Path) -> None:
    model = make_trainable(load_base(folder, device="cpu", dtype=torch.bfloat16), LORA, name="model")
    here = frozen_checksums(model)
    assert frozen_checksums(model.cuda()) == here


def large(device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(512, 512, device=device)  # more than 100,000 values: smaller moments are not paged


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, count: int) -> list[Tensor]:
    inputs = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    for _ in range(count):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("paged_adamw", 1e-6), ("adamw_8bit", 2e-3), ("paged_adamw_8bit", 2e-3)]
)
def test_optimizers_of_bitsandbytes_go_where_adamw_goes(kind: Any, tolerance: float) -> None:
    pytest.importorskip("bitsandbytes")
    exact, other = large(), large()
    wanted = steps(exact, make_optimizer(exact, AdamW(lr=1e-3, weight_decay=0.1), device="cuda"), count=5)
    optimizer: Any = make_optimizer(other, AdamW(kind=kind, lr=1e-3, weight_decay=0.1), device="cuda")
    found = steps(other, optimizer, count=5)
    assert all(torch.allclose(a, b, atol=tolerance) for a, b in zip(wanted, found, strict=True))
    moments = optimizer.state[other.weight]["state1"]
    assert getattr(moments, "is_paged", False) is kind.startswith("paged")
    assert moments.dtype == (torch.uint8 if kind.endswith("8bit") else torch.float32)


@pytest.mark.parametrize("kind", ["paged_adamw", "paged_adamw_8bit"])
def test_restored_moments_are_paged_again_and_go_on_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    spec = AdamW(kind=kind, lr=1e-3)
    model, other = large(), large()
    optimizer, restored = make_optimizer(model, spec, device="cuda"), make_optimizer(other, spec, device="cuda")
    steps(model, optimizer, count=3)
    save_state(tmp_path, model, optimizer)
    other.load_state_dict(model.state_dict())
    restore_state(tmp_path, other, restored)
    for slot in ("state1", "state2"):
        moments = restored.state[other.weight][slot]  # type: ignore[index]
        assert moments.is_paged
        assert torch.equal(moments, optimizer.state[model.weight][slot])  # type: ignore[index]
    wanted, found = steps(model, optimizer, count=2), steps(other, restored, count=2)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
