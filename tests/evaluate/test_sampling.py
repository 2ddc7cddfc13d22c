"""Drawn answers follow the model's probabilities, are the same whatever stands beside them, and differ from sample to sample."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from finefit.evaluate import decoding
from finefit.evaluate.decoding import decode
from finefit.evaluate.sampling import chances, drawn_by
from tests.evaluate.test_decoding import _model, _prompts
from tests.step.test_packing import VOCABULARY

torch.set_num_threads(1)
NEW = 8


def _answers(
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    *,
    kind: str = "qwen3",
    temperature: float = 1.0,
    stops: Sequence[int] = (2, 9, 30, 41),
) -> list[list[int]]:
    said = [chances(5, f"row {number}", 0, steps=NEW) for number in numbers]
    choose = drawn_by(said, temperature=temperature, device="cpu")
    return decode(
        _model(kind),
        [prompts[at] for at in numbers],
        max_new_tokens=NEW,
        stops=stops,
        pad=0,
        device="cpu",
        choose=choose,
    )


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits_V = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    num_rows = 4000
    said = [chances(1, f"{row}", 0, steps=1) for row in range(num_rows)]
    drawn = drawn_by(said, temperature=1.0, device="cpu")(torch.arange(num_rows), 0, logits_V.expand(num_rows, -1))
    shares = {token: count / num_rows for token, count in Counter(drawn.tolist()).items()}
    assert shares == pytest.approx({0: 0.5, 2: 0.3, 3: 0.2}, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits_V, num_rows = torch.log(torch.tensor([0.6, 0.4])), 4000
    said = [chances(1, f"{row}", 0, steps=1) for row in range(num_rows)]

    def share_of_first(temperature: float) -> float:
        drawn: Tensor = drawn_by(said, temperature=temperature, device="cpu")(
            torch.arange(num_rows), 0, logits_V.expand(num_rows, -1)
        )
        return float((drawn == 0).double().mean())

    assert share_of_first(0.5) == pytest.approx(0.36 / (0.36 + 0.16), abs=0.03)
    assert share_of_first(100.0) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])  # one by our own steps, one by transformers
def test_an_answer_is_the_same_alone_and_among_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = _prompts((30, 11, 40, 5, 9)) if kind == "gemma2" else _prompts((7, 1, 12, 3, 20))
    monkeypatch.setattr(
        decoding, "_step_by_step" if kind == "gemma2" else "_by_transformers", None
    )  # it must not come to that
    together = _answers(prompts, range(5), kind=kind)
    assert [_answers(prompts, [at], kind=kind)[0] for at in range(5)] == together
    assert list(reversed(_answers(prompts, [4, 3, 2, 1, 0], kind=kind))) == together
    assert len({tuple(tokens) for tokens in together}) == 5


def test_rows_that_end_early_leave_the_chances_of_the_others_as_they_were() -> None:
    """One word in five ends an answer, so half of the batch has soon left it."""
    prompts, stops = _prompts((7, 1, 12, 3, 20, 9, 4, 6)), range(0, VOCABULARY, 5)
    together = _answers(prompts, range(8), temperature=3.0, stops=stops)
    assert sorted(map(len, together))[4] < NEW == max(map(len, together))
    assert [_answers(prompts, [at], temperature=3.0, stops=stops)[0] for at in range(8)] == together


def test_samples_seeds_and_rows_have_chances_of_their_own() -> None:
    first = chances(1, "row", 0, steps=6)
    assert chances(1, "row", 0, steps=6) == first
    assert chances(1, "row", 0, steps=3) == first[:3]
    others = [chances(2, "row", 0, steps=6), chances(1, "row", 1, steps=6), chances(1, "other", 0, steps=6)]
    assert all(first != other for other in others)
    assert all(0 <= number < 1 for number in first)
