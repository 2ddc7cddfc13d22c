"""Answers on a card: the tokens that transformers gives, memory that runs out and is found again, long prompts without
a mask, and several cards."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import write_record
from finefit.evaluate.batches import in_batches
from finefit.evaluate.decoding import decode, likeliest, sample_by, uniform_draws
from finefit.evaluate.generate import examples_of, logprobs
from finefit.evaluate.worker import EvalJob, evaluate, read_job
from finefit.model.attention import choose_attention, for_answers
from finefit.model.load import load_base, load_for_answers
from tests.evaluate.conftest import RENDERER, ROWS, make_work, never
from tests.evaluate.conftest import talker as talker
from tests.evaluate.conftest import talker_folder as talker_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
LENGTHS = (70, 9, 33, 128, 128, 1, 64, 17)
NEW = 40


def _model(precision: str, *, layers: int = 4, width: int = 256) -> nn.Module:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
    )
    torch.manual_seed(0)
    name = for_answers(choose_attention("cuda", torch.cuda.get_device_capability(), precision, config))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(4)
    return model.to("cuda").eval()


def _prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(8, 1024, (length,), generator=chance).tolist() for length in lengths]


def _greedy(
    model: nn.Module, prompts: Sequence[Sequence[int]], new: int = NEW, stops: Sequence[int] = ()
) -> list[list[int]]:
    return decode(model, prompts, max_new_tokens=new, stops=stops, pad=0, device="cuda", choose=likeliest)


def test_a_batch_on_the_card_gives_what_transformers_gives_each_row_alone() -> None:
    """In fp32, where rounding decides nothing; with stop tokens, so that rows leave between two looks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, stops = _model("fp32"), tuple(range(2, 60))
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=list(stops), pad_token_id=0)
    alone = []
    for prompt in _prompts():
        input_ids = torch.tensor([prompt], device="cuda")
        output = model.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
        )  # type: ignore[operator]
        alone.append(output[0, len(prompt) :].tolist())
    assert len({len(tokens) for tokens in alone}) > 3
    assert _greedy(model, _prompts(), stops=stops) == alone


def test_in_bf16_first_tokens_of_a_batch_are_those_of_rows_alone() -> None:
    """Kernels round differently for other shapes, so later tokens may part where two are equally likely."""
    model = _model("bf16")
    together = [tokens[0] for tokens in _greedy(model, _prompts(), new=1)]
    alone = [_greedy(model, [prompt], new=1)[0][0] for prompt in _prompts()]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= len(alone) - 1


def test_a_long_prompt_needs_no_memory_that_grows_with_its_square() -> None:
    model, peaks = _model("bf16"), []
    for length in (16384, 32768):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _greedy(model, _prompts((length,)), new=4)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.3 * peaks[0]


def test_memory_that_runs_out_halves_the_batch_and_gives_every_row() -> None:
    model, prompts = _model("bf16"), _prompts((2000, 1900, 1800, 1700, 1600, 1500, 1400, 1300))
    whole = _greedy(model, prompts, new=4)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _greedy(model, prompts[:2], new=4)
    two = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    warned: list[str] = []
    torch.cuda.set_per_process_memory_fraction(1.2 * two / total)
    try:
        lengths = [len(prompt) + 4 for prompt in prompts]
        batch_limit = EvalBatchLimit(rows=8, tokens=1 << 30)
        found = dict(
            in_batches(
                lengths,
                batch_limit,
                lambda chosen: _greedy(model, [prompts[at] for at in chosen], new=4),
                warn=warned.append,
            )
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sorted(found) == list(range(8))
    assert warned
    assert "out of memory with 8 rows" in warned[0]
    assert sum(found[at][0] == whole[at][0] for at in range(8)) >= 7


def test_likelihoods_on_the_card_are_those_of_the_cpu(talker: nn.Module, talker_folder: Path) -> None:
    examples = [
        example
        for row in ROWS[:6]
        for text in ("no", row.answer)
        for example in examples_of(RENDERER, row, text, prompt=row.prompt, window=64)
    ]
    batch_limit = EvalBatchLimit(rows=4, tokens=4096)
    here = dict(logprobs(talker, examples, pad=RENDERER.pad, batch_limit=batch_limit, device="cpu", warn=never))
    model = load_base(talker_folder, device="cuda", dtype=torch.float32).eval()
    there = dict(logprobs(model, examples, pad=RENDERER.pad, batch_limit=batch_limit, device="cuda", warn=never))
    assert [there[at] for at in range(len(examples))] == pytest.approx(
        [here[at] for at in range(len(examples))], abs=1e-2
    )


def _on_cards(asked: EvalJob, batch_limit: EvalBatchLimit) -> EvalJob:
    write_record(
        asked.path,
        replace(asked.request, batch_limit=batch_limit, subject=replace(asked.request.subject, device="cuda")),
    )
    return read_job(asked.path)


def test_an_evaluation_on_the_card_says_what_it_reserved(tmp_path: Path, talker_folder: Path) -> None:
    result = evaluate(_on_cards(make_work(tmp_path, talker_folder), EvalBatchLimit(rows=4, tokens=4096)))
    assert result.n == 14
    assert result.peak_bytes is not None
    assert 2**20 < result.peak_bytes < 2**30


@several
def test_items_shared_over_two_cards_give_the_record_of_one(tmp_path: Path, talker_folder: Path) -> None:
    one = evaluate(_on_cards(make_work(tmp_path / "one", talker_folder), EvalBatchLimit(rows=4, tokens=4096)))
    asked = _on_cards(make_work(tmp_path / "two", talker_folder), EvalBatchLimit(rows=4, tokens=4096, devices=2))
    two = evaluate(asked)
    assert [(item.item, item.answer) for item in two.items] == [(item.item, item.answer) for item in one.items]
    assert all(len(list(read_lines(asked.paths.items_of(part)))) == 7 for part in (0, 1))


@several
def test_a_model_spread_over_two_cards_answers_and_weighs_as_on_one(talker_folder: Path) -> None:
    one, two = (
        load_for_answers(
            talker_folder, None, device="cuda", dtype=torch.float32, attention=for_answers("sdpa"), num_cards=cards
        )
        for cards in (1, 2)
    )
    assert {parameter.device.index for parameter in two.parameters()} == {0, 1}
    prompts = [RENDERER.prompt_tokens(row.prompt) for row in ROWS[:5]]
    assert _greedy(two, prompts, stops=RENDERER.stop_tokens) == _greedy(one, prompts, stops=RENDERER.stop_tokens)
    examples = [
        example for row in ROWS[:3] for example in examples_of(RENDERER, row, row.answer, prompt=row.prompt, window=64)
    ]
    found = [
        dict(
            logprobs(
                m, examples, pad=RENDERER.pad, batch_limit=EvalBatchLimit(rows=2, tokens=999), device="cuda", warn=never
            )
        )
        for m in (one, two)
    ]
    assert list(found[0].values()) == pytest.approx(list(found[1].values()), abs=1e-3)


# Answers drawn on a card: those of a CPU for the same chances, and the same alone as among others.

NEW_SAMPLING = 20
STOPS = range(0, 1024, 40)
"""So that rows end early and not together, between two looks at the card."""


def _answers(model: nn.Module, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[int]]:
    said = [uniform_draws(3, f"row {number}", 0, steps=NEW_SAMPLING) for number in numbers]
    choose = sample_by(said, temperature=1.0, device="cuda")
    return decode(
        model,
        [prompts[at] for at in numbers],
        max_new_tokens=NEW_SAMPLING,
        stops=STOPS,
        pad=0,
        device="cuda",
        choose=choose,
    )


def test_an_answer_on_a_card_is_the_same_alone_and_among_others() -> None:
    model, prompts = _model("fp32"), _prompts()
    together = _answers(model, prompts, range(len(prompts)))
    assert [_answers(model, prompts, [at])[0] for at in range(len(prompts))] == together
    assert len({len(tokens) for tokens in together}) > 1


def test_a_card_draws_what_a_cpu_draws() -> None:
    logits_BV = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)) * 3
    said = [uniform_draws(1, f"{row}", 0, steps=1) for row in range(512)]
    drawn = [
        sample_by(said, temperature=0.7, device=device)(
            torch.arange(512, device=device), 0, logits_BV.to(device)
        ).tolist()
        for device in ("cpu", "cuda")
    ]
    assert (
        sum(one != other for one, other in zip(*drawn, strict=True)) <= 1
    )  # a chance that falls on an edge, rounded otherwise
