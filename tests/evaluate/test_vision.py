"""Answers about images: those of transformers' own `generate` on what the family's processor makes of question and
images, row by row, whatever rows stand beside each other."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, ProcessorMixin

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.stage_records import ItemImage
from finefit.data.encode import Budget
from finefit.data.image_check import ModelProcessor
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import ImageRef, Message, Row
from finefit.errors import DataError
from finefit.evaluate import decoding, worker
from finefit.evaluate.batches import ImagePrefetch
from finefit.evaluate.decoding import MakeImageInputs, decode, likeliest
from finefit.evaluate.generate import AnswerModel, generate
from finefit.evaluate.worker import EvalJob, evaluate
from finefit.model.attention import choose_attention, for_answers
from finefit.spec.data import ImageLimits
from finefit.spec.schema import Evaluation
from finefit.tasks.make import make_task
from finefit.vision.family import ImageInput, ImageProcessor
from tests.evaluate.conftest import make_work, never
from tests.vision_models import FAMILIES, digit_image, make_vlm, vlm_inputs, vlm_processor

torch.set_num_threads(1)

NEW = 12
Question = tuple[str, list[PIL.Image.Image]]
"""With its images."""


def _images(*sizes: tuple[int, int]) -> list[PIL.Image.Image]:
    return [digit_image(at % 10, size=size, seed=at) for at, size in enumerate(sizes)]


def _questions(family: str) -> list[Question]:
    """Of unequal length, with one image, two, and none where a family takes that."""
    wide, tall, small = _images((90, 45), (40, 96), (34, 36))
    asked: list[Question] = [
        ("Which?", [wide, tall]),
        ("What is drawn there, and on which ground?", [small]),
        ("Read it.", [tall]),
    ]
    return asked if family == "paligemma" else [*asked, ("Say something of no image at all.", [])]


def _model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Weights so far from zero that every token and every patch makes a difference."""
    attention = for_answers(choose_attention("cpu", (0, 0), "fp32", AutoConfig.from_pretrained(folder)))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    _enlarge(model)
    model.generation_config = GenerationConfig()
    return model.eval()


def _enlarge(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed" not in name:
            parameter.data.mul_(12)


def _image_processor(folder: Path) -> ImageProcessor:
    image_processor = _see(folder)()
    assert image_processor is not None
    return image_processor


def _generated(model: Any, inputs: dict[str, Tensor], stops: Sequence[int]) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=list(stops) or None, pad_token_id=0)
    tokens: list[int] = model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def _inputs(processor: ProcessorMixin, question: Question) -> dict[str, Tensor]:
    words, images = question
    if images:
        return vlm_inputs(processor, words, images)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": words}]}], add_generation_prompt=True
    )
    bos = processor.tokenizer.bos_token
    made = processor.tokenizer([text], add_special_tokens=bos is None or not text.startswith(bos), return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def _make_images(image_processor: ImageProcessor, questions: Sequence[Question]) -> MakeImageInputs:
    rows = [
        [ImageInput(image_processor.grid(image.size), image_processor.pixels(image)) for image in images]
        for _, images in questions
    ]
    return lambda ids, lengths: image_processor.geometry.extra(ids, lengths, rows)


def _asked(folder: Path, questions: Sequence[Question]) -> tuple[Any, list[dict[str, Tensor]], Callable[..., Any]]:
    """The model, the inputs of transformers, and what we decode of so many of the questions, from the last."""
    model, image_processor, processor = _model(folder), _image_processor(folder), vlm_processor(folder)
    inputs = [_inputs(processor, question) for question in questions]

    def greedy(stops: Sequence[int] = (), *, skip: int = 0) -> list[list[int]]:
        return decode(
            model,
            [given["input_ids"][0].tolist() for given in inputs[skip:]],
            max_new_tokens=NEW,
            stops=stops,
            pad=0,
            device="cpu",
            choose=likeliest,
            make_images=_make_images(image_processor, questions[skip:]),
        )

    return model, inputs, greedy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def _made(folders: Path, family: str, **changes: Any) -> Path:
    folder = folders / family
    return folder if folder.exists() else make_vlm(family, folder, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_get_the_tokens_that_transformers_gives_each_alone(
    family: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, greedy = _asked(_made(folders, family), _questions(family))
    wanted = [_generated(model, given, ()) for given in inputs]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    monkeypatch.setattr(decoding, "_by_transformers", None)  # it must not come to that
    assert greedy() == wanted


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_rows_of_one_length_and_a_single_one_meet_no_mask_but_for_what_has_slid_away(
    family: str, folders: Path
) -> None:
    questions: list[Question] = [("Which?", _images((40, 40))), ("What?!", _images((40, 40))[::-1])]
    model, inputs, greedy = _asked(_made(folders, family), questions)
    assert len({given["input_ids"].shape for given in inputs}) == 1
    wanted = [_generated(model, given, ()) for given in inputs]
    assert greedy() == wanted
    assert greedy(skip=1) == wanted[1:]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma"])
def test_rows_that_have_ended_leave_and_the_others_go_on(family: str, folders: Path) -> None:
    model, inputs, greedy = _asked(_made(folders, family), _questions(family))
    whole = [_generated(model, given, ()) for given in inputs]
    stops = [whole[0][1], whole[1][3]]
    wanted = [_generated(model, given, stops) for given in inputs]
    assert len({len(tokens) for tokens in wanted}) > 1
    assert greedy(stops) == wanted


GEMMA2 = {
    "model_type": "gemma2",
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
}


@pytest.mark.parametrize(("family", "text"), [("llava_next", {"sliding_window": 24}), ("paligemma", GEMMA2)])
def test_windows_of_other_language_towers_and_capped_scores_are_kept(
    family: str, text: dict[str, Any], tmp_path: Path
) -> None:
    model, inputs, greedy = _asked(make_vlm(family, tmp_path / family, text_config=text), _questions(family))
    assert greedy() == [_generated(model, given, ()) for given in inputs]


# An evaluation of a model that sees, as its process does it: items with pictures, prompts and pixels as in training,
# images decoded in processes of their own.

SIZES = ((90, 45), (40, 96), (36, 34))
WORKER_NEW = 5
_ANY = Budget(max_tokens=4096, too_long="error", turns="last")


def _folder(family: str, folder: Path) -> Path:
    """Weights so far from zero that every patch makes a difference."""
    path = make_vlm(family, folder / "model")
    model = AutoModelForImageTextToText.from_pretrained(path)
    _enlarge(model)
    model.save_pretrained(path)
    return path


def _see(folder: Path) -> ModelProcessor:
    return ModelProcessor(folder, folder / "config.json", ImageLimits())


def _rows(folder: Path, image_processor: ImageProcessor) -> list[Row]:
    rows = []
    for at, size in enumerate(SIZES):
        path = folder / f"{at}.png"
        digit_image(at, size=size, seed=at).save(path)
        ref = ImageRef(
            str(path), "", hashlib.sha256(path.read_bytes()).hexdigest(), size, image_processor.grid(size), 100
        )
        messages = (Message("user", f"Which digit is {'it ' * at}?"), Message("assistant", str(at)))
        rows.append(Row(source="test.jsonl", number=at + 1, messages=messages, image_refs=(ref,)))
    return rows


def _renderer(folder: Path) -> Renderer:
    return open_renderer(folder, _template(folder), image_processor=_image_processor(folder))


def _template(folder: Path) -> Any:
    return "plain" if vlm_processor(folder).chat_template is None else "chat"


def work_of(folder: Path, model: Path) -> EvalJob:
    return make_work(
        folder,
        model,
        _rows(folder, _image_processor(model)),
        task="exact_match",
        batch_limit=EvalBatchLimit(rows=2, tokens=4096),
        max_new_tokens=WORKER_NEW,
        renderer=_renderer(model),
        template=_template(model),
    )


def _alone(folder: Path, rows: Sequence[Row]) -> list[str]:
    """What transformers' own generation says to each row."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor, renderer = vlm_processor(folder), _renderer(folder)
    found = []
    for row, size in zip(rows, SIZES, strict=True):
        inputs = vlm_inputs(
            processor, row.prompt[0].content, [digit_image(row.number - 1, size=size, seed=row.number - 1)]
        )
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=WORKER_NEW,
            eos_token_id=list(renderer.stop_tokens),
            pad_token_id=0,
        )
        found.append(renderer.decode_answer(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


def test_an_evaluation_answers_about_the_images_of_its_items(tmp_path: Path) -> None:
    model = _folder("qwen2_5_vl", tmp_path)
    work = work_of(tmp_path, model)
    result = evaluate(work)
    rows = _rows(tmp_path, _image_processor(model))
    wanted = _alone(model, rows)
    assert len(set(wanted)) == len(wanted)
    assert [item.answer for item in result.items] == wanted
    assert [item.images for item in result.items] == [
        (ItemImage(name=row.image_refs[0].path, sha256=row.image_refs[0].sha256),) for row in rows
    ]
    assert all("<|image_pad|>" in item.prompt for item in result.items)


@pytest.mark.parametrize("loses", [Path.unlink, lambda path: path.write_bytes(b"another")])
def test_a_missing_or_changed_image_is_told_by_row_before_a_model_is_loaded(
    tmp_path: Path, loses: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(tmp_path, make_vlm("llava", tmp_path / "model"))
    monkeypatch.setattr(worker, "load_for_answers", None)  # it must not come to that
    loses(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"test.jsonl:2: its image"):
        evaluate(work)


def _at_once(call: Callable[..., Any], *given: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(call(*given))
    return future


def _logprob(model: Any, inputs: dict[str, Any], answer: list[int]) -> float:
    """Of an answer behind a prompt, by the model's own forward: token after token, so that no prompt sees its
    answer."""
    total, given = 0.0, dict(inputs)
    for token in answer:
        with torch.no_grad():
            total += float(model(**given).logits[0, -1].log_softmax(-1)[token])
        for name, value in (
            ("input_ids", token),
            ("attention_mask", 1),
            ("token_type_ids", 0),
            ("mm_token_type_ids", 0),
        ):
            if name in given:
                given[name] = torch.cat([given[name], torch.full((1, 1), value, dtype=given[name].dtype)], 1)
    return total


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_the_likelihood_of_a_given_answer_is_that_of_the_models_own_forward(family: str, tmp_path: Path) -> None:
    folder = make_vlm(family, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor, renderer = vlm_processor(folder), _renderer(folder)
    rows = _rows(tmp_path, _image_processor(folder))
    voice = AnswerModel(
        model=model,
        renderer=renderer,
        batch_limit=EvalBatchLimit(rows=3, tokens=4096),
        device="cpu",
        max_new_tokens=WORKER_NEW,
        max_prompt_tokens=None,
        warn=never,
        images=ImagePrefetch(_see(folder), _at_once),
    )
    task = make_task(Evaluation.model_validate({"task": "perplexity"}), form=None, base=tmp_path, run=tmp_path)
    found = {told.at: told.reply.right[0] for told in generate(voice, task, dict(enumerate(rows)))}
    for at, (row, size) in enumerate(zip(rows, SIZES, strict=True)):
        inputs = vlm_inputs(processor, row.prompt[0].content, [digit_image(at, size=size, seed=at)])
        (rendered,) = renderer.render([row], _ANY)
        tokens = [
            token
            for token, is_own in zip(rendered.examples[0].tokens, rendered.examples[0].supervised, strict=True)
            if is_own
        ]
        assert found[at].tokens == len(tokens)
        assert found[at].logprob == pytest.approx(_logprob(model, inputs, tokens), rel=1e-4)
