"""Our own decoding gives the tokens of transformers' `generate`, row by row, whatever rows stand beside each other, and
meets no mask where none is needed."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from finefit.artifacts.records import Levers
from finefit.evaluate import decoding
from finefit.evaluate.decoding import decode, likeliest, sample_by, uniform_draws, until_stop
from finefit.model.attention import GROUPED, PACKABLE, choose_attention, for_answers
from finefit.step.levers import apply_levers
from tests.step.test_packing import VOCABULARY, tiny_config

torch.set_num_threads(1)

NEW = 6
STOPS = (2, 5, 6, 7)
MANY = range(2, 14)
"""Stop tokens, so that rows end early and not together."""
LENGTHS = (7, 1, 12, 3, 12, 20)


def _prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(8, VOCABULARY, (length,), generator=chance).tolist() for length in lengths]


def _model(kind: str, attention: str | None = None) -> nn.Module:
    """Weights so far from zero that every token makes a difference."""
    config = tiny_config(kind)
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention or for_answers(choose_attention("cpu", (0, 0), "fp32", config))
    )
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(5)
    return model.eval()


def _generated(model: Any, prompt: Sequence[int], max_new_tokens: int = NEW, stops: Sequence[int] = STOPS) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stops), pad_token_id=0)
    input_ids = torch.tensor([list(prompt)])
    output: Tensor = model.generate(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


_greedy = partial(decode, max_new_tokens=NEW, stops=STOPS, pad=0, device="cpu", choose=likeliest)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_rows_of_unequal_length_get_the_tokens_that_transformers_gives_each_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(kind)
    wanted = [_generated(model, prompt) for prompt in _prompts()]
    monkeypatch.setattr(decoding, "_by_transformers", None)  # it must not come to that
    assert _greedy(model, _prompts()) == wanted
    assert len({tuple(tokens) for tokens in wanted}) > 2


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "lfm2"])
def test_models_beyond_their_window_or_with_other_memories_are_left_to_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(kind)
    prompts = _prompts((30, 11, 40))  # the window is 32
    monkeypatch.setattr(decoding, "_step_by_step", None)
    assert _greedy(model, prompts) == [_generated(model, prompt) for prompt in prompts]


def test_rows_that_have_ended_leave_and_the_others_go_on_as_if_nothing_had_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = _model("qwen3"), _prompts((9, 4, 9, 17, 2, 6, 13))
    long = [_generated(model, prompt, 24, MANY) for prompt in prompts]
    assert len({len(tokens) for tokens in long}) > 3
    sizes: list[int] = []
    follow = decoding.decode_step

    def seen(
        model: nn.Module, context: decoding.DecodeState, tokens_B: Tensor, pick: Callable[[Tensor], Tensor]
    ) -> Tensor:
        sizes.append(len(tokens_B))
        return follow(model, context, tokens_B, pick)

    monkeypatch.setattr(decoding, "decode_step", seen)
    assert _greedy(model, prompts, max_new_tokens=24, stops=MANY) == long
    assert sizes[0] == 7
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 2
    assert len(sizes) == max(map(len, long))


def test_a_look_that_comes_late_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = _model("qwen3"), _prompts((9, 4, 9, 17, 2, 6, 13))
    often = _greedy(model, prompts, max_new_tokens=21, stops=MANY)
    monkeypatch.setattr(decoding, "_STEPS_PER_CHECK", {"cpu": 8})
    assert _greedy(model, prompts, max_new_tokens=21, stops=MANY) == often


def _masks(lengths: Sequence[int]) -> list[tuple[int, tuple[int, ...] | None]]:
    """Query tokens and the shape of the mask of every call of attention."""
    met: list[tuple[int, tuple[int, ...] | None]] = []

    def spy(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        met.append((query.shape[2], None if attention_mask is None else tuple(attention_mask.shape)))
        answer: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return answer

    AttentionInterface.register("spied", spy)
    AttentionMaskInterface.register("spied", sdpa_mask)
    _greedy(_model("qwen3", "spied"), _prompts(lengths))
    return met


@pytest.mark.parametrize("lengths", [(20,), (9, 9, 9)])
def test_a_single_prompt_and_prompts_of_one_length_never_meet_a_mask(lengths: Sequence[int]) -> None:
    met = _masks(lengths)
    assert {mask for _, mask in met} == {None}
    assert {tokens for tokens, _ in met} == {lengths[0] - 1, 1}


def test_prompts_of_unequal_length_are_read_without_a_mask_and_followed_with_one_for_each_row() -> None:
    met = _masks((9, 4, 6))
    assert [mask for tokens, mask in met if tokens == 8] == [None, None]
    first = next(mask for tokens, mask in met if tokens == 1)
    assert first == (3, 1, 1, 9)


def test_heads_that_share_keys_are_not_repeated_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        seen.append((query.shape[2], key.shape[1]))
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr("finefit.model.attention.scaled_dot_product_attention", spy)
    model = _model("llama")
    assert model.config._attn_implementation == "sdpa" + GROUPED  # type: ignore[union-attr]
    _greedy(model, _prompts((9, 4)))
    assert set(seen) == {(2, 2)}  # 4 heads on 2 keys stand as two tokens


def test_an_mlp_in_tiles_answers_the_same() -> None:
    model, prompts = _model("llama"), _prompts()
    whole = _greedy(model, prompts)
    apply_levers(model, Levers(micro_batch=1, mlp_tiles=4))
    assert _greedy(model, prompts) == whole


def test_tokens_end_with_the_first_stop_and_are_whole_without_one() -> None:
    assert until_stop([9, 8, 2, 9, 2], frozenset((2, 5))) == [9, 8, 2]
    assert until_stop([9, 8], frozenset((2, 5))) == [9, 8]


# Drawn answers follow the model's probabilities, are the same whatever stands beside them, and differ from sample to
# sample.

torch.set_num_threads(1)
SAMPLED_TOKENS = 8


def _answers(
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    *,
    kind: str = "qwen3",
    temperature: float = 1.0,
    stops: Sequence[int] = (2, 9, 30, 41),
) -> list[list[int]]:
    said = [uniform_draws(5, f"row {number}", 0, steps=SAMPLED_TOKENS) for number in numbers]
    choose = sample_by(said, temperature=temperature, device="cpu")
    return decode(
        _model(kind),
        [prompts[at] for at in numbers],
        max_new_tokens=SAMPLED_TOKENS,
        stops=stops,
        pad=0,
        device="cpu",
        choose=choose,
    )


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits_V = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    num_rows = 4000
    said = [uniform_draws(1, f"{row}", 0, steps=1) for row in range(num_rows)]
    drawn = sample_by(said, temperature=1.0, device="cpu")(torch.arange(num_rows), 0, logits_V.expand(num_rows, -1))
    shares = {token: count / num_rows for token, count in Counter(drawn.tolist()).items()}
    assert shares == pytest.approx({0: 0.5, 2: 0.3, 3: 0.2}, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits_V, num_rows = torch.log(torch.tensor([0.6, 0.4])), 4000
    said = [uniform_draws(1, f"{row}", 0, steps=1) for row in range(num_rows)]

    def share_of_first(temperature: float) -> float:
        drawn: Tensor = sample_by(said, temperature=temperature, device="cpu")(
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
    assert sorted(map(len, together))[4] < SAMPLED_TOKENS == max(map(len, together))
    assert [_answers(prompts, [at], temperature=3.0, stops=stops)[0] for at in range(8)] == together


def test_samples_seeds_and_rows_have_chances_of_their_own() -> None:
    first = uniform_draws(1, "row", 0, steps=6)
    assert uniform_draws(1, "row", 0, steps=6) == first
    assert uniform_draws(1, "row", 0, steps=3) == first[:3]
    others = [
        uniform_draws(2, "row", 0, steps=6),
        uniform_draws(1, "row", 1, steps=6),
        uniform_draws(1, "other", 0, steps=6),
    ]
    assert all(first != other for other in others)
    assert all(0 <= number < 1 for number in first)
