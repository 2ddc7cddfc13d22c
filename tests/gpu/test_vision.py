"""Vision-language models on a card: the gradients of a CPU, the predicted memory, no wait for the card. Run with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True pytest -m gpu`."""

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from bench.memory import ALL, LLAVA, SMOL, VL, Case, alone, lora, measure
from finefit.artifacts.records import Levers
from finefit.objective.batch import Batch
from finefit.rehearse.allocator import replay
from finefit.rehearse.rehearsal import rehearse
from finefit.step.forward import autocast_for, bind
from finefit.step.fused import kernels_here
from finefit.step.levers import apply_levers
from finefit.vision import vision_forward_in
from tests.gpu.segments import expandable_alone
from tests.gpu.waiting import waiting_forbidden
from tests.vision_batches import GRIDS, gradients, image_batch, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = {
    "Qwen2.5-VL, language": Case(
        shape=VL, layers=4, tuning=lora(16), rows=2, tokens=1024, loss_chunk=1024, grids=((1, 48, 48),)
    ),
    "Qwen2.5-VL, all towers": Case(
        shape=VL, layers=4, tuning=lora(16, targets=ALL), rows=2, tokens=1024, loss_chunk=1024, grids=((1, 48, 48),)
    ),
    "Qwen2.5-VL, recomputed": Case(
        shape=VL, layers=4, tuning=lora(16, targets=ALL), rows=2, tokens=1024, recompute=4, grids=((1, 48, 48),)
    ),
    "LLaVA, all towers": Case(
        shape=LLAVA, layers=4, tuning=lora(16, targets=ALL), rows=2, tokens=1024, loss_chunk=1024, grids=((1,),)
    ),
    "SmolVLM, all towers": Case(
        shape=SMOL, layers=4, tuning=lora(16, targets=ALL), rows=2, tokens=1024, loss_chunk=1024, grids=((2, 2),)
    ),
}


def _found(
    model: nn.Module, family: str, device: str, precision: str, levers: Levers
) -> tuple[float, dict[str, Tensor]]:
    kernels = kernels_here(device) if levers.kernels == "fused" else None
    apply_levers(model, levers, kernels=kernels)
    forward = bind(model, autocast=autocast_for(device, precision), is_fused=levers.kernels == "fused", kernels=kernels)
    loss = -forward(image_batch(family, (2, 0, 1)).moved(lambda tensor: tensor.to(device))).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: gradient.float().cpu() for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "levers", [Levers(micro_batch=3), Levers(micro_batch=3, recompute=2, kernels="fused")], ids=["plain", "levers"]
)
@pytest.mark.parametrize("family", [*GRIDS])
def test_a_card_gives_the_gradients_of_a_processor(family: str, levers: Levers, precision: str) -> None:
    model = trained(family)
    loss, wanted = _found(model, family, "cpu", "fp32", Levers(micro_batch=3))
    on_card, found = _found(model.cuda(), family, "cuda", precision, levers)
    assert on_card == pytest.approx(loss, rel=2e-2 if precision == "bf16" else 1e-4)
    apart = {
        name: ((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-9)).item() for name in wanted
    }
    assert max(apart.values()) < (0.2 if precision == "bf16" else 2e-3), max(apart, key=lambda name: apart[name])


@expandable_alone
@pytest.mark.parametrize("name", CASES)
def test_memory_is_what_was_predicted(name: str) -> None:
    answer = replay(rehearse(CASES[name].cfg).trace.stream())
    alone(dict)  # workspaces that other tests have taken would lie elsewhere, and 5 % less be reserved
    truth = alone(lambda: measure(CASES[name], steps=3))
    assert "error" not in truth, truth
    assert answer.allocated_bytes == pytest.approx(truth["allocated_bytes"], rel=0.01)
    assert answer.reserved_bytes == pytest.approx(truth["reserved_bytes"], rel=0.02)


def _masked(causal: nn.Module, batch: Batch) -> ModelOutput:
    """Without a mask transformers looks for packed rows among the positions of a language model of text, once for all
    layers, and waits for what it finds."""
    vision_forward, mask_11TT = (
        vision_forward_in(causal),
        torch.ones(1, 1, *2 * batch.input_ids_BT.shape[1:], dtype=torch.bool, device="cuda").tril(),
    )
    assert vision_forward is not None
    return vision_forward(causal.base_model, batch.input_ids_BT, batch.extra, use_cache=False, attention_mask=mask_11TT)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*GRIDS])
def test_a_forward_never_waits_for_the_card(family: str) -> None:
    model = trained(family).cuda()
    batch = image_batch(family, (2, 0, 1)).moved(lambda tensor: tensor.cuda())
    forward = bind(
        model, autocast=autocast_for("cuda", "bf16"), watch=lambda call: _masked if family == "llava" else call
    )
    (-forward(batch).sum()).backward()  # type: ignore[no-untyped-call] # what is made once may wait
    with waiting_forbidden():
        (-forward(batch).sum()).backward()  # type: ignore[no-untyped-call]
