"""The inputs of a custom model: rows become its inputs, images reach it unchanged, and a rehearsal gives it blank rows.

A twin of the model on the meta device makes the inputs, in any process, so they cannot depend on a weight.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import nn

from finefit.custom.model import CustomFamily, build_custom, cast_parameters
from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.data.image_check import ModelProcessor, ProcessorFactory, load_image
from finefit.errors import FinefitError, SpecError
from finefit.model.load import make_trainable
from finefit.model.resolve_model import CustomSource, custom_source, custom_source_in
from finefit.objective.batch import Batch, CustomRow, Extra
from finefit.objective.losses import COUNT
from finefit.spec.data import ImageLimits
from finefit.spec.models import CustomModel, Lora, Model, Tuning
from finefit.vision.family import Grid, ImageProcessor, ImageRows, Lengths, Pixels, TokenIds

UNKNOWN_SIZE = (512, 512)
"""The size of an image of which nothing is known."""
_TWINS: dict[str, CustomFamily] = {}


def meta_twin(source: CustomSource) -> CustomFamily:
    """Built once per process."""
    key = json.dumps(source.as_config(), sort_keys=True)
    if key not in _TWINS:
        _TWINS[key] = CustomFamily(build_custom(source, device="meta"), source)
    return _TWINS[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCollate:
    """Makes a batch from rows, in any process. Its tokens serve for counting, as in any batch; the model gets its
    `extra`."""

    source: CustomSource
    pad: int

    def __call__(self, examples: Sequence[Example], seeds: Sequence[int]) -> Batch:
        rows = [
            CustomRow(
                tokens=np.asarray(example.tokens, dtype=np.int64),
                supervised=np.asarray(example.supervised, dtype=np.bool_),
                images=tuple(load_image(ref) for ref in example.images),
                seed=seed,
            )
            for example, seed in zip(examples, seeds, strict=True)
        ]
        return replace(collate(examples, pad=self.pad), extra=custom_extra(self.source, rows))


def custom_extra(source: CustomSource, rows: Sequence[CustomRow]) -> Extra:
    twin = meta_twin(source)
    inputs = twin.inputs(rows)
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return Extra(tensors=inputs, host={COUNT: twin.count(inputs)}, identity=digest.hexdigest())


def custom_on_meta(source: CustomSource, tuning: Tuning, dtype: torch.dtype, *, answers: bool) -> nn.Module:
    """The model as training loads it or, with `answers`, as an evaluation does."""
    with torch.device("meta"):
        model = cast_parameters(build_custom(source, device="meta"), dtype)
        if answers and not isinstance(tuning, Lora):
            return model.requires_grad_(False)
        trained: nn.Module = make_trainable(model, tuning, name="rehearsed")
    return trained.requires_grad_(False) if answers else trained


def blank_rows(count: int, *, tokens: int, supervised: int, sizes: Sequence[tuple[int, ...]] = ()) -> list[CustomRow]:
    """Rows without content; the supervised tokens come last. `sizes` are the widths and heights of the images."""
    images = tuple(PIL.Image.new("RGB", (size[0], size[1])) for size in sizes)
    is_supervised = np.arange(tokens) >= tokens - supervised
    blank = np.zeros(tokens, np.int64)
    return [CustomRow(tokens=blank.copy(), supervised=is_supervised, images=images, seed=at) for at in range(count)]


def blank_extra(
    source: CustomSource, *, rows: int, tokens: int, supervised: int, sizes: Sequence[tuple[int, ...]]
) -> Extra:
    """The inputs of blank rows, on the meta device and never under fake tensors. Without `sizes`, there are as many
    images as the model requires."""
    sizes = sizes or [UNKNOWN_SIZE] * (meta_twin(source).views or 0)
    blank = blank_rows(rows, tokens=tokens, supervised=supervised, sizes=sizes)
    return custom_extra(source, blank).moved(lambda tensor: torch.empty_like(tensor, device="meta"))


def processor_opener(model: Model, base: Path, folder: Path, limits: ImageLimits) -> ProcessorFactory:
    """`base` is the folder that the model's paths are relative to; `folder` contains its config and its processor."""
    if not isinstance(model, CustomModel):
        return ModelProcessor(folder, folder / "config.json", limits)
    if limits != ImageLimits():
        problem = "data.images limits the processors of transformers, and a custom model gets its images unchanged"
        raise SpecError(problem, "leave data.images out, and scale images in inputs")
    return CustomProcessorOpener(json.dumps(custom_source(model, base).as_config(), sort_keys=True))


@dataclass(frozen=True, slots=True)
class CustomProcessorOpener:
    """Builds the model without weights. A model that defines neither `image_text` nor `views` takes no images."""

    config: str
    """JSON text, since it must be hashable."""

    def __call__(self) -> ImageProcessor | None:
        source = custom_source_in(json.loads(self.config))
        assert source is not None
        twin = meta_twin(source)
        return raw_image_processor(twin.image_text, twin.views) if twin.has_vision else None


class RawImageGeometry:
    """Images stay unchanged, and no token of the prompt represents their features."""

    image_token = -1

    def num_tokens(self, grid: Grid) -> int:  # noqa: ARG002
        return 0

    def square_grid(self, side: int) -> Grid:
        return side, side

    def blank_pixels(self, grid: Grid) -> Pixels:
        width, height = grid
        return {"image": np.broadcast_to(np.uint8(0), (height, width, 3))}

    def extra(self, input_ids_BT: TokenIds, lengths: Lengths, rows: ImageRows, prompts: Lengths | None = None) -> Extra:  # noqa: ARG002
        raise FinefitError("a custom model makes its own inputs")


def raw_image_processor(image_text: str = "", views: int | None = None) -> ImageProcessor:
    return ImageProcessor(
        geometry=RawImageGeometry(),
        placeholder="",
        identity=hashlib.sha256(f"custom {views} {image_text}".encode()).hexdigest(),
        grid=lambda size: size,
        text=lambda _: image_text,
        pixels=lambda image: {"image": np.asarray(image)},
        views=views,
    )
