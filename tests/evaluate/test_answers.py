import pytest
import torch
from torch import nn

from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.evaluate.answers import answers
from finefit.step.state import make_optimizer
from tests.conftest import make_model, make_rows, make_tokenizer
from tests.data.conftest import render_one
from tests.step.conftest import ADAMW, FULL, cut, step, tuned

torch.set_num_threads(1)

RENDERER = Renderer(make_tokenizer(), "chat")
MESSAGES = [[Message(m["role"], m["content"]) for m in row["messages"]] for row in make_rows(14)]
PROMPTS = [RENDERER.prompt_tokens(messages[:-1]) for messages in MESSAGES]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Knows how answers look and end, so that they differ in length."""
    trained = tuned(FULL)
    optimizer, batches = make_optimizer(trained, ADAMW), cut([render_one(RENDERER, messages).examples[0] for messages in MESSAGES], 7)
    for _ in range(60):
        step(trained, optimizer, batches)
    return trained.eval()


def _answers(model: nn.Module, *, batch: int, max_new_tokens: int = 40) -> dict[int, str]:
    return dict(answers(model, RENDERER, PROMPTS, max_new_tokens=max_new_tokens, batch=batch, device="cpu"))


def test_batched_answers_are_those_given_one_by_one(model: nn.Module) -> None:
    single = _answers(model, batch=1)
    assert len(set(single.values())) > 3
    assert len({len(answer) for answer in single.values()}) > 2
    for batch in (3, 8, 14):
        assert _answers(model, batch=batch) == single


def test_an_answer_is_the_most_likely_token_after_every_token(model: nn.Module) -> None:
    found = _answers(model, batch=5, max_new_tokens=6)
    for at, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == RENDERER.tokenizer.eos_token_id:
                break
        assert found[at] == RENDERER.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)


def test_the_longest_prompts_are_answered_first_and_each_one_once() -> None:
    order = [at for at, _ in answers(make_model().eval(), RENDERER, PROMPTS, max_new_tokens=1, batch=4, device="cpu")]
    assert sorted(order) == list(range(len(PROMPTS)))
    lengths = [len(PROMPTS[at]) for at in order]
    assert lengths == sorted(lengths, reverse=True)


def test_an_answer_has_no_more_than_max_new_tokens(model: nn.Module) -> None:
    assert {len(RENDERER.tokenizer(answer)["input_ids"]) for answer in _answers(model, batch=4, max_new_tokens=3).values()} == {3}


def test_no_prompts_have_no_answers() -> None:
    assert list(answers(make_model(), RENDERER, [], max_new_tokens=4, batch=2, device="cpu")) == []
