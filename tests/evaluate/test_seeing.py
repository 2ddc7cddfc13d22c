"""Answers about images: those of transformers' own `generate` on what the family's processor makes of question and images, row by row, whatever rows
stand beside each other."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, ProcessorMixin

from finefit.data.eyes import open_eye
from finefit.data.eyes.eye import Eye, Shown
from finefit.evaluate import decoding
from finefit.evaluate.decoding import Look, decode, likeliest
from finefit.model.attention import choose_attention, for_answers
from finefit.spec.rows import ImageLimits
from tests.vision import FAMILIES, digit_image, make_vlm, vlm_inputs, vlm_processor

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
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "embed" not in name:
            parameter.data.mul_(12)
    model.generation_config = GenerationConfig()
    return model.eval()


def _eye(folder: Path) -> Eye:
    eye = open_eye(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")), ImageLimits())
    assert eye is not None
    return eye


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


def _look(eye: Eye, questions: Sequence[Question]) -> Look:
    rows = [[Shown(eye.grid(image.size), eye.pixels(image)) for image in images] for _, images in questions]
    return lambda ids, lengths: eye.lens.extra(ids, lengths, rows)


def _greedy(
    model: Any, eye: Eye, prompts: list[list[int]], questions: Sequence[Question], stops: Sequence[int] = ()
) -> list[list[int]]:
    return decode(
        model,
        prompts,
        max_new_tokens=NEW,
        stops=stops,
        pad=0,
        device="cpu",
        choose=likeliest,
        look=_look(eye, questions),
    )


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
    folder = _made(folders, family)
    model, eye, processor, questions = _model(folder), _eye(folder), vlm_processor(folder), _questions(family)
    inputs = [_inputs(processor, question) for question in questions]
    wanted = [_generated(model, given, ()) for given in inputs]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    monkeypatch.setattr(decoding, "_by_transformers", None)  # it must not come to that
    assert _greedy(model, eye, [given["input_ids"][0].tolist() for given in inputs], questions) == wanted


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_rows_of_one_length_and_a_single_one_meet_no_mask_but_for_what_has_slid_away(
    family: str, folders: Path
) -> None:
    folder = _made(folders, family)
    model, eye, processor = _model(folder), _eye(folder), vlm_processor(folder)
    questions: list[Question] = [("Which?", _images((40, 40))), ("What?!", _images((40, 40))[::-1])]
    inputs = [_inputs(processor, question) for question in questions]
    prompts = [given["input_ids"][0].tolist() for given in inputs]
    assert len({len(prompt) for prompt in prompts}) == 1
    wanted = [_generated(model, given, ()) for given in inputs]
    assert _greedy(model, eye, prompts, questions) == wanted
    assert _greedy(model, eye, prompts[1:], questions[1:]) == wanted[1:]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma"])
def test_rows_that_have_ended_leave_and_the_others_go_on(family: str, folders: Path) -> None:
    folder = _made(folders, family)
    model, eye, processor, questions = _model(folder), _eye(folder), vlm_processor(folder), _questions(family)
    inputs = [_inputs(processor, question) for question in questions]
    whole = [_generated(model, given, ()) for given in inputs]
    stops = [whole[0][1], whole[1][3]]
    wanted = [_generated(model, given, stops) for given in inputs]
    assert len({len(tokens) for tokens in wanted}) > 1
    assert _greedy(model, eye, [given["input_ids"][0].tolist() for given in inputs], questions, stops) == wanted


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llava_next", {"text_config": {"sliding_window": 24}}),
        (
            "paligemma",
            {
                "text_config": {
                    "model_type": "gemma2",
                    "sliding_window": 24,
                    "query_pre_attn_scalar": 16,
                    "attn_logit_softcapping": 5.0,
                }
            },
        ),
    ],
)
def test_windows_of_other_language_towers_and_capped_scores_are_kept(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_vlm(family, tmp_path / family, **changes)
    model, eye, processor, questions = _model(folder), _eye(folder), vlm_processor(folder), _questions(family)
    inputs = [_inputs(processor, question) for question in questions]
    wanted = [_generated(model, given, ()) for given in inputs]
    assert _greedy(model, eye, [given["input_ids"][0].tolist() for given in inputs], questions) == wanted
