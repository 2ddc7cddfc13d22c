"""Rows with images in text: as many image tokens as the model will have features, where the model's own processor puts
them."""

from dataclasses import replace
from pathlib import Path

import pytest

from finefit.custom.inputs import raw_image_processor
from finefit.data.encode import Budget
from finefit.data.examples import Example
from finefit.data.image_check import load_image
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Image, Message, Row
from finefit.errors import DataError
from tests.data.conftest import WIDE, prompts_before_answers, supervised_texts
from tests.data.image_rows import ASKED, checked_row, draw, processor_in, renderer_in
from tests.vision_models import make_vlm, vlm_processor

FAMILIES = ("qwen2_5_vl", "llava")
USER, ANSWER = Message("user", ASKED), Message("assistant", "7")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("llava", tmp_path_factory.mktemp("llava"))


def rendered(renderer: Renderer, row: Row, budget: Budget = WIDE) -> Example:
    (found,) = renderer.render([row], budget)
    assert not found.problem, found.problem
    (example,) = found.examples
    return example


def problem_of(renderer: Renderer, row: Row, budget: Budget = WIDE) -> str:
    (found,) = renderer.render([row], budget)
    assert not found.examples
    return found.problem


def by_processor(folder: Path, contents: list[list[dict[str, str]]], row: Row) -> list[int]:
    """The prompt of user messages, each a list of parts, as the model's own processor writes it."""
    processor = vlm_processor(folder)
    talk = [{"role": "user", "content": parts} for parts in contents]
    text = processor.apply_chat_template(talk, add_generation_prompt=True)
    ids: list[int] = processor(text=[text], images=[load_image(ref) for ref in row.image_refs], return_tensors="np")[
        "input_ids"
    ][0].tolist()
    return ids


def image_tokens(renderer: Renderer, example: Example) -> int:
    assert renderer.image_processor is not None
    return example.tokens.count(renderer.image_processor.geometry.image_token)


@pytest.mark.parametrize("marks", ["", "<image><image>"])
def test_the_prompt_is_that_of_the_models_own_processor_with_and_without_marks(
    folder: Path, tmp_path: Path, marks: str
) -> None:
    renderer = renderer_in(folder)
    images = [draw(tmp_path, "a.png", size=(40, 90)), draw(tmp_path, "b.png", 3, size=(120, 50))]
    row = checked_row(processor_in(folder), [Message("user", marks + ASKED), ANSWER], images)
    example = rendered(renderer, row)
    (prompt,) = prompts_before_answers(example)
    assert prompt == by_processor(
        folder, [[{"type": "image"}, {"type": "image"}, {"type": "text", "text": ASKED}]], row
    )
    assert renderer.prompt_tokens(row.prompt, image_refs=row.image_refs) == prompt
    assert example.images == row.image_refs
    assert supervised_texts(renderer, example) == ["7" + str(renderer.tokenizer.eos_token)]


def test_images_stand_in_the_order_of_their_marks_between_the_texts(qwen: Path, tmp_path: Path) -> None:
    images = [draw(tmp_path, "a.png", size=(40, 90)), draw(tmp_path, "b.png", 3, size=(120, 50))]
    row = checked_row(processor_in(qwen), [Message("user", "Left <image> and right <image>?"), ANSWER], images)
    parts = [
        {"type": "text", "text": "Left "},
        {"type": "image"},
        {"type": "text", "text": " and right "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    (prompt,) = prompts_before_answers(rendered(renderer_in(qwen), row))
    assert prompt == by_processor(qwen, [parts], row)


def test_every_turn_of_a_conversation_sees_the_images_before_it(folder: Path, tmp_path: Path) -> None:
    renderer = renderer_in(folder)
    talk = [Message("user", f"<image>{ASKED}"), ANSWER, Message("user", "<image>And this?"), Message("assistant", "8")]
    images = [draw(tmp_path, "a.png"), draw(tmp_path, "b.png", 8, size=(90, 90))]
    row = checked_row(processor_in(folder), talk, images)
    example = rendered(renderer, row)
    eos = str(renderer.tokenizer.eos_token)
    assert supervised_texts(renderer, example) == [f"7{eos}", f"8{eos}"]
    first, second = prompts_before_answers(example)
    assert renderer.image_processor is not None
    sizes = [renderer.image_processor.geometry.num_tokens(ref.grid) for ref in row.image_refs]
    token = renderer.image_processor.geometry.image_token
    assert [first.count(token), second.count(token)] == [sizes[0], sum(sizes)]


def test_both_sides_of_a_pair_share_the_images(folder: Path, tmp_path: Path) -> None:
    row = checked_row(
        processor_in(folder),
        [USER, ANSWER],
        [draw(tmp_path, "a.png")],
        num_given=1,
        rejected=(Message("assistant", "1"),),
    )
    (found,) = renderer_in(folder).render([row], WIDE)
    (chosen,), (rejected,) = found.examples, found.rejected
    assert chosen.images == rejected.images == row.image_refs
    assert prompts_before_answers(chosen) == prompts_before_answers(rejected)


def test_rows_of_text_are_rendered_beside_those_with_images(folder: Path) -> None:
    example = rendered(renderer_in(folder), Row(source="rows.jsonl", number=1, messages=(USER, ANSWER)))
    (prompt,) = prompts_before_answers(example)
    processor = vlm_processor(folder)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": ASKED}]}], add_generation_prompt=True
    )
    assert (prompt, example.images) == (processor.tokenizer(text)["input_ids"], ())


def test_a_plain_prompt_has_its_images_in_place_of_the_marks(llava: Path, tmp_path: Path) -> None:
    renderer = open_renderer(llava, "plain", image_processor=processor_in(llava))
    row = checked_row(processor_in(llava), [Message("user", "This <image> is"), ANSWER], [draw(tmp_path, "a.png")])
    (prompt,) = prompts_before_answers(rendered(renderer, row))
    processor = vlm_processor(llava)
    assert prompt == processor(text=["This <image> is"], images=[load_image(row.image_refs[0])])["input_ids"][0]
    assert renderer.prompt_tokens(row.prompt, image_refs=row.image_refs) == prompt


def test_marks_and_images_that_do_not_match_are_told_by_their_numbers(folder: Path, tmp_path: Path) -> None:
    images = [draw(tmp_path, "a.png"), draw(tmp_path, "b.png"), draw(tmp_path, "c.png")]
    row = checked_row(processor_in(folder), [Message("user", f"<image><image>{ASKED}"), ANSWER], images)
    assert problem_of(renderer_in(folder), row) == "the messages have 2 <image> placeholders, and the row has 3 images"


@pytest.mark.parametrize(("family", "typed"), [("qwen2_5_vl", "<|image_pad|>"), ("llava", "<image>")])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_mark_of_the_model_typed_in_a_text_is_refused(
    qwen: Path, llava: Path, family: str, typed: str, role: str
) -> None:
    folder = {"qwen2_5_vl": qwen, "llava": llava}[family]
    talk = [
        replace(message, content=f"{message.content} {typed}") if message.role == role else message
        for message in (USER, ANSWER)
    ]
    found = problem_of(renderer_in(folder), Row(source="rows.jsonl", number=1, messages=tuple(talk)))
    assert found == f"the text holds {typed!r}, which the model reads as an image, and no image belongs there"


def test_the_mark_of_rows_is_plain_text_to_a_model_that_has_another_one(qwen: Path) -> None:
    renderer = renderer_in(qwen)
    example = rendered(
        renderer, Row(source="rows.jsonl", number=1, messages=(Message("user", "What does <image> mean?"), ANSWER))
    )
    assert "What does <image> mean?" in renderer.tokenizer.decode(example.tokens)
    assert image_tokens(renderer, example) == 0


def test_the_mark_of_rows_is_plain_text_to_a_model_that_is_shown_images_without_one(qwen: Path) -> None:
    renderer = open_renderer(qwen, "chat", image_processor=raw_image_processor("(seen)"))
    example = rendered(
        renderer, Row(source="rows.jsonl", number=1, messages=(Message("user", "What does <image> mean?"), ANSWER))
    )
    assert "What does <image> mean?" in renderer.tokenizer.decode(example.tokens)


def test_a_mark_of_the_model_in_plain_text_is_refused_before_a_batch_is_made(qwen: Path) -> None:
    found = problem_of(renderer_in(qwen), Row(source="rows.jsonl", number=1, text="An <|image_pad|> stands here."))
    assert found == "the text holds '<|image_pad|>', which the model reads as an image, and no image belongs there"


def test_an_image_in_an_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    row = checked_row(processor_in(folder), [USER, Message("assistant", "<image>")], [draw(tmp_path, "a.png")])
    assert "an image is in an answer" in problem_of(renderer_in(folder), row)


def test_a_template_that_loses_an_image_is_a_fault_with_numbers(qwen: Path, tmp_path: Path) -> None:
    renderer = renderer_in(qwen)
    renderer.tokenizer.chat_template = str(renderer.tokenizer.chat_template).replace(
        "<|vision_start|><|image_pad|><|vision_end|>", ""
    )
    row = checked_row(processor_in(qwen), [USER, ANSWER], [draw(tmp_path, "a.png")])
    assert problem_of(renderer, row) == "the template writes 0 places for images (<|image_pad|>), and 1 belong there"


def test_a_renderer_without_an_image_processor_refuses_images(qwen: Path, tmp_path: Path) -> None:
    row = Row(source="rows.jsonl", number=1, messages=(USER, ANSWER), images=(Image(path="a.png", root=str(tmp_path)),))
    assert problem_of(open_renderer(qwen, "chat"), row) == "the row has an image, but this model is text-only"


def _long(marks: str = "") -> list[Message]:
    return [Message("user", "word " * 200 + marks + "end " * 100), ANSWER]


def test_a_cut_takes_text_and_no_token_of_an_image(folder: Path, tmp_path: Path) -> None:
    renderer = renderer_in(folder)
    row = checked_row(processor_in(folder), _long("<image>"), [draw(tmp_path, "a.png", size=(90, 90))])
    whole, budget = rendered(renderer, row), Budget(max_tokens=120, too_long="cut_prompt", turns="all")
    (found,) = renderer.render([row], budget)
    (example,) = found.examples
    assert len(example.tokens) <= 120 < len(whole.tokens)
    assert (image_tokens(renderer, example), example.images) == (image_tokens(renderer, whole), row.image_refs)
    assert found.cut_tokens == len(whole.tokens) - len(example.tokens)
    cut = renderer.prompt_tokens(row.prompt, image_refs=row.image_refs, max_tokens=110)
    assert renderer.image_processor is not None
    assert len(cut) <= 110
    assert cut.count(renderer.image_processor.geometry.image_token) == image_tokens(renderer, whole)


def test_an_image_stays_between_the_texts_that_are_cut_beside_it(qwen: Path, tmp_path: Path) -> None:
    renderer = renderer_in(qwen)
    row = checked_row(processor_in(qwen), _long("<image>"), [draw(tmp_path, "a.png")])
    text = renderer.tokenizer.decode(
        rendered(renderer, row, Budget(max_tokens=120, too_long="cut_prompt", turns="all")).tokens
    )
    assert "user\nw<|vision_start|>" in text  # of the longer text one token is left
    assert text.find("<|vision_end|>") < text.find("end ")


def test_images_that_do_not_fit_make_a_row_too_long_and_are_told(folder: Path, tmp_path: Path) -> None:
    renderer = renderer_in(folder)
    row = checked_row(
        processor_in(folder), _long(), [draw(tmp_path, "a.png", size=(90, 90)), draw(tmp_path, "b.png", size=(90, 90))]
    )
    tokens = image_tokens(renderer, rendered(renderer, row))
    (found,) = renderer.render([row], Budget(max_tokens=tokens, too_long="cut_prompt", turns="all"))
    assert found.is_too_long
    assert f"({tokens} of images, which are never cut)" in found.problem
    with pytest.raises(DataError, match=rf"and its images \({tokens} tokens\) take more than {tokens} tokens"):
        renderer.prompt_tokens(row.prompt, image_refs=row.image_refs, max_tokens=tokens)


def test_prompts_of_another_image_processor_have_another_hash(qwen: Path) -> None:
    renderer = renderer_in(qwen)
    other = replace(processor_in(qwen), identity="another")
    renderers = (renderer, replace(renderer, image_processor=None), replace(renderer, image_processor=other))
    assert len({renderer.sha256() for renderer in renderers}) == 3
