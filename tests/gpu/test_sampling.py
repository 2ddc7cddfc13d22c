"""Answers drawn on a card: those of a CPU for the same chances, and the same alone as among others."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from finefit.evaluate.decoding import decode
from finefit.evaluate.sampling import chances, drawn_by
from tests.gpu.test_answers import _model, _prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NEW = 20
STOPS = range(0, 1024, 40)
"""So that rows end early and not together, between two looks at the card."""


def _answers(model: nn.Module, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[int]]:
    said = [chances(3, f"row {number}", 0, steps=NEW) for number in numbers]
    choose = drawn_by(said, temperature=1.0, device="cuda")
    return decode(
        model, [prompts[at] for at in numbers], max_new_tokens=NEW, stops=STOPS, pad=0, device="cuda", choose=choose
    )


def test_an_answer_on_a_card_is_the_same_alone_and_among_others() -> None:
    model, prompts = _model("fp32"), _prompts()
    together = _answers(model, prompts, range(len(prompts)))
    assert [_answers(model, prompts, [at])[0] for at in range(len(prompts))] == together
    assert len({len(tokens) for tokens in together}) > 1


def test_a_card_draws_what_a_cpu_draws() -> None:
    logits_BV = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * 3
    said = [chances(1, f"{row}", 0, steps=1) for row in range(512)]
    drawn = [
        drawn_by(said, temperature=0.7, device=device)(
            torch.arange(512, device=device), 0, logits_BV.to(device)
        ).tolist()
        for device in ("cpu", "cuda")
    ]
    assert (
        sum(one != other for one, other in zip(*drawn, strict=True)) <= 1
    )  # a chance that falls on an edge, rounded otherwise
