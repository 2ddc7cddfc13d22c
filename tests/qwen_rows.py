"""Rows with images for the Qwen families, as transformers' processor makes them and as ours does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import ProcessorMixin

from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.vision.family import ImageInput, ImageProcessor
from finefit.vision.qwen import qwen_processor
from tests.vision_models import ask, digit_image

QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WIDE, TALL, SMALL = (90, 45), (40, 96), (10, 12)
"""Width and height. The first two are cut into windows of unequal size; the last is scaled up."""


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def image_processor_of(folder: Path, **limits: int) -> ImageProcessor:
    return qwen_processor(folder, config_of(folder), ImageLimits(**limits))


def random_images(*sizes: tuple[int, int]) -> list[PIL.Image.Image]:
    return [digit_image(at % 10, size=size, seed=at) for at, size in enumerate(sizes)]


def own_tokens(
    image_processor: ImageProcessor, processor: ProcessorMixin, question: str, images: Sequence[PIL.Image.Image]
) -> list[int]:
    """The prompt of the chat template with our text in the place of each mark."""
    pieces = ask(processor, question, images=len(images)).split(image_processor.placeholder)
    assert len(pieces) == len(images) + 1
    text = "".join(
        part
        for pair in zip(pieces, [*(image_processor.text(image.size) for image in images), ""], strict=True)
        for part in pair
    )
    tokens: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def image_inputs(image_processor: ImageProcessor, images: Sequence[PIL.Image.Image]) -> list[ImageInput]:
    return [ImageInput(image_processor.grid(image.size), image_processor.pixels(image)) for image in images]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Padded on the right."""

    input_ids: Tensor
    lengths: list[int]
    extra: Extra
    theirs: dict[str, Tensor]
    """What transformers' own forward takes beside the tokens."""

    @property
    def is_own(self) -> Tensor:
        return torch.arange(self.input_ids.shape[1]) < torch.tensor(self.lengths).unsqueeze(1)

    @property
    def labels(self) -> Tensor:
        """The last six tokens of each row."""
        at = torch.arange(self.input_ids.shape[1])
        ends = torch.tensor(self.lengths).unsqueeze(1)
        return self.input_ids.where((at < ends) & (at >= ends - 6), -100)


def rows_of(
    image_processor: ImageProcessor, processor: ProcessorMixin, *rows: tuple[str, Sequence[PIL.Image.Image]]
) -> Rows:
    tokens = [own_tokens(image_processor, processor, question, images) for question, images in rows]
    lengths = [len(row) for row in tokens]
    input_ids = np.full((len(rows), max(lengths)), processor.tokenizer.pad_token_id, dtype=np.int64)
    for at, row in enumerate(tokens):
        input_ids[at, : len(row)] = row
    extra = image_processor.geometry.extra(
        input_ids, lengths, [image_inputs(image_processor, images) for _, images in rows]
    )
    ids = torch.from_numpy(input_ids)
    theirs = {"attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths).unsqueeze(1)).long()}
    if images := [image for _, row in rows for image in row]:
        made = processor.image_processor(images, return_tensors="pt")
        theirs |= {"mm_token_type_ids": (ids == image_processor.geometry.image_token).int(), **made}
    return Rows(input_ids=ids, lengths=lengths, extra=extra, theirs=theirs)


def mixed_rows(image_processor: ImageProcessor, processor: ProcessorMixin) -> Rows:
    """Two images, one, none; of unequal length."""
    first, second, third = random_images(WIDE, TALL, SMALL)
    return rows_of(
        image_processor,
        processor,
        ("Which two?", [first, second]),
        ("What is drawn there?", [third]),
        ("Say something of no image at all.", []),
    )
