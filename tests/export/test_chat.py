"""A conversation with a model: it is prompted as it was trained, and streamed text is the decoded whole."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message
from finefit.errors import DataError, ModelError
from finefit.evaluate import batches
from finefit.export.chat import ChatHistory, ModelSpeaker, Piece, Sampling, open_speaker, require_base
from finefit.export.subject import open_subject
from tests.conftest import make_model, make_model_folder, make_tokenizer
from tests.families import make_family

GREEDY = Sampling(max_new_tokens=24)
LIMIT = EvalBatchLimit(rows=1, tokens=1 << 20)


def _renderer(folder: Path, template: str = "chat") -> Renderer:
    make_tokenizer().save_pretrained(folder)
    return open_renderer(folder, "plain" if template == "plain" else "chat")


def _speaker(folder: Path, model: torch.nn.Module | None = None, *, template: str = "chat") -> ModelSpeaker:
    found = (model or make_model()).eval()
    return ModelSpeaker(found, _renderer(folder, template), device="cpu", max_prompt_tokens=None)


def _said(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _as_evaluated(speaker: ModelSpeaker, messages: Sequence[Message], max_new_tokens: int) -> batches.Answer:
    prompt, how = speaker.renderer.prompt_tokens(messages), {"batch_limit": LIMIT, "device": "cpu", "warn": print}
    found = batches.answers(speaker.model, speaker.renderer, [prompt], max_new_tokens=max_new_tokens, **how)  # type: ignore[arg-type]
    return next(answer for _, answer in found)


QUESTIONS = ("add 3 and 4", "Grüße aus Köln", "日本語で", "a\nb", "😀")


def test_the_pieces_of_an_answer_are_the_answer_that_an_evaluation_gets(tmp_path: Path) -> None:
    speaker, ends = _speaker(tmp_path), set()
    for question in QUESTIONS:
        pieces = list(speaker.stream([Message("user", question)], GREEDY))
        whole = _as_evaluated(speaker, [Message("user", question)], 24)
        assert _said(pieces) == whole.text
        assert (pieces[-1].new_tokens, pieces[-1].is_cut) == (whole.new_tokens, whole.is_cut)
        ends.add(len(pieces))
    assert max(ends) > 2


def test_a_model_that_cannot_be_cropped_streams_the_same_answer(tmp_path: Path) -> None:
    speaker = _speaker(tmp_path, make_family("mamba"))
    for question in QUESTIONS[:2]:
        pieces = list(speaker.stream([Message("user", question)], GREEDY))
        assert _said(pieces) == _as_evaluated(speaker, [Message("user", question)], 24).text
        assert pieces[-1].reused_tokens == 0
    stopped = speaker.stream([Message("user", QUESTIONS[0])], GREEDY)
    next(stopped)
    stopped.close()
    assert _said(list(speaker.stream([Message("user", QUESTIONS[0])], GREEDY)))


@pytest.mark.parametrize("text", ["naïve 日本 👍🏽 end", "👩‍👩‍👧", "\u05e9\u05dc\u05d5\u05dd", "a\ufffdb\ufffd"])
def test_text_that_is_shown_is_never_taken_back_nor_half_a_character(tmp_path: Path, text: str) -> None:
    renderer = _renderer(tmp_path)
    tokens = [*renderer.tokenizer(text, add_special_tokens=False)["input_ids"], renderer.stop_tokens[0]]
    shown = [renderer.decode_so_far(tokens[:end]) for end in range(len(tokens))]
    whole = renderer.decode_answer(tokens)
    assert whole == text
    assert len(tokens) > len(text)  # one token per byte
    assert all(whole.startswith(part) for part in shown)
    assert all(after.startswith(before) for before, after in pairwise(shown))
    assert all("\ufffd" not in part or "\ufffd" in text for part in shown)


THINKING = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{{ '<think>' }}"
    "{% if m.get('reasoning_content') %}{{ m['reasoning_content'] }}{% endif %}{{ '</think>' }}{% endif %}"
    "{{ m['content'] + '\n<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_reasoning_and_the_line_before_the_end_are_not_shown_as_the_answer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(tmp_path)
    renderer = open_renderer(tmp_path, "chat")
    written = "<think>three and four</think>seven\nor 7\n"
    tokens = [*tokenizer(written, add_special_tokens=False)["input_ids"], renderer.stop_tokens[0]]
    shown = [renderer.decode_so_far(tokens[:end]) for end in range(len(tokens))]
    assert renderer.decode_answer(tokens) == "seven\nor 7"
    assert all("seven\nor 7".startswith(part) for part in shown)
    assert shown[-1] == "seven\nor 7"


def test_a_turn_reads_only_what_is_new_and_answers_as_one_that_reads_everything(tmp_path: Path) -> None:
    speaker, talk = _speaker(tmp_path), ChatHistory("Be brief.")
    for number, question in enumerate(("add 3 and 4", "and 5", "and 6")):
        prompt = talk.prompt(question)
        pieces = list(speaker.stream(prompt, GREEDY))
        fresh = list(
            ModelSpeaker(speaker.model, speaker.renderer, device="cpu", max_prompt_tokens=None).stream(prompt, GREEDY)
        )
        assert _said(pieces) == _said(fresh)
        assert (pieces[-1].reused_tokens or 0) >= 20 * number
        assert fresh[-1].reused_tokens == 0
        talk.turns.append((question, _said(pieces)))
    other = list(speaker.stream([Message("user", "add 3 and 4")], GREEDY))  # the cache is cropped to what is common
    assert _said(other) == _as_evaluated(speaker, [Message("user", "add 3 and 4")], 24).text


def test_a_stopped_answer_leaves_a_cache_that_is_right(tmp_path: Path) -> None:
    speaker = _speaker(tmp_path)
    answering = speaker.stream([Message("user", "add 3 and 4")], Sampling(max_new_tokens=200))
    next(answering)
    answering.close()
    pieces = list(speaker.stream([Message("user", "add 3 and 5")], GREEDY))
    assert (pieces[-1].reused_tokens or 0) > 5
    assert _said(pieces) == _as_evaluated(speaker, [Message("user", "add 3 and 5")], 24).text


def test_a_model_without_a_chat_template_is_prompted_with_the_text_alone(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", chat=False)
    speaker = open_speaker(open_subject(str(tmp_path / "model")), device="cpu")
    talk = ChatHistory()
    assert not speaker.remembers
    talk.turns.append(("before", "answer"))
    prompt = talk.prompt("once upon", remembers=speaker.remembers)
    assert speaker.renderer.prompt_text(prompt) == "once upon"
    assert _said(list(speaker.stream(prompt, GREEDY))) == _as_evaluated(speaker, prompt, 24).text


def test_a_seed_samples_the_same_answer_and_another_seed_another(tmp_path: Path) -> None:
    speaker, prompt = _speaker(tmp_path), [Message("user", "add 3 and 4")]
    first, again, other = (
        _said(list(speaker.stream(prompt, Sampling(max_new_tokens=24, temperature=1.0, seed=seed))))
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_conversation_longer_than_the_model_is_refused_and_an_answer_stops_at_its_end(tmp_path: Path) -> None:
    speaker = _speaker(tmp_path)
    with pytest.raises(DataError, match="512 positions"):
        list(speaker.stream([Message("user", "x" * 600)], GREEDY))
    long = [Message("user", "x" * 480)]
    room = 512 - len(speaker.renderer.prompt_tokens(long))
    assert 0 < room < 30
    pieces = list(speaker.stream(long, Sampling(max_new_tokens=100)))
    assert (pieces[-1].new_tokens or 0) <= room


def test_a_prompt_that_training_would_cut_is_cut_and_counted(tmp_path: Path) -> None:
    speaker = ModelSpeaker(make_model().eval(), _renderer(tmp_path), device="cpu", max_prompt_tokens=40)
    pieces = list(speaker.stream([Message("user", "x" * 100)], GREEDY))
    assert pieces[-1].cut_tokens == len(speaker.renderer.prompt_tokens([Message("user", "x" * 100)])) - 40


def test_a_whole_model_has_no_base(tmp_path: Path) -> None:
    speaker = _speaker(tmp_path)
    assert not speaker.has_base
    with pytest.raises(ModelError):
        require_base(speaker)
