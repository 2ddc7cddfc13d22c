"""The chat templates of real models, as TRL ships them: the answer and its end are supervised exactly, or the row is refused; never a wrong row."""

from pathlib import Path

import pytest
import trl

from finefit.data.render import Renderer
from finefit.data.rows import Message
from finefit.errors import DataError
from tests.conftest import make_tokenizer
from tests.data.conftest import supervised_texts

FOLDER = Path(trl.__file__).parent / "chat_templates"
SINGLE = (Message("user", "Add 2 and 2."), Message("assistant", '{"sum": 4}'))
WITH_SYSTEM = (Message("system", "Answer in JSON."), *SINGLE)
TWO_TURNS = (*SINGLE, Message("user", "Add 3."), Message("assistant", '{"sum": 7}'))

EXACT = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "diffusion_gemma": "<turn|>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "gemma4_v5": "<turn|>",
    "lfm2": "<|im_end|>",
    "lfm2_2_5": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>",
    "nemotron_3_super": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3_8": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
}
EXACT_WITH_ONE_ANSWER = {
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
}
"""These write earlier answers differently from the last one."""
REFUSED = {
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "does not put the answer as it stands"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "does not put the answer as it stands"),
    "glm4moe": ("<|endoftext|>", "ends an answer without '<|endoftext|>'"),
    "gptoss": ("<|return|>", "does not put the answer as it stands"),
    "idefics3": ("<end_of_utterance>", "does not put the answer as it stands"),
    "llava_next": ("</s>", "the chat template refuses this conversation"),
    "muse_glimmer": ("<|eot|>", "does not put the answer as it stands"),
    "smolvlm": ("<end_of_utterance>", "does not put the answer as it stands"),
}


def _renderer(name: str, end: str) -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": end})
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return Renderer(tokenizer, "chat")


@pytest.mark.parametrize("messages", [SINGLE, WITH_SYSTEM], ids=["single", "system"])
@pytest.mark.parametrize(("name", "end"), (EXACT | EXACT_WITH_ONE_ANSWER).items())
def test_one_answer_is_supervised_exactly_behind_the_prompt_of_generation(name: str, end: str, messages: tuple[Message, ...]) -> None:
    renderer = _renderer(name, end)
    example = renderer.example(messages)
    assert supervised_texts(renderer, example) == ['{"sum": 4}' + end]
    assert example.tokens[: example.supervised.index(True)] == tuple(renderer.prompt_tokens(messages[:-1]))
    assert all(m.content in renderer.prompt_text(messages[:-1]) for m in messages[:-1])


@pytest.mark.parametrize(("name", "end"), EXACT.items())
def test_two_answers_are_supervised_exactly(name: str, end: str) -> None:
    renderer = _renderer(name, end)
    example = renderer.example(TWO_TURNS)
    assert supervised_texts(renderer, example) == ['{"sum": 4}' + end, '{"sum": 7}' + end]
    assert supervised_texts(renderer, renderer.example(TWO_TURNS, num_given=3)) == ['{"sum": 7}' + end]


@pytest.mark.parametrize(("name", "end"), EXACT_WITH_ONE_ANSWER.items())
def test_two_answers_are_refused_where_earlier_ones_are_rewritten_and_exact_where_they_are_given(name: str, end: str) -> None:
    renderer = _renderer(name, end)
    with pytest.raises(DataError, match="differently when more follows"):
        renderer.example(TWO_TURNS)
    example = renderer.example(TWO_TURNS, num_given=3)
    assert supervised_texts(renderer, example) == ['{"sum": 7}' + end]
    assert example.tokens[: example.supervised.index(True)] == tuple(renderer.prompt_tokens(TWO_TURNS[:-1]))


@pytest.mark.parametrize(("name", "end", "reason"), [(name, *rest) for name, rest in REFUSED.items()])
def test_a_template_that_cannot_be_exact_is_refused_with_its_reason(name: str, end: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        _renderer(name, end).example(SINGLE)
    assert reason in caught.value.problem
    assert caught.value.remedy


def test_gemma_refuses_a_system_message_in_its_own_words() -> None:
    renderer = _renderer("gemma", "<end_of_turn>")
    assert supervised_texts(renderer, renderer.example(TWO_TURNS)) == ['{"sum": 4}<end_of_turn>', '{"sum": 7}<end_of_turn>']
    with pytest.raises(DataError, match="refuses this conversation: System role not supported"):
        renderer.example(WITH_SYSTEM)


def test_marks_between_answer_and_end_are_supervised_too() -> None:
    """Cohere closes the response before the turn, Phi the turn before the text; the model has to write both to be stopped."""
    cohere, phi = _renderer("cohere2", "<|END_OF_TURN_TOKEN|>"), _renderer("phi3", "<|endoftext|>")
    assert supervised_texts(cohere, cohere.example(SINGLE)) == ['{"sum": 4}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>']
    assert supervised_texts(phi, phi.example(SINGLE)) == ['{"sum": 4}<|end|>\n<|endoftext|>']


@pytest.mark.parametrize("path", sorted(p for p in FOLDER.glob("*.jinja") if not p.stem.endswith("_training")), ids=lambda path: path.stem)
def test_no_template_gives_a_wrong_row_for_the_tokenizers_own_end(path: Path) -> None:
    """With an end token that the template may or may not write."""
    for end in ("<|im_end|>", "<|end|>", "<eos>"):
        renderer = _renderer(path.stem, end)
        try:
            example = renderer.example(SINGLE)
        except DataError:
            continue
        (text,) = supervised_texts(renderer, example)
        assert text.startswith('{"sum": 4}')
        assert text.endswith(end)
