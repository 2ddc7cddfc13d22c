"""Base weights in 4 and 8 bits, really trained on, on a CPU."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.errors import SpecError
from finefit.model.adapter import as_reference, freeze_reference
from finefit.model.family import save_weights
from finefit.model.load import base_bits, counts, load_base, load_for_answers, make_trainable, quiet, weight_dtype
from finefit.model.saved_weights import restore_weights
from finefit.objective.losses import sft_loss
from finefit.spec.models import Lora
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import frozen_checksums, make_optimizer
from tests.conftest import make_model, make_model_folder
from tests.step.conftest import ADAMW, cut, unequal_examples

pytest.importorskip("bitsandbytes")
torch.set_num_threads(1)
quiet()
INPUT_IDS = torch.arange(5, 45).reshape(2, 20)
BITS = (4, 8)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("quantised") / "model")


def quantised(folder: Path, bits: int, *, precision: str = "fp32", **changes: Any) -> Any:
    tuning = Lora.model_validate({"kind": "lora", "rank": 4, "alpha": 8.0, "base_bits": bits} | changes)
    base = load_base(folder, device="cpu", dtype=weight_dtype(precision, tuning), bits=base_bits(tuning))
    return make_trainable(base, tuning, name="model", base=folder.parent)


def train(model: nn.Module, *, precision: str = "fp32", steps: int = 6) -> list[float]:
    optimizer, forward = make_optimizer(model, ADAMW), bind(model, autocast=autocast_for("cpu", precision))
    scale = 256.0 if precision == "fp16" else 1.0
    batches = cut(unequal_examples(), 4)
    return [
        optimizer_step(
            batches, forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=bool, loss_scale=scale
        ).loss.item()
        for _ in range(steps)
    ]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=INPUT_IDS).logits
    model.train()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bits", BITS)
def test_embeddings_norms_and_head_stay_as_loaded_and_linear_layers_are_packed(
    folder: Path, bits: int, precision: str
) -> None:
    model = load_base(folder, device="cpu", dtype=HALVES[precision], bits=bits)
    kept = {name for name, p in model.named_parameters() if p.dtype is HALVES[precision]}
    assert kept == {name for name, _ in make_model().named_parameters() if "_proj" not in name}
    assert {p.dtype for name, p in model.named_parameters() if name not in kept} == {
        torch.uint8 if bits == 4 else torch.int8
    }
    assert model.get_output_embeddings().weight.dtype is HALVES[precision]
    if bits == 4:
        assert {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")} == {
            HALVES[precision]
        }


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"rank_stabilised": True}, {"weights": "bf16"}], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_adapters_learn_on_a_packed_base_that_does_not_move(folder: Path, bits: int, kind: dict[str, Any]) -> None:
    if bits == 8 and "dora" in kind:  # tests/gpu has it
        with pytest.raises(SpecError, match=r"tuning.dora with tuning.base_bits 8 needs a CUDA device"):
            quantised(folder, bits, **kind)
        return
    model = quantised(folder, bits, **kind)
    frozen = frozen_checksums(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    losses = train(model)
    assert losses[-1] < losses[0] - 0.01
    assert [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])] == []
    assert frozen_checksums(model) == frozen


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("bits", BITS)
def test_they_learn_in_halves_too(folder: Path, bits: int, precision: str) -> None:
    model = quantised(folder, bits, precision=precision)
    frozen = frozen_checksums(model)
    losses = train(model, precision=precision)
    assert losses[-1] < losses[0]
    assert frozen_checksums(model) == frozen
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("bits", BITS)
def test_validation_and_answers_leave_the_packed_weights_as_they_are(folder: Path, bits: int) -> None:
    model = quantised(folder, bits)
    frozen = frozen_checksums(model)
    first = logits(model)
    assert frozen_checksums(model) == frozen
    assert torch.equal(logits(model), first)
    train(model, steps=1)
    assert frozen_checksums(model) == frozen


@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_on_a_packed_base_is_saved_and_comes_back(folder: Path, bits: int, tmp_path: Path) -> None:
    model = quantised(folder, bits)
    train(model, steps=2)
    save_weights(model, tmp_path)
    assert "base_layer" not in json.dumps(json.loads((tmp_path / "adapter_config.json").read_text()))
    other = quantised(folder, bits)
    assert not torch.equal(logits(other), logits(model))
    restore_weights(other, tmp_path)
    assert torch.equal(logits(other), logits(model))
    read = load_for_answers(folder, tmp_path, device="cpu", dtype=torch.float32, bits=bits)
    assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("bits", BITS)
def test_a_packed_weight_counts_as_what_it_stands_for(folder: Path, bits: int) -> None:
    dense = make_trainable(make_model(), Lora(kind="lora", rank=4, alpha=8), name="tiny")
    model = quantised(folder, bits)
    assert counts(model) == counts(dense)
    train(model, steps=1)
    assert counts(model) == counts(dense)


@pytest.mark.parametrize("bits", BITS)
def test_the_reference_of_a_packed_model_is_where_it_started(folder: Path, bits: int) -> None:
    model = quantised(folder, bits)
    fresh = logits(model)
    train(model, steps=2)
    with as_reference(model):
        assert torch.equal(logits(model), fresh)
    save_weights(model, folder.parent / f"first-{bits}")
    on = quantised(folder, bits, adapter=f"first-{bits}")
    freeze_reference(on)
    start = logits(on)
    assert torch.equal(start, logits(model))
    train(on, steps=1)
    with as_reference(on):
        assert torch.equal(logits(on), start)


def test_products_in_8_bits_do_not_fill_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        logits(quantised(folder, 8))
    assert [record for record in caplog.records if record.name.startswith("bitsandbytes")] == []
