"""What the stand-ins answer is what the real layers answer. What they allocate is held on a card (tests/gpu/test_shadows.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finefit.rehearse.rehearsal import rehearse
from finefit.rehearse.shadows import Int8Linear, Nf4Linear, leave_uncast
from finefit.step.levers import layers_of
from tests.quantised import quantised_layer, with_dora
from tests.rehearse.conftest import LORA, make_config, make_scene

WIDTH = 64


@contextmanager
def autocast_as_on_a_card() -> Iterator[None]:
    """peft asks whether CUDA's is on; the products here follow the CPU's."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def dtypes_through(model: nn.Module, given: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Of what it answers, and of the gradient of what it was given."""
    x = torch.ones(2, 8, WIDTH, dtype=given, requires_grad=True)
    with autocast_as_on_a_card():
        out: Tensor = model(x)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return out.dtype, x.grad.dtype


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "shadow_of"), [(4, Nf4Linear), (8, Int8Linear)])
def test_dora_on_a_quantised_layer_answers_in_fp32_as_peft_on_bitsandbytes_does(
    bits: int, shadow_of: Any, given: torch.dtype
) -> None:
    pytest.importorskip("bitsandbytes")
    real = with_dora(quantised_layer(bits, WIDTH, WIDTH, device="cpu"), bits)
    with torch.device("meta"):
        shadow = with_dora(shadow_of(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)), bits)
    leave_uncast(shadow.to_empty(device="cpu"))
    assert dtypes_through(shadow, given) == dtypes_through(real, given) == (torch.float32, given)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_in_four_bits_answers_in_the_precision_of_its_input(given: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    real = quantised_layer(4, WIDTH, WIDTH, device="cpu")
    with torch.device("meta"):
        shadow = Nf4Linear(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))
    assert dtypes_through(shadow.to_empty(device="cpu"), given) == dtypes_through(real, given) == (given, given)


@pytest.mark.parametrize(
    ("base_bits", "is_dora", "wanted"),
    [(4, True, torch.float32), (8, True, torch.float32), (4, False, torch.bfloat16), (None, True, torch.bfloat16)],
)
def test_a_rehearsal_has_hidden_states_in_fp32_where_dora_meets_quantised_layers(
    base_bits: int | None, is_dora: bool, wanted: torch.dtype
) -> None:
    seen: set[torch.dtype] = set()

    def listen(model: nn.Module) -> None:
        for layer in layers_of(model):
            layer.register_forward_hook(lambda *called: seen.add(called[-1].dtype))

    rehearse(
        make_scene(make_config(layers=2), tuning=LORA.model_copy(update={"base_bits": base_bits, "dora": is_dora})),
        adjust=listen,
    )
    assert seen == {wanted}
