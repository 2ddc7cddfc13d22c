"""Rows with images for tests: drawn digits in files, and the eyes of tiny models."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finefit.artifacts.trainings import Preparation
from finefit.data.eyes.eye import Eye
from finefit.data.looking import Looker, OwnEye
from finefit.data.prepared import prepare
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Image, Message, Row
from finefit.spec.rows import Data, ImageLimits
from tests.vision import digit_image

ASKED = "Which digit is it?"
MODEL = "model"


def eye_in(folder: Path) -> Eye:
    eye = OwnEye(folder, folder / "config.json", ImageLimits())()
    assert eye is not None
    return eye


def renderer_in(folder: Path) -> Renderer:
    return open_renderer(folder, "chat", eye=eye_in(folder))


def draw(folder: Path, name: str, digit: int = 0, *, size: tuple[int, int] = (48, 40), seed: int = 0) -> Image:
    digit_image(digit, size=size, seed=seed).save(folder / name)
    return Image(path=name, root=str(folder))


def looked_at(eye: Eye, messages: Sequence[Message], images: Sequence[Image], **rest: Any) -> Row:
    row = Row(source="rows.jsonl", number=1, messages=tuple(messages), images=tuple(images), **rest)
    return replace(row, pictures=Looker(eye)(row))


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
    return prepare(whole, base=folder, tokenizer=model, seed=0, folder=made, pairs=pairs), made
