"""Rows with images for tests: drawn digits in files, and the image processors of tiny models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finefit.artifacts.stage_records import Preparation
from finefit.data.image_check import ImageChecker, ModelProcessor
from finefit.data.prepare import prepare
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Image, Message, Row
from finefit.spec.data import Data, ImageLimits
from finefit.tasks.custom import row_builder
from finefit.vision.family import ImageProcessor
from tests.vision_models import digit_image

ASKED = "Which digit is it?"
MODEL = "model"


def processor_in(folder: Path) -> ImageProcessor:
    image_processor = ModelProcessor(folder, folder / "config.json", ImageLimits())()
    assert image_processor is not None
    return image_processor


def renderer_in(folder: Path) -> Renderer:
    return open_renderer(folder, "chat", image_processor=processor_in(folder))


def draw(folder: Path, name: str, digit: int = 0, *, size: tuple[int, int] = (48, 40), seed: int = 0) -> Image:
    digit_image(digit, size=size, seed=seed).save(folder / name)
    return Image(path=name, root=str(folder))


def checked_row(
    image_processor: ImageProcessor, messages: Sequence[Message], images: Sequence[Image], **rest: Any
) -> Row:
    row = Row(source="rows.jsonl", number=1, messages=tuple(messages), images=tuple(images), **rest)
    return replace(row, image_refs=ImageChecker(image_processor)(row))


def asked(number: int, *names: str, question: str = ASKED) -> dict[str, Any]:
    """A record with images beside its messages."""
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(number)}],
        "images": list(names),
    }


def prepared(
    folder: Path, model: Path, data: dict[str, Any], *, pairs: bool = False, out: str = "out"
) -> tuple[Preparation, Path]:
    made = folder / out
    made.mkdir()
    whole = Data.model_validate(json.loads(json.dumps(data)), strict=False)
    build = row_builder(whole.task, base=folder)
    return prepare(whole, base=folder, tokenizer=model, seed=0, folder=made, pairs=pairs, build=build), made
