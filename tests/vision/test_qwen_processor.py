import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from finefit.errors import DataError, ModelError
from finefit.spec.data import ImageLimits
from finefit.vision import geometry_of, open_image_processor
from finefit.vision.family import load_processor
from tests.qwen_rows import (
    QWENS,
    SMALL,
    TALL,
    WIDE,
    config_of,
    image_inputs,
    image_processor_of,
    mixed_rows,
    own_tokens,
    random_images,
    rows_of,
)
from tests.vision_models import make_vlm, vlm_inputs, vlm_processor

BLOCK = 16
"""Side in pixels of what becomes one token in the tiny models."""


@pytest.fixture(scope="module", params=QWENS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(request.param, tmp_path_factory.mktemp("vlm") / request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm("qwen2_vl", tmp_path_factory.mktemp("vlm") / "plain")


@pytest.mark.parametrize("sizes", [(WIDE,), (TALL,), (SMALL,), (WIDE, TALL), (SMALL, WIDE, TALL), ()])
def test_our_tokens_and_pixels_are_the_processors(folder: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    image_processor, processor, images = image_processor_of(folder), vlm_processor(folder), random_images(*sizes)
    if not images:
        theirs = processor(text=["<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"])
        assert own_tokens(image_processor, processor, "Which?", []) == theirs["input_ids"][0]
        return
    theirs = vlm_inputs(processor, "Which?", images)
    ours = image_inputs(image_processor, images)
    assert own_tokens(image_processor, processor, "Which?", images) == theirs["input_ids"][0].tolist()
    assert [list(image.grid) for image in ours] == theirs["image_grid_thw"].tolist()
    assert np.array_equal(
        np.concatenate([image.pixels["pixel_values"] for image in ours]), theirs["pixel_values"].numpy()
    )


def test_positions_are_those_of_the_model_itself(folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    given = {name: rows.theirs[name] for name in ("mm_token_type_ids", "image_grid_thw", "attention_mask")}
    positions, deltas = model.model.get_rope_index(rows.input_ids, **given)
    assert torch.equal(rows.extra.tensors["positions_3BT"], positions)
    assert rows.extra.host["next_positions"] == tuple(
        length + delta for length, delta in zip(rows.lengths, deltas.flatten().tolist(), strict=True)
    )


def test_a_row_that_ends_with_an_image_goes_on_behind_its_longer_side(plain: Path) -> None:
    image_processor = image_processor_of(plain)
    ids = np.array([[7, 7, *[image_processor.geometry.image_token] * 8]])
    extra = image_processor.geometry.extra(ids, [10], [image_inputs(image_processor, random_images((64, 32)))])
    assert extra.host["next_positions"] == (2 + 4,)
    assert extra.tensors["positions_3BT"][:, 0, -1].tolist() == [2, 3, 5]


def test_two_images_may_stand_side_by_side_with_nothing_between(plain: Path) -> None:
    """As the model's own code, which takes neighbours for one image, does not allow."""
    image_processor = image_processor_of(plain)
    ids = np.array([[image_processor.geometry.image_token] * 8])
    extra = image_processor.geometry.extra(ids, [8], [image_inputs(image_processor, random_images((32, 32), (32, 32)))])
    assert extra.tensors["positions_3BT"][:, 0].T.tolist() == [
        [now, now + down, now + over] for now in (0, 2) for down in (0, 1) for over in (0, 1)
    ]


def test_places_are_counted_over_the_whole_batch_and_not_in_the_padding(plain: Path) -> None:
    image_processor = image_processor_of(plain)
    image = image_processor.geometry.image_token
    ids = np.array([[5, *[image] * 4, 5, image, image], [*[image] * 4, 5, 5, 5, 5]])
    one = image_inputs(image_processor, random_images((32, 32)))
    extra = image_processor.geometry.extra(ids, [6, 8], [one, one])
    assert extra.tensors["places_I"].tolist() == [1, 2, 3, 4, 8, 9, 10, 11]


def test_a_batch_of_text_has_positions_and_shows_nothing(folder: Path) -> None:
    rows = rows_of(
        image_processor_of(folder), vlm_processor(folder), ("Short?", []), ("A little longer, this one?", [])
    )
    assert sorted(rows.extra.tensors) == ["places_I", "positions_3BT"]
    assert rows.extra.tensors["places_I"].shape == (0,)
    assert rows.extra.tensors["places_I"].dtype == torch.int64
    for row, length in enumerate(rows.lengths):
        assert torch.equal(rows.extra.tensors["positions_3BT"][:, row, :length], torch.arange(length).expand(3, -1))
    assert rows.extra.host["next_positions"] == tuple(rows.lengths)


@pytest.mark.parametrize("tokens", [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 1, 1]])
def test_image_tokens_that_are_not_those_of_the_images_are_refused(plain: Path, tokens: list[int]) -> None:
    image_processor = image_processor_of(plain)
    ids = np.where(np.array([tokens]) == 1, image_processor.geometry.image_token, 9)
    with pytest.raises(DataError, match=r"its 1 images make 4, each in one piece"):
        image_processor.geometry.extra(ids, [5], [image_inputs(image_processor, random_images((32, 32)))])


@pytest.mark.parametrize(
    ("asked", "size", "blocks"), [({}, (96, 96), 36), ({"max_pixels": 16 * BLOCK**2}, (96, 96), 16)]
)
def test_an_image_has_no_more_pixels_than_allowed(
    folder: Path, asked: dict[str, int], size: tuple[int, int], blocks: int
) -> None:
    image_processor = image_processor_of(folder, **asked)
    assert image_processor.geometry.num_tokens(image_processor.grid(size)) == blocks
    (image,) = random_images(size)
    assert image_processor.pixels(image)["pixel_values"].shape[0] == 4 * blocks
    assert image_processor.text(size) == "<|image_pad|>" * blocks


@pytest.mark.parametrize(
    ("asked", "size", "grid"),
    [
        ({"max_pixels": 2 * BLOCK**2}, (90, 90), (1, 2, 2)),
        ({"max_pixels": BLOCK**2}, (16, 16), (1, 2, 2)),  # below the processor's own smallest, which gives way
        ({"max_pixels": 1}, (90, 90), (1, 2, 2)),  # never less than a block
        ({"min_pixels": 25 * BLOCK**2}, (16, 16), (1, 10, 10)),
        ({"min_pixels": 64 * BLOCK**2}, (16, 16), (1, 16, 16)),
        ({"min_pixels": 64 * BLOCK**2}, (128, 128), (1, 16, 16)),  # above its largest, which gives way
        ({"min_pixels": 9 * BLOCK**2, "max_pixels": 9 * BLOCK**2}, (200, 200), (1, 6, 6)),
    ],
)
def test_limits_are_given_to_the_processor_in_its_own_terms(
    plain: Path, asked: dict[str, int], size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    image_processor = image_processor_of(plain, **asked)
    (image,) = random_images(size)
    assert image_processor.grid(size) == grid
    assert image_processor.pixels(image)["pixel_values"].shape[0] == grid[1] * grid[2]


def test_limits_give_the_pixels_that_the_processor_gives_with_them(folder: Path) -> None:
    limits = {"min_pixels": 5 * BLOCK**2, "max_pixels": 9 * BLOCK**2}
    image_processor, processor = image_processor_of(folder, **limits), vlm_processor(folder)
    for image in random_images(WIDE, TALL, SMALL):
        theirs = processor.image_processor([image], **limits, return_tensors="np")
        assert [list(image_processor.grid(image.size))] == theirs["image_grid_thw"].tolist()
        assert np.array_equal(image_processor.pixels(image)["pixel_values"], theirs["pixel_values"])


def test_blank_pixels_have_the_shape_and_type_of_real_ones(folder: Path) -> None:
    image_processor = image_processor_of(folder)
    for image in random_images(WIDE, TALL, SMALL):
        real = image_processor.pixels(image)["pixel_values"]
        blank = image_processor.geometry.blank_pixels(image_processor.grid(image.size))["pixel_values"]
        assert (blank.shape, blank.dtype) == (real.shape, real.dtype)
        assert not blank.any()


def test_an_image_that_is_a_mere_line_is_a_fault_of_its_row(plain: Path) -> None:
    with pytest.raises(ValueError, match="it has 2,010 x 10 pixels: one side is more than 200 times the other"):
        image_processor_of(plain).grid((2010, 10))


def test_the_grid_of_a_square_is_known_from_the_config_alone(folder: Path) -> None:
    """Where the processor need not scale it."""
    image_processor = image_processor_of(folder)
    for side in (32, 48, 96):
        assert image_processor.geometry.square_grid(side) == image_processor.grid((side, side))
    assert image_processor.geometry.square_grid(47) == image_processor.geometry.square_grid(32)
    assert image_processor.geometry.num_tokens(image_processor.geometry.square_grid(1)) == 1


def test_a_grid_is_known_without_the_image(plain: Path) -> None:
    image_processor = image_processor_of(plain)
    for width, height in ((1, 1), (33, 71), (640, 480), (479, 30)):
        image = PIL.Image.new("RGB", (width, height))
        real = load_processor(plain, Qwen2VLImageProcessorPil)([image], return_tensors="np")["image_grid_thw"]
        assert [list(image_processor.grid((width, height)))] == real.tolist()


def _change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_identity_follows_what_makes_pixels_and_tokens(plain: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(plain, tmp_path / "elsewhere")
    assert image_processor_of(copied).identity == image_processor_of(plain).identity
    assert image_processor_of(plain, max_pixels=9 * BLOCK**2).identity != image_processor_of(plain).identity
    _change_settings(copied, image_mean=[0.1, 0.2, 0.3])
    assert image_processor_of(copied).identity != image_processor_of(plain).identity


def test_a_processor_of_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(plain, tmp_path / "mixed")
    _change_settings(copied, patch_size=14)
    with pytest.raises(ModelError, match="patches of 14 pixels, 2 to a block, 2 frames; the tower expects 8, 2 and 2"):
        image_processor_of(copied)
    (copied / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"the image processor of .*mixed cannot be read"):
        image_processor_of(copied)


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "patch_size": 14, "temporal_patch_size": 2},
    "qwen2_5_vl": {"hidden_size": 1280, "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "window_size": 112},
    "qwen3_vl": {"hidden_size": 1024, "in_channels": 3, "num_position_embeddings": 2304, "patch_size": 16},
    "qwen3_vl_moe": {"hidden_size": 1152, "num_position_embeddings": 2304, "patch_size": 16},
}


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_a_published_config_is_enough_for_a_lens(family: str) -> None:
    more = {"image_token_id": 151655, "quantization_config": {"bits": 4}}
    geometry = geometry_of({"model_type": family, "vision_config": PUBLISHED[family], **more})
    assert geometry is not None
    assert geometry.image_token == 151655
    assert geometry.num_tokens((1, 26, 36)) == 234
    assert geometry.blank_pixels((1, 2, 2))["pixel_values"].shape == (4, 3 * 2 * PUBLISHED[family]["patch_size"] ** 2)


def test_a_vision_config_that_cannot_be_read_is_told() -> None:
    with pytest.raises(ModelError, match=r"the config\.json of a qwen2_vl cannot be read: .*patch_size"):
        geometry_of({"model_type": "qwen2_vl", "vision_config": {"patch_size": "large"}})


def test_the_family_is_found_by_its_type(folder: Path) -> None:
    image_processor = open_image_processor(folder, config_of(folder), ImageLimits())
    assert image_processor is not None
    assert image_processor.placeholder == "<|image_pad|>"
    assert image_processor.plain_prompt("What? <|image_pad|>", "<s>") == "<s>What? <|image_pad|>"
