"""Likelihoods of given answers: those computed by hand from logits, over exactly the tokens that training supervises,
whatever stands beside them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.data.encode import Budget
from finefit.data.examples import Example
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.evaluate.generate import examples_of, logprobs, num_counted
from finefit.model.load import make_trainable
from tests.conftest import make_model
from tests.evaluate.conftest import RENDERER, ROWS, never
from tests.step.conftest import LORA

WIDE = EvalBatchLimit(rows=64, tokens=1 << 20)
TEXTS = ('{"sum": 3}', "no", "a much longer answer than the others", ROWS[0].answer)


def _by_hand(model: nn.Module, example: Example) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([example.tokens])).logits[0].double().log_softmax(-1)
    return sum(float(logits[at - 1, token]) for at, token in enumerate(example.tokens) if at and example.supervised[at])


def _example(row: Row, text: str) -> Example:
    (example,) = examples_of(RENDERER, row, text, prompt=row.prompt, window=64)
    return example


EXAMPLES = [_example(row, text) for row in ROWS[:5] for text in TEXTS]


@pytest.mark.parametrize(
    "batch_limit",
    [
        EvalBatchLimit(rows=1, tokens=1 << 20),
        EvalBatchLimit(rows=3, tokens=1 << 20),
        EvalBatchLimit(rows=64, tokens=200),
        WIDE,
    ],
)
def test_likelihoods_are_those_computed_by_hand_in_whatever_batches(
    batch_limit: EvalBatchLimit, talker: nn.Module
) -> None:
    found = dict(logprobs(talker, EXAMPLES, pad=RENDERER.pad, batch_limit=batch_limit, device="cpu", warn=never))
    assert sorted(found) == list(range(len(EXAMPLES)))
    for at, example in enumerate(EXAMPLES):
        assert found[at] == pytest.approx(_by_hand(talker, example), abs=1e-5 * num_counted(example))
    assert min(found.values()) < -100 < -10 < max(found.values())


def test_an_adapted_model_is_asked_with_its_adapter() -> None:
    model = make_trainable(make_model(), LORA, name="tiny").eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    found = dict(logprobs(model, EXAMPLES[:3], pad=RENDERER.pad, batch_limit=WIDE, device="cpu", warn=never))
    assert [found[at] for at in range(3)] == pytest.approx(
        [_by_hand(model, example) for example in EXAMPLES[:3]], abs=1e-3
    )
    assert found[0] != pytest.approx(_by_hand(make_model(), EXAMPLES[0]), abs=1e-2)


def test_the_tokens_that_count_are_those_that_training_supervises() -> None:
    row = ROWS[3]
    (trained,) = RENDERER.render([row], Budget(max_tokens=4096, too_long="error", turns="all"))
    assert _example(row, row.answer) == trained.examples[0]
    assert num_counted(_example(row, row.answer)) == len(row.answer) + 1  # a token for each byte, and the end
    assert _example(row, "no").tokens[: len(RENDERER.prompt_tokens(row.prompt))] == tuple(
        RENDERER.prompt_tokens(row.prompt)
    )


def test_a_first_token_has_nothing_before_it_and_never_counts(talker: nn.Module) -> None:
    examples = [Example((40, 50, 60), (True, True, True)), Example((41, 51), (True, True))]
    assert [num_counted(example) for example in examples] == [2, 1]
    found = dict(logprobs(talker, examples, pad=RENDERER.pad, batch_limit=WIDE, device="cpu", warn=never))
    assert [found[0], found[1]] == pytest.approx([_by_hand(talker, example) for example in examples], abs=1e-4)


def test_only_the_last_of_several_answers_counts() -> None:
    row = replace(
        ROWS[0],
        messages=(
            Message("user", "a"),
            Message("assistant", "first"),
            Message("user", "b"),
            Message("assistant", "last"),
        ),
    )
    example = _example(row, "other")
    assert num_counted(example) == len("other") + 1
    assert sum(example.supervised) == len("other") + 1


def test_a_prompt_that_was_cut_stays_cut_before_a_candidate() -> None:
    row = ROWS[0]
    shorter = RENDERER.cut_prompt(row.prompt, max_tokens=20)
    (example,) = examples_of(RENDERER, row, "no", prompt=shorter, window=64)
    assert len(example.tokens) == 20 + len("no") + 1


def test_plain_text_counts_whole_in_windows_of_which_the_first_token_is_given(talker: nn.Module) -> None:
    row = Row(source="t.txt", number=1, text="one and two and three and four")
    windows = examples_of(RENDERER, row, "", prompt=(), window=8)
    assert [len(window.tokens) for window in windows] == [8, 8, 8, 7]
    assert sum(map(num_counted, windows)) == len(row.text) + 1 - 4
    found = dict(logprobs(talker, windows, pad=RENDERER.pad, batch_limit=WIDE, device="cpu", warn=never))
    assert sum(found.values()) == pytest.approx(sum(_by_hand(talker, window) for window in windows), abs=1e-3)


def test_an_answer_that_cannot_be_written_is_told_with_its_row() -> None:
    with pytest.raises(
        DataError, match=r"^test.jsonl:1 has an answer whose likelihood cannot be computed: .*surrogate"
    ):
        _example(ROWS[0], "\ud800")
