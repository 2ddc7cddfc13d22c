from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message
from finefit.errors import DataError, ModelError
from tests.conftest import TEMPLATE, make_tokenizer
from tests.data.conftest import supervised_texts

CHAT = Renderer(make_tokenizer(), "chat")
PLAIN = Renderer(make_tokenizer(chat=False), "plain")
TEXT = st.one_of(st.text(), st.sampled_from(["<|end|>", "x<|end|>\n", "<|assistant|>", " a ", "\n", "{{ messages }}", "{% raw %}"]))
ANSWER = TEXT.filter(lambda text: text.strip())


def _conversation(*texts: str, system: str | None = None) -> list[Message]:
    turns = [Message("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(texts)]
    return turns if system is None else [Message("system", system), *turns]


@given(prompt=TEXT, answer=ANSWER, system=st.none() | TEXT)
def test_supervised_tokens_are_exactly_the_answer_and_its_end(prompt: str, answer: str, system: str | None) -> None:
    messages = _conversation(prompt, answer, system=system)
    example = CHAT.example(messages)
    assert "".join(supervised_texts(CHAT, example)) == answer + "<|end|>"
    assert example.tokens[: example.supervised.index(True)] == tuple(CHAT.prompt_tokens(messages[:-1]))
    assert CHAT.tokenizer.decode(example.tokens) == CHAT.prompt_text(messages[:-1]) + answer + "<|end|>"


@given(turns=st.lists(st.tuples(TEXT, ANSWER), min_size=2, max_size=4))
def test_every_turn_of_a_conversation_is_supervised_behind_the_prompt_of_generation(turns: list[tuple[str, str]]) -> None:
    messages = _conversation(*(text for turn in turns for text in turn))
    example = CHAT.example(messages)
    assert supervised_texts(CHAT, example) == [answer + "<|end|>" for _, answer in turns]
    starts = [at for at in range(1, len(example.tokens)) if example.supervised[at] and not example.supervised[at - 1]]
    assert [example.tokens[:start] for start in starts] == [tuple(CHAT.prompt_tokens(messages[:at])) for at in range(1, len(messages), 2)]


@given(prompt=TEXT.filter(bool), answer=ANSWER)
def test_plain_rows_are_prompt_completion_and_one_end_as_they_stand(prompt: str, answer: str) -> None:
    messages = _conversation(prompt, answer)
    example = PLAIN.example(messages)
    completion = answer.removesuffix("<|end|>") + "<|end|>"
    assert "".join(supervised_texts(PLAIN, example)) == completion
    assert example.tokens[: example.supervised.index(True)] == tuple(PLAIN.prompt_tokens(messages[:-1]))
    assert PLAIN.tokenizer.decode(example.tokens) == prompt + completion


@pytest.mark.parametrize("renderer", [CHAT, PLAIN], ids=["chat", "plain"])
def test_the_last_token_is_the_supervised_end_of_the_answer(renderer: Renderer) -> None:
    example = renderer.example(_conversation("2+2", "4"))
    assert example.tokens[-1] == renderer.tokenizer.eos_token_id
    assert example.supervised[-1]


def test_answers_in_the_given_messages_are_prompt() -> None:
    messages = _conversation("a", "b", "c", "d")
    example = CHAT.example(messages, num_given=3)
    assert supervised_texts(CHAT, example) == ["d<|end|>"]
    assert example.tokens == CHAT.example(messages).tokens


def test_plain_text_starts_with_the_token_that_the_tokenizer_adds() -> None:
    tokenizer = make_tokenizer(chat=False)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    renderer = Renderer(tokenizer, "plain")
    assert renderer.prompt_tokens([Message("user", "2+2")]) == tokenizer("2+2")["input_ids"]
    example = renderer.example(_conversation("2+2", "4"))
    assert (example.tokens.count(bos), example.tokens[0], example.supervised[0]) == (1, bos, False)
    assert renderer.sha256() != Renderer(make_tokenizer(chat=False), "plain").sha256()


def test_plain_takes_one_prompt_and_one_completion() -> None:
    with pytest.raises(DataError, match="one prompt and one completion, this row has 4 messages"):
        PLAIN.example(_conversation("a", "b", "c", "d"))


def test_an_empty_plain_prompt_can_be_trained_on_but_not_answered() -> None:
    assert PLAIN.example(_conversation("", "ab")).supervised == (False, True, True)  # nothing could predict the first token
    with pytest.raises(DataError, match="the prompt is empty"):
        PLAIN.prompt_tokens([Message("user", "")])


def _templated(template: str, **special: str) -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    return Renderer(tokenizer, "chat")


def test_a_template_without_the_end_token_is_refused_even_if_the_answer_holds_one() -> None:
    renderer = _templated(TEMPLATE.replace("<|end|>", "<|stop|>"))
    for answer in ("4", "4<|end|>"):
        with pytest.raises(DataError, match=r"ends an answer without '<\|end\|>', so the model would never learn to stop\nuse a tokenizer"):
            renderer.example(_conversation("2+2", answer))


def test_a_template_that_loses_the_answer_is_refused() -> None:
    renderer = _templated(TEMPLATE.replace("m['content']", "''"))
    with pytest.raises(DataError, match="does not put the answer as it stands behind the prompt"):
        renderer.example(_conversation("2+2", "4"))


def test_a_template_that_writes_a_thought_before_the_answer_is_refused() -> None:
    renderer = _templated(TEMPLATE.replace("m['content']", "('<think></think>' if m['role'] == 'assistant' else '') + m['content']"))
    with pytest.raises(DataError, match="comes '<think></think>4<"):
        renderer.example(_conversation("2+2", "4"))


def test_a_template_that_rewrites_earlier_turns_is_refused_until_they_are_given() -> None:
    renderer = _templated(TEMPLATE.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '(left out)')"))
    messages = _conversation("a", "b", "c", "d")
    with pytest.raises(DataError, match="before message 4 differently when more follows\ngive the conversation as one row of `prompt`"):
        renderer.example(messages)
    assert supervised_texts(renderer, renderer.example(messages, num_given=3)) == ["d<|end|>"]


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    renderer = _templated("{{ raise_exception('System role not supported') }}")
    with pytest.raises(DataError, match="the chat template refuses this conversation: System role not supported"):
        renderer.example(_conversation("2+2", "4"))


def test_the_date_that_a_template_writes_does_not_change_from_day_to_day() -> None:
    assert _templated("{{ strftime_now('%d %b %Y') }}").prompt_text([Message("user", "x")]) == "26 Jul 2024"


def test_padding_is_the_end_token_where_the_tokenizer_names_none() -> None:
    tokenizer = make_tokenizer()
    assert Renderer(tokenizer, "chat").pad == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert Renderer(tokenizer, "chat").pad == tokenizer.eos_token_id


def _saved(folder: Path, **changes: Any) -> Path:
    tokenizer = make_tokenizer(chat=changes.pop("chat", True))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_without_a_chat_template_is_refused_with_both_choices(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_renderer(_saved(tmp_path, chat=False), "chat")
    assert "has no chat template" in caught.value.problem
    assert "data.template: plain" in caught.value.remedy
    assert "instruct model" in caught.value.remedy
    assert open_renderer(tmp_path, "plain").example(_conversation("2+2", "4")).tokens


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no eos_token"):
        open_renderer(_saved(tmp_path, eos_token=None), "plain")


def test_the_hash_survives_saving_and_changes_with_whatever_changes_a_prompt(tmp_path: Path) -> None:
    own = CHAT.sha256()
    assert open_renderer(_saved(tmp_path / "same"), "chat").sha256() == own
    others = [
        open_renderer(_saved(tmp_path / "template", chat_template=TEMPLATE + " "), "chat"),
        open_renderer(_saved(tmp_path / "eos", eos_token="<|user|>"), "chat"),
        open_renderer(_saved(tmp_path / "bos", bos_token="<|system|>"), "chat"),
        open_renderer(_saved(tmp_path / "kind"), "plain"),
    ]
    assert len({own, *(renderer.sha256() for renderer in others)}) == 5
