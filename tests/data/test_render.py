import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from finefit.data.encode import Budget, TextEncoder, without_middle
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Image, Message, Row, ToolCall
from finefit.errors import DataError, ModelError
from tests.conftest import SPECIAL, TEMPLATE, make_tokenizer
from tests.data.conftest import prompts_before_answers, render_one, supervised_runs, supervised_texts

CHAT = Renderer(make_tokenizer(), "chat")
ENCODER = TextEncoder(CHAT.tokenizer)
PLAIN = Renderer(make_tokenizer(chat=False), "plain")
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([" a ", "\n", "{{ messages }}", "{% raw %}", "<think>", "é", "☃\U0001f600"]),
).filter(lambda text: not any(token in text for token in SPECIAL))
ANSWER = TEXT.filter(lambda text: text.strip())


def _conversation(*texts: str, system: str | None = None) -> list[Message]:
    turns = [Message("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(texts)]
    return turns if system is None else [Message("system", system), *turns]


def _templated(template: str, **special: str) -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = template
    return Renderer(tokenizer, "chat")


@given(prompt=TEXT, answer=ANSWER, system=st.none() | TEXT)
def test_supervised_tokens_are_exactly_the_answer_and_its_end(prompt: str, answer: str, system: str | None) -> None:
    messages = _conversation(prompt, answer, system=system)
    (example,) = render_one(CHAT, messages).examples
    assert supervised_texts(CHAT, example) == [answer + "<|end|>"]
    assert prompts_before_answers(example) == [CHAT.prompt_tokens(messages[:-1])]
    assert CHAT.tokenizer.decode(example.tokens) == CHAT.prompt_text(messages[:-1]) + answer + "<|end|>"
    assert CHAT.decode_answer(supervised_runs(example)[0]) == answer


@given(turns=st.lists(st.tuples(TEXT, ANSWER), min_size=2, max_size=4))
def test_every_turn_of_a_conversation_is_supervised_behind_the_prompt_of_generation(
    turns: list[tuple[str, str]],
) -> None:
    messages = _conversation(*chain.from_iterable(turns))
    (example,) = render_one(CHAT, messages).examples
    assert supervised_texts(CHAT, example) == [answer + "<|end|>" for _, answer in turns]
    assert prompts_before_answers(example) == [CHAT.prompt_tokens(messages[:at]) for at in range(1, len(messages), 2)]


@given(prompt=TEXT.filter(bool), answer=ANSWER)
def test_plain_rows_are_prompt_completion_and_one_end_as_they_stand(prompt: str, answer: str) -> None:
    messages = _conversation(prompt, answer)
    (example,) = render_one(PLAIN, messages).examples
    assert supervised_texts(PLAIN, example) == [answer + "<|end|>"]
    assert render_one(PLAIN, _conversation(prompt, answer + "<|end|>")).examples == (example,)
    assert prompts_before_answers(example) == [PLAIN.prompt_tokens(messages[:-1])]
    assert PLAIN.decode_answer(supervised_runs(example)[0]) == answer


def test_a_plain_prompt_is_instruction_and_question_with_a_blank_line_between() -> None:
    assert PLAIN.prompt_text(_conversation("2+2?", system="Be brief.")) == "Be brief.\n\n2+2?"
    assert len(render_one(PLAIN, _conversation("2+2?", "4", system="Be brief.")).examples) == 1


@pytest.mark.parametrize(
    ("messages", "more", "problem"),
    [
        (_conversation("a", "b", "c", "d"), {}, "takes one prompt and one completion, this row has 4 messages"),
        (_conversation("a", "b"), {"tools": "[]"}, "does not support tools"),
        (_conversation("a", "b"), {"images": (Image(path="a.png"),)}, "the row has an image"),
        ([Message("user", "a"), Message("assistant", "b", reasoning="c")], {}, "does not support reasoning"),
        (
            [Message("user", "a"), Message("assistant", "", tool_calls=(ToolCall("f", "{}"),))],
            {},
            "does not support reasoning or tool calls",
        ),
        ([Message("user", "a")], {}, "no answer"),
    ],
)
def test_what_the_plain_template_cannot_hold_is_refused_in_plain_words(
    messages: list[Message], more: dict[str, Any], problem: str
) -> None:
    rendered = render_one(PLAIN, messages, **more)
    assert problem in rendered.problem
    assert rendered.remedy
    assert rendered.examples == ()


def test_an_empty_plain_prompt_can_be_trained_on_but_not_answered() -> None:
    (example,) = render_one(PLAIN, _conversation("", "ab")).examples
    assert example.supervised == (False, True, True)  # nothing could predict the first token
    with pytest.raises(DataError, match="the prompt is empty"):
        PLAIN.prompt_tokens([Message("user", "")])


def test_answers_in_the_given_messages_are_prompt() -> None:
    messages = _conversation("a", "b", "c", "d")
    (whole,), (last,) = render_one(CHAT, messages).examples, render_one(CHAT, messages, num_given=3).examples
    assert supervised_texts(CHAT, last) == ["d<|end|>"]
    assert last.tokens == whole.tokens
    assert render_one(CHAT, messages, Budget(max_tokens=99, too_long="error", turns="last")).examples == (last,)
    assert "no answer after its prompt" in render_one(CHAT, messages, num_given=4).problem


def _with_start(*, chat: bool) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(chat=chat)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_plain_prompts_start_with_the_token_that_the_tokenizer_adds() -> None:
    tokenizer = _with_start(chat=False)
    renderer = Renderer(tokenizer, "plain")
    assert renderer.prompt_tokens([Message("user", "2+2")]) == tokenizer("2+2")["input_ids"]
    (example,) = render_one(renderer, _conversation("2+2", "4")).examples
    assert (example.tokens.count(tokenizer.bos_token_id), example.tokens[0], example.supervised[0]) == (
        1,
        tokenizer.bos_token_id,
        False,
    )
    assert renderer.sha256() != PLAIN.sha256()


@given(text=TEXT.filter(bool), max_tokens=st.integers(2, 12))
def test_windows_of_plain_text_are_its_tokens_with_start_and_end(text: str, max_tokens: int) -> None:
    for renderer in (CHAT, Renderer(_with_start(chat=True), "chat")):
        rendered = render_one(renderer, text=text, budget=Budget(max_tokens=max_tokens, too_long="drop", turns="all"))
        tokens = list(chain.from_iterable(example.tokens for example in rendered.examples))
        assert tokens == [*renderer.tokenizer(text)["input_ids"], renderer.tokenizer.eos_token_id]
        assert all(len(example.tokens) <= max_tokens for example in rendered.examples)
        assert all(example.supervised == (False, *[True] * (len(example.tokens) - 1)) for example in rendered.examples)
        assert max_tokens == 2 or all(len(example.tokens) > 1 for example in rendered.examples)


def test_both_sides_of_a_pair_stand_behind_the_same_prompt_and_are_cut_alike() -> None:
    messages, rejected = _conversation("x" * 50, "good"), (Message("assistant", "a bad one"),)
    pair = render_one(CHAT, messages, num_given=1, rejected=rejected)
    (chosen,), (other,) = pair.examples, pair.rejected
    assert prompts_before_answers(chosen) == prompts_before_answers(other) == [CHAT.prompt_tokens(messages[:1])]
    assert (supervised_texts(CHAT, chosen), supervised_texts(CHAT, other)) == (["good<|end|>"], ["a bad one<|end|>"])
    assert pair.num_tokens == len(other.tokens)
    cut = render_one(
        CHAT, messages, Budget(max_tokens=40, too_long="cut_prompt", turns="all"), num_given=1, rejected=rejected
    )
    assert prompts_before_answers(cut.examples[0]) == prompts_before_answers(cut.rejected[0])
    assert len(cut.rejected[0].tokens) == 40
    assert (supervised_texts(CHAT, cut.examples[0]), supervised_texts(CHAT, cut.rejected[0])) == (
        ["good<|end|>"],
        ["a bad one<|end|>"],
    )


REWRITING = TEMPLATE.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '(left out)')")


def test_answers_that_are_rewritten_once_more_follows_are_examples_of_their_own() -> None:
    renderer, messages = _templated(REWRITING), _conversation("a", "b", "c", "d")
    first, second = render_one(renderer, messages).examples
    assert [supervised_texts(renderer, example) for example in (first, second)] == [["b<|end|>"], ["d<|end|>"]]
    assert "(left out)" in renderer.tokenizer.decode(second.tokens)
    pair = render_one(renderer, messages, num_given=1, rejected=(Message("assistant", "x"),))
    assert (pair.examples, pair.remedy.startswith("set data.turns: last")) == ((), True)


@pytest.mark.parametrize("too_long", ["error", "drop"])
def test_a_row_that_is_too_long_is_told_with_its_length(too_long: Any) -> None:
    rendered = render_one(CHAT, _conversation("abc", "de"), Budget(max_tokens=8, too_long=too_long, turns="all"))
    assert (rendered.is_too_long, rendered.examples, rendered.problem) == (
        True,
        (),
        "too long: 10 tokens, max_tokens is 8",
    )
    assert render_one(CHAT, _conversation("abc", "de"), Budget(max_tokens=10, too_long=too_long, turns="all")).examples


@given(prompts=st.lists(TEXT.filter(bool), min_size=1, max_size=3), answer=ANSWER, spare=st.integers(0, 40))
def test_a_cut_row_fits_and_keeps_its_answers(prompts: list[str], answer: str, spare: int) -> None:
    messages = _conversation(*chain.from_iterable((prompt, answer) for prompt in prompts), system="S")
    num_scaffold = render_one(
        CHAT, [Message(m.role, m.content if m.role == "assistant" else "") for m in messages]
    ).num_tokens
    rendered = render_one(CHAT, messages, Budget(max_tokens=num_scaffold + spare, too_long="cut_prompt", turns="all"))
    whole = render_one(CHAT, messages)
    assert rendered.num_tokens == whole.num_tokens
    if rendered.is_too_long:
        assert "even after cutting the prompt" in rendered.problem
        assert spare <= 4 * len(messages)  # one character of each message stays
        return
    (example,) = rendered.examples
    assert len(example.tokens) <= num_scaffold + spare
    assert rendered.cut_tokens == whole.num_tokens - len(example.tokens)
    assert supervised_texts(CHAT, example) == [answer + "<|end|>"] * len(prompts)
    assert rendered.cut_tokens > 0 or rendered == whole


def test_tokens_go_from_the_middle_of_the_longest_question_and_the_instruction_is_spared() -> None:
    messages = [
        Message("system", "s" * 30),
        Message("user", "abcdefghij"),
        Message("assistant", "k"),
        Message("user", "lm"),
        Message("assistant", "n"),
    ]
    whole = render_one(CHAT, messages).num_tokens
    rendered = render_one(CHAT, messages, Budget(max_tokens=whole - 4, too_long="cut_prompt", turns="all"))
    assert (
        f"<|system|>{'s' * 30}<|end|>\n<|user|>abchij<|end|>\n<|assistant|>k<|end|>\n<|user|>lm"
        in CHAT.tokenizer.decode(rendered.examples[0].tokens)
    )
    assert rendered.cut_tokens == 4
    assert CHAT.cut_prompt(messages[:2], max_tokens=len(CHAT.prompt_tokens(messages[:2])) - 12)[0].content == "s" * 27
    assert (
        CHAT.tokenizer.decode(CHAT.prompt_tokens(messages[1:2], max_tokens=9)) == "<|user|>abcij<|end|>\n<|assistant|>"
    )
    with pytest.raises(DataError, match="one token of each message take more than 4 tokens"):
        CHAT.prompt_tokens(messages[:2], max_tokens=4)


@given(text=st.text(st.sampled_from("aé☃\U0001f600"), min_size=2), excess=st.integers(1, 30))
def test_what_is_left_of_a_text_is_its_start_and_its_end(text: str, excess: int) -> None:
    left = without_middle(text, ENCODER.spans(text), excess)
    assert 0 < len(left) < len(text)
    assert any(left == text[:at] + text[len(text) - len(left) + at :] for at in range(len(left) + 1))
    assert len(left.encode()) <= max(len(text.encode()) - excess, len(text[0].encode())) or len(left) == len(text) - 1


def test_a_bad_row_leaves_the_others_as_they_are() -> None:
    good = [Row(source="s", number=at, messages=tuple(_conversation(f"q{at}", f"a{at}"))) for at in range(3)]
    bad = [
        Row(source="s", number=9, messages=tuple(_conversation("half \ud83d", "x"))),
        Row(source="s", number=9, text="half \ud83d"),
        Row(source="s", number=9),
        Row(source="s", number=9, messages=good[0].messages, tools="{"),
        Row(source="s", number=9, messages=good[0].messages, tools='[{"name": "f"}]'),
        Row(source="s", number=9, messages=good[0].messages, images=(Image(path="a.png"),)),
        Row(source="s", number=9, messages=(Message("assistant", "", tool_calls=(ToolCall("f", "{}"),)),)),
        Row(source="s", number=9, messages=(Message("assistant", "x", reasoning="y"),)),
    ]
    rendered = CHAT.render(
        [good[0], *bad[:4], good[1], *bad[4:], good[2]], Budget(max_tokens=99, too_long="error", turns="all")
    )
    assert [rendered[at] for at in (0, 5, 10)] == [render_one(CHAT, row.messages) for row in good]
    refused = [rendered[at] for at in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert all(row.problem and row.remedy and not row.examples and not row.is_too_long for row in refused)
    assert ["surrogate" in row.problem for row in refused[:2]] == [True, True]


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
JUNK = st.one_of(
    st.text(), st.sampled_from(["{", "[]", "[1]", '[{"function": 1}]', '{"a": 1}', "<think>x</think>y", "<|end|>"])
)
CALLED = st.builds(ToolCall, name=st.text(), arguments=JUNK)
MESSAGES = st.lists(
    st.builds(Message, role=ROLES, content=JUNK, reasoning=JUNK, tool_calls=st.lists(CALLED, max_size=2).map(tuple)),
    max_size=4,
).map(tuple)


@given(
    messages=MESSAGES,
    rejected=MESSAGES,
    tools=JUNK,
    num_given=st.integers(0, 5),
    text=JUNK,
    too_long=st.sampled_from(["drop", "cut_prompt"]),
)
def test_no_row_raises(messages: Any, rejected: Any, tools: str, num_given: int, text: str, too_long: Any) -> None:
    budget = Budget(max_tokens=12, too_long=too_long, turns="all")
    for row in (
        {"messages": messages, "rejected": rejected, "tools": tools, "num_given": num_given},
        {"messages": messages},
        {"text": text},
    ):
        for renderer in (CHAT, PLAIN):
            rendered = render_one(renderer, budget=budget, **row)
            assert bool(rendered.examples) != bool(rendered.problem)
            assert all(len(example.tokens) <= 12 for example in (*rendered.examples, *rendered.rejected))


def test_a_template_that_loses_the_answer_or_a_part_of_it_is_refused() -> None:
    for lost in ("''", "m['content'][:2]"):
        rendered = render_one(_templated(TEMPLATE.replace("m['content']", lost)), _conversation("2+2", "four"))
        assert "does not write the answer unchanged" in rendered.problem


def test_a_thought_that_the_template_writes_before_an_answer_is_what_the_model_has_to_write() -> None:
    renderer = _templated(
        TEMPLATE.replace("m['content']", "('<think></think>' if m['role'] == 'assistant' else '') + m['content']")
    )
    (example,) = render_one(renderer, _conversation("2+2", "think")).examples
    assert supervised_texts(renderer, example) == ["<think></think>think<|end|>"]
    assert renderer.decode_answer(supervised_runs(example)[0]) == "think"


def test_an_opening_that_answers_are_not_written_behind_is_left_out_of_every_prompt() -> None:
    renderer = _templated(TEMPLATE.replace("'<|assistant|>' }}", "'<|assistant|><think>' }}"))
    (example,) = render_one(renderer, _conversation("a", "<think>b")).examples
    assert renderer.prompt_text([Message("user", "a")]) == "<|user|>a<|end|>\n<|assistant|>"
    assert supervised_texts(renderer, example) == ["<think>b<|end|>"]


@pytest.mark.parametrize(
    ("written", "eos", "turn"),
    [
        ("<|stop|>", "<|end|>", "4<|stop|>"),
        ("<|close|><|stop|>\n<|user|>", "<|end|>", "4<|close|><|stop|>"),
        ("</a><|stop|>\n<|end|>", "<|end|>", "4</a><|stop|>\n<|end|>"),
        ("", "<|end|>", "4<|end|>"),
    ],
)
def test_a_turn_ends_with_the_end_token_or_with_the_first_marks_or_gets_an_end(
    written: str, eos: str, turn: str
) -> None:
    renderer = _templated(TEMPLATE.replace("'<|end|>' + '\n'", repr(written)), eos_token=eos)
    renderer.tokenizer.add_tokens(["<|stop|>", "<|close|>"], special_tokens=True)
    (example,) = render_one(renderer, _conversation("2+2", "4")).examples
    assert supervised_texts(renderer, example) == [turn]
    assert renderer.tokenizer.convert_ids_to_tokens(list(renderer.stop_tokens)) == list(
        dict.fromkeys([turn[-8:] if "stop" in turn[-8:] else eos, eos])
    )
    assert renderer.decode_answer(supervised_runs(example)[0]) == "4"
    assert renderer.decode_answer(renderer.tokenizer("4")["input_ids"]) == "4"  # stopped by its length
    assert bool(renderer.notes) == (written == "")


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    for template, words in (
        ("{{ raise_exception('No system role') }}", "No system role"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
    ):
        rendered = render_one(_templated(template), _conversation("2+2", "4"))
        assert "the chat template refuses this conversation: " in rendered.problem
        assert words in rendered.problem


def test_the_date_that_a_template_writes_does_not_change_from_day_to_day() -> None:
    assert _templated("{{ strftime_now('%d %b %Y') }}").prompt_text([Message("user", "x")]) == "26 Jul 2024"


def test_a_tokenizer_that_would_cut_or_pad_is_not_heard() -> None:
    renderer = Renderer(make_tokenizer(), "chat")
    renderer.tokenizer.backend_tokenizer.enable_truncation(5)
    renderer.tokenizer.backend_tokenizer.enable_padding(length=99)
    assert render_one(renderer, _conversation("a question", "an answer")) == render_one(
        CHAT, _conversation("a question", "an answer")
    )


def test_a_character_that_the_tokenizer_cannot_write_is_named() -> None:
    alphabet = {token: at for at, token in enumerate(["<|end|>", "<unk>", *"abc"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=alphabet, merges=[], unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="<|end|>",
    )
    renderer = Renderer(tokenizer, "plain")
    assert "no token for 'ż'" in render_one(renderer, _conversation("a", "abżc")).problem
    assert "no token for 'ż'" in render_one(renderer, text="abżc").problem
    assert render_one(renderer, _conversation("ż", "abc")).examples


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_an_answer_gets_no_blank_that_it_does_not_have_in_the_whole_text(scheme: Any) -> None:
    words = {
        token: at
        for at, token in enumerate(
            ["<|end|>", "<unk>", *"▁:/[]", *map(chr, range(65, 91)), *map(chr, range(97, 123)), "\n", "▁P"]
        )
    }
    inner = Tokenizer(models.BPE(vocab=words, merges=[("▁", "P")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    renderer = Renderer(
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|end|>"), "plain"
    )
    for prompt, answer in (("Capital:\n", "Paris is"), ("Capital:", " Paris is")):
        (example,) = render_one(renderer, _conversation(prompt, answer)).examples
        assert (
            list(example.tokens)
            == renderer.tokenizer(prompt + answer + "<|end|>", add_special_tokens=False)["input_ids"]
        )
        assert renderer.decode_answer(supervised_runs(example)[0]) == answer


def test_a_tokenizer_without_a_fast_backend_renders_and_cuts_too() -> None:
    renderer = Renderer(ByT5Tokenizer(), "plain")
    (example,) = render_one(renderer, _conversation("2+2=", "4")).examples
    assert supervised_texts(renderer, example) == ["4</s>"]
    cut = render_one(
        renderer, _conversation("0123456789", "x"), Budget(max_tokens=8, too_long="cut_prompt", turns="all")
    )
    assert renderer.tokenizer.decode(cut.examples[0].tokens) == "012789x</s>"


def test_padding_is_the_end_token_where_the_tokenizer_names_none() -> None:
    tokenizer = make_tokenizer()
    assert Renderer(tokenizer, "chat").pad == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert Renderer(tokenizer, "chat").pad == tokenizer.eos_token_id


def test_special_tokens_in_a_text_are_named_once_each() -> None:
    assert CHAT.special_tokens_in("a <|end|> b <|user|><|end|> <|other|> <|end") == ("<|end|>", "<|user|>")
    assert CHAT.special_tokens_in("nothing") == ()
    renderer = Renderer(make_tokenizer(), "chat")
    renderer.tokenizer.add_tokens(["<|end|>|", "<|end|>||", "<|e"], special_tokens=True)
    assert renderer.special_tokens_in("<|end|> <|end|>|| <|e <|end|>|") == ("<|end|>", "<|end|>||", "<|e", "<|end|>|")


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
    assert render_one(open_renderer(tmp_path, "plain"), _conversation("2+2", "4")).examples


def test_of_several_templates_the_default_is_taken_and_that_for_tools_where_there_are_some(tmp_path: Path) -> None:
    templates = {"default": TEMPLATE, "tool_use": "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TEMPLATE}
    renderer = open_renderer(_saved(tmp_path / "both", chat_template=templates), "chat")
    assert renderer.prompt_text([Message("user", "a")]) == "<|user|>a<|end|>\n<|assistant|>"
    assert (
        renderer.prompt_text([Message("user", "a")], tools='[{"name": "add"}]') == "add<|user|>a<|end|>\n<|assistant|>"
    )
    with pytest.raises(ModelError, match="none is called default"):
        open_renderer(_saved(tmp_path / "none", chat_template={"rag": TEMPLATE}), "chat")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no eos_token"):
        open_renderer(_saved(tmp_path, eos_token=None), "plain")


def test_what_the_model_itself_stops_at_stops_generation_too(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    assert open_renderer(folder, "chat").stop_tokens == (0,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}), encoding="utf-8")
    renderer = open_renderer(folder, "chat")
    assert renderer.stop_tokens == (0, 3)
    assert renderer.decode_answer([*renderer.tokenizer("ab")["input_ids"], 3, 3]) == "ab"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}), encoding="utf-8")
    assert open_renderer(folder, "chat").stop_tokens == (0, 3)


def test_template_options_reach_the_template_but_cannot_take_the_place_of_the_rows(tmp_path: Path) -> None:
    folder = _saved(tmp_path, chat_template="{{ enable_thinking }} {{ tone }} " + TEMPLATE)
    renderer = open_renderer(folder, "chat", template_options={"enable_thinking": True, "tone": "kind"})
    assert renderer.prompt_text([Message("user", "a")]).startswith("True kind <|user|>")
    assert open_renderer(folder, "chat").prompt_text([Message("user", "a")]).startswith("False  <|user|>")
    with pytest.raises(DataError, match="sets messages, tools, which come from the rows"):
        open_renderer(folder, "chat", template_options={"tools": [], "messages": []})


def test_the_hash_survives_saving_and_changes_with_whatever_changes_a_prompt(tmp_path: Path) -> None:
    own = CHAT.sha256()
    assert open_renderer(_saved(tmp_path / "same"), "chat").sha256() == own
    assert open_renderer(tmp_path / "same", "chat", template_options={"enable_thinking": False}).sha256() == own
    others = [
        open_renderer(_saved(tmp_path / "template", chat_template=TEMPLATE + " "), "chat"),
        open_renderer(_saved(tmp_path / "eos", eos_token="<|user|>"), "chat"),
        open_renderer(_saved(tmp_path / "bos", bos_token="<|system|>"), "chat"),
        open_renderer(_saved(tmp_path / "kind"), "plain"),
        open_renderer(tmp_path / "same", "chat", template_options={"enable_thinking": True}),
    ]
    assert len({own, *(renderer.sha256() for renderer in others)}) == 6


def test_a_pair_whose_sides_the_template_writes_alike_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'].strip()")
    renderer, messages = Renderer(tokenizer, "chat"), (Message("user", "Is it so?"), Message("assistant", "Yes."))
    alike = render_one(renderer, messages, num_given=1, rejected=(Message("assistant", "Yes. "),))
    assert "the same text" in alike.problem
    assert alike.remedy
    assert render_one(renderer, messages, num_given=1, rejected=(Message("assistant", "No."),)).rejected
