"""Families with tiles of one size show images as their own processors do: the same tokens, the same pixels, whatever
the size."""

import json
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers import ProcessorMixin

from finefit.data.image_check import ModelProcessor
from finefit.errors import DataError, ModelError, SpecError
from finefit.spec.data import ImageLimits
from finefit.vision import geometry_of, open_image_processor
from finefit.vision.family import ImageInput, ImageProcessor
from tests.vision_models import PATCH, SIDE, ask, digit_image, make_vlm, vlm_inputs, vlm_processor

FAMILIES = ("llava", "llava_next", "idefics3", "smolvlm", "gemma3", "paligemma")
FIXED = ("llava", "gemma3", "paligemma")
CUT = ("llava_next", "idefics3", "smolvlm")
WIDE, TALL, SMALL = (
    digit_image(digit, size=size, seed=digit) for digit, size in ((3, (64, 40)), (8, (33, 56)), (5, (20, 20)))
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_vlm(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def change_settings(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def opened(folder: Path, **limits: int) -> ImageProcessor:
    image_processor = open_image_processor(folder, config_of(folder), ImageLimits(**limits))
    assert image_processor is not None
    return image_processor


def our_tokens(
    image_processor: ImageProcessor, processor: ProcessorMixin, question: str, images: Sequence[PIL.Image.Image]
) -> list[int]:
    """As the renderer has them: the template's text, each mark replaced by what stands for its image."""
    tokenizer, text = processor.tokenizer, ask(processor, question, images=len(images))
    bos = tokenizer.bos_token or ""
    if processor.chat_template is None:
        text = image_processor.plain_prompt(image_processor.placeholder * len(images) + question, bos)
    elif not text.startswith(bos):
        text = bos + text
    first, *rest = text.split(image_processor.placeholder)
    assert len(rest) == len(images)
    whole = first + "".join(image_processor.text(image.size) + after for image, after in zip(images, rest, strict=True))
    tokens: list[int] = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("images", [[WIDE], [TALL, WIDE], [SMALL, SMALL]], ids=["one", "two sizes", "one twice"])
def test_tokens_and_pixels_are_those_of_the_processor(
    folders: dict[str, Path], family: str, images: list[PIL.Image.Image]
) -> None:
    image_processor, processor = opened(folders[family]), vlm_processor(folders[family])
    expected = vlm_inputs(processor, "Which?", images)
    assert our_tokens(image_processor, processor, "Which?", images) == expected["input_ids"][0].tolist()
    found = np.concatenate([image_processor.pixels(image)["pixel_values"] for image in images])
    if family == "llava_next":  # padded with blank tiles to the image that has most
        real = [
            values[: len(image_processor.pixels(image)["pixel_values"])]
            for values, image in zip(expected["pixel_values"].numpy(), images, strict=True)
        ]
        assert np.array_equal(found, np.concatenate(real))
    else:
        assert np.array_equal(found, expected["pixel_values"].numpy().reshape(found.shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_known_from_the_config_alone_holds_for_real_images(folders: dict[str, Path], family: str) -> None:
    image_processor, geometry = opened(folders[family]), geometry_of(config_of(folders[family]))
    assert geometry == image_processor.geometry
    for image in (WIDE, TALL, SMALL):
        grid, pixels = image_processor.grid(image.size), image_processor.pixels(image)
        blank = image_processor.geometry.blank_pixels(grid)
        assert {name: (values.shape, values.dtype) for name, values in blank.items()} == {
            n: (v.shape, v.dtype) for n, v in pixels.items()
        }
        assert not any(values.any() for values in blank.values())


@pytest.mark.parametrize("family", CUT)
def test_images_of_any_size_are_cut_as_the_processor_cuts_them(folders: dict[str, Path], family: str) -> None:
    image_processor, processor = opened(folders[family]), vlm_processor(folders[family])
    chance = random.Random(0)
    sizes = [(1, 1), (400, 3), (3, 400), (SIDE, SIDE), (2 * SIDE + 1, SIDE)] + [
        (chance.randrange(1, 300), chance.randrange(1, 300)) for _ in range(60)
    ]
    for size in sizes:
        image = PIL.Image.new("RGB", size)
        grid = image_processor.grid(size)
        assert (
            image_processor.pixels(image)["pixel_values"].shape
            == image_processor.geometry.blank_pixels(grid)["pixel_values"].shape
        ), size
        expected = vlm_inputs(processor, "Which?", [image])["input_ids"][0].tolist()
        assert expected.count(image_processor.geometry.image_token) == image_processor.geometry.num_tokens(grid), size
        assert our_tokens(image_processor, processor, "Which?", [image]) == expected, size


def test_tiles_are_counted_where_the_longest_side_is_no_multiple_of_them(tmp_path: Path) -> None:
    folder = make_vlm("idefics3", tmp_path)
    change_settings(folder, {"size": {"longest_edge": 3 * SIDE + 9}})
    image_processor, chance = opened(folder), random.Random(1)
    for size in [(chance.randrange(1, 200), chance.randrange(1, 200)) for _ in range(60)]:
        found = image_processor.pixels(PIL.Image.new("RGB", size))["pixel_values"].shape
        assert found == image_processor.geometry.blank_pixels(image_processor.grid(size))["pixel_values"].shape, size


def test_an_image_that_is_not_split_is_one_tile(tmp_path: Path) -> None:
    folder = make_vlm("smolvlm", tmp_path)
    change_settings(folder, {"do_image_splitting": False})
    image_processor, processor = opened(folder), vlm_processor(folder)
    assert image_processor.grid(WIDE.size) == (0, 0)
    assert (
        our_tokens(image_processor, processor, "Which?", [WIDE])
        == vlm_inputs(processor, "Which?", [WIDE])["input_ids"][0].tolist()
    )
    with pytest.raises(SpecError, match="no effect"):
        opened(folder, max_pixels=SIDE**2)


# limits


@pytest.mark.parametrize("family", FIXED)
@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels"])
def test_a_limit_of_pixels_is_refused_where_it_has_no_effect(folders: dict[str, Path], family: str, limit: str) -> None:
    with pytest.raises(
        SpecError,
        match=rf"data\.images\.{limit} would have no effect: this model sees every image as {SIDE} x {SIDE} pixels",
    ):
        opened(folders[family], **{limit: 1000})


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_tiles_stay_within_the_limit_of_pixels(folders: dict[str, Path], family: str) -> None:
    usual, limited = opened(folders[family]), opened(folders[family], max_pixels=2 * SIDE**2)
    assert usual.grid(SMALL.size) == (2, 2)
    assert limited.grid(SMALL.size) == (0, 0)  # two by two are too many, and one tile is shown once
    assert usual.grid((90, 20)) == limited.grid((90, 20)) == (1, 2)  # a long image may have as many
    for image in (WIDE, TALL, SMALL):
        tiles = limited.pixels(image)["pixel_values"]
        assert len(tiles) * SIDE**2 <= 2 * SIDE**2
        assert tiles.shape == limited.geometry.blank_pixels(limited.grid(image.size))["pixel_values"].shape
    assert usual.identity != limited.identity


def test_a_limit_below_one_tile_and_one_that_scales_up_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(
        SpecError, match=f"max_pixels is {SIDE**2 - 1}, but the smallest image that this model sees has"
    ):
        opened(folders["idefics3"], max_pixels=SIDE**2 - 1)
    with pytest.raises(
        SpecError, match=f"min_pixels would have no effect: this model scales every image to {2 * SIDE} pixels"
    ):
        opened(folders["smolvlm"], min_pixels=10)


def test_only_rectangles_within_the_limits_are_chosen(folders: dict[str, Path]) -> None:
    usual, small, large = (
        opened(folders["llava_next"], **limits)
        for limits in ({}, {"max_pixels": 2 * SIDE**2}, {"min_pixels": 3 * SIDE**2})
    )
    square, long = (60, 60), (128, 60)
    assert usual.grid(square)[:2] == (2, 2)
    assert small.grid(square)[:2] in ((1, 2), (2, 1))
    assert usual.grid(long)[:2] == (1, 2)
    assert large.grid(long)[:2] == (2, 2)
    for image_processor, size in ((small, square), (large, long)):
        assert (
            image_processor.pixels(PIL.Image.new("RGB", size))["pixel_values"].shape
            == image_processor.geometry.blank_pixels(image_processor.grid(size))["pixel_values"].shape
        )
    assert len({usual.identity, small.identity, large.identity}) == 3
    with pytest.raises(SpecError, match=f"they have {2 * SIDE**2}, {4 * SIDE**2} pixels"):
        opened(folders["llava_next"], max_pixels=SIDE**2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grid_of_a_square_is_known_from_the_config_alone(folders: dict[str, Path], family: str) -> None:
    """Where the processor leaves its size as it is."""
    image_processor = opened(folders[family])
    settings = json.loads((folders[family] / "preprocessor_config.json").read_text(encoding="utf-8"))
    side = settings["size"]["longest_edge"] if family in ("idefics3", "smolvlm") else 2 * SIDE
    geometry = geometry_of(config_of(folders[family]))
    assert geometry is not None
    assert geometry.square_grid(side) == image_processor.grid((side, side))
    assert geometry.num_tokens(geometry.square_grid(1)) <= geometry.num_tokens(geometry.square_grid(side))


# batches


def shown(image_processor: ImageProcessor, *images: PIL.Image.Image) -> list[ImageInput]:
    return [ImageInput(image_processor.grid(image.size), image_processor.pixels(image)) for image in images]


def batch_of(image_processor: ImageProcessor, *counts: int) -> tuple[Any, list[int]]:
    """Rows of so many image tokens between two others, padded on the right with the image token itself."""
    rows = [[1, *[image_processor.geometry.image_token] * count, 2] for count in counts]
    width = max(map(len, rows))
    padded = np.array(
        [row + [image_processor.geometry.image_token] * (width - len(row)) for row in rows], dtype=np.int64
    )
    return padded, [len(row) for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_those_of_image_tokens_and_never_of_padding(folders: dict[str, Path], family: str) -> None:
    image_processor = opened(folders[family])
    geometry = image_processor.geometry
    num_wide, num_tall = (geometry.num_tokens(image_processor.grid(image.size)) for image in (WIDE, TALL))
    input_ids, lengths = batch_of(image_processor, num_wide + num_tall, 0, num_tall)
    images = [shown(image_processor, WIDE, TALL), [], shown(image_processor, TALL)]
    extra = geometry.extra(input_ids, lengths, images)
    width = input_ids.shape[1]
    expected = [*range(1, 1 + num_wide + num_tall), *range(2 * width + 1, 2 * width + 1 + num_tall)]
    assert extra.tensors["places_I"].tolist() == expected
    tiles = np.concatenate([image_processor.pixels(image)["pixel_values"] for image in (WIDE, TALL, TALL)])
    assert np.array_equal(extra.tensors["pixel_values"].numpy(), tiles)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_images_has_no_pixels(folders: dict[str, Path], family: str) -> None:
    image_processor = opened(folders[family])
    extra = image_processor.geometry.extra(np.array([[1, 2, 2]]), [2], [[]])
    assert set(extra.tensors) == ({"blocks_BT"} if family == "paligemma" else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_image_tokens_that_do_not_match_the_images_are_an_error_with_both_numbers(
    folders: dict[str, Path], family: str
) -> None:
    image_processor = opened(folders[family])
    num = image_processor.geometry.num_tokens(image_processor.grid(WIDE.size))
    input_ids, lengths = batch_of(image_processor, num, num - 1)
    with pytest.raises(
        DataError, match=f"row 2 of a batch has {num - 1} image tokens, but its 1 images give {num} features"
    ):
        image_processor.geometry.extra(input_ids, lengths, [shown(image_processor, WIDE), shown(image_processor, WIDE)])
    with pytest.raises(DataError, match=f"row 1 of a batch has {num} image tokens, but its 0 images give 0 features"):
        image_processor.geometry.extra(input_ids, lengths, [[], []])


def test_pixels_of_another_shape_than_the_grid_says_are_an_error(folders: dict[str, Path]) -> None:
    image_processor = opened(folders["idefics3"])
    input_ids, lengths = batch_of(image_processor, image_processor.geometry.num_tokens((1, 2)))
    with pytest.raises(DataError, match=r"its grid \(1, 2\)"):
        image_processor.geometry.extra(
            input_ids, lengths, [[ImageInput((1, 2), image_processor.geometry.blank_pixels((2, 2)))]]
        )


def test_each_image_of_gemma_is_a_block_of_its_own(folders: dict[str, Path]) -> None:
    image_processor = opened(folders["gemma3"])
    geometry = image_processor.geometry
    num = geometry.num_tokens((1,))
    one = [geometry.image_token] * num
    rows, images = np.array([[7, *one, 7, *one], [*one, *[7] * (num + 2)]]), [(WIDE, TALL), (TALL,)]
    extra = geometry.extra(rows, [2 * num + 2, num + 2], [shown(image_processor, *several) for several in images])
    assert extra.tensors["blocks_BT"].tolist() == [[-1, *[0] * num, -1, *[1] * num], [*[2] * num, *[-1] * (num + 2)]]


# PaliGemma


def test_only_the_prompt_of_a_row_sees_both_ways(folders: dict[str, Path]) -> None:
    geometry = opened(folders["paligemma"]).geometry
    end = config_of(folders["paligemma"])["text_config"]["eos_token_id"]
    rows = np.array([[5, 6, 7, end], [5, 7, end, 0]])
    trained, asked = geometry.extra(rows, [4, 3], [[], []], prompts=[2, 1]), geometry.extra(rows, [3, 2], [[], []])
    assert trained.tensors["blocks_BT"].tolist() == [[0, 0, -1, -1], [0, -1, -1, -1]]
    assert asked.tensors["blocks_BT"].tolist() == [[0, 0, 0, -1], [0, 0, -1, -1]]
    with pytest.raises(DataError, match="the end of its prompt is unknown"):
        geometry.extra(rows, [3, 3], [[], []])


def test_a_prompt_without_images_begins_with_the_start_and_ends_with_a_newline(folders: dict[str, Path]) -> None:
    assert opened(folders["paligemma"]).plain_prompt("answer en Which?", "<bos>") == "<bos>answer en Which?\n"
    assert opened(folders["paligemma"]).plain_prompt("<image>Which?", "<bos>") == "<image><bos>Which?\n"
    assert opened(folders["llava"]).plain_prompt("<image>Which?", "<s>") == "<s><image>Which?"


# what is wrong with a folder


def test_a_processor_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = make_vlm("gemma3", tmp_path)
    change_settings(folder, {"size": {"height": 16, "width": 16}})
    with pytest.raises(
        ModelError, match=f"makes tiles of 16 x 16 pixels, but the vision tower expects {SIDE} x {SIDE}"
    ):
        opened(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"the image processor of .* cannot be read"):
        opened(folder)


def test_a_tower_that_is_not_known_or_cannot_be_is_refused(folders: dict[str, Path]) -> None:
    config = config_of(folders["llava"])
    with pytest.raises(ModelError, match="the vision tower is of type pixtral"):
        geometry_of(config | {"vision_config": {"model_type": "pixtral"}})
    odd = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 12}
    with pytest.raises(ModelError, match=r"config.json of a llava cannot be read"):
        geometry_of(config | {"vision_config": odd})


_CLIP = {"hidden_size": 1024, "image_size": 336, "model_type": "clip_vision_model"}
_SIGLIP = {"hidden_size": 1152, "model_type": "siglip_vision_model"}
_IDEFICS = {"hidden_size": 1152, "model_type": "idefics3"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], int]] = {
    "llava 1.5": ({"model_type": "llava", "image_token_index": 32000}, _CLIP, (1,), 576),
    "llava 1.6": ({"model_type": "llava_next", "image_token_index": 32000}, _CLIP, (2, 2, 48, 48), 576 + 48 * 49),
    "idefics 3": (
        {"model_type": "idefics3", "image_token_id": 128257},
        _IDEFICS | {"image_size": 364},
        (3, 4),
        13 * 169,
    ),
    "smolvlm": (
        {"model_type": "idefics3", "image_token_id": 49153, "scale_factor": 3},
        _IDEFICS | {"image_size": 384},
        (0, 0),
        81,
    ),
    "gemma 3": ({"model_type": "gemma3", "image_token_index": 262144}, _SIGLIP | {"image_size": 896}, (1,), 256),
    "paligemma": ({"model_type": "paligemma", "image_token_index": 257152}, _SIGLIP | {"image_size": 448}, (1,), 1024),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_that_leave_out_defaults_or_name_the_tower_otherwise_are_read(name: str) -> None:
    config, tower, grid, tokens = PUBLISHED[name]
    geometry = geometry_of(config | {"vision_config": tower | {"num_attention_heads": 16, "patch_size": 14}})
    assert geometry is not None
    assert geometry.num_tokens(grid) == tokens
    assert geometry.image_token == config.get("image_token_id", config.get("image_token_index"))


def test_a_class_token_cannot_be_laid_out_as_a_patch(folders: dict[str, Path]) -> None:
    patches = (SIDE // PATCH) ** 2
    with pytest.raises(ModelError, match=f"gives {patches + 1} features of {patches} patches"):
        geometry_of(config_of(folders["llava_next"]) | {"vision_feature_select_strategy": "full"})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_process_opens_an_equal_processor(folders: dict[str, Path], family: str) -> None:
    image_processor = opened(folders[family])
    factory = ModelProcessor(folders[family], folders[family] / "config.json", ImageLimits())
    other = pickle.loads(pickle.dumps(factory))()
    assert other.identity == image_processor.identity == opened(folders[family]).identity
    assert np.array_equal(other.pixels(TALL)["pixel_values"], image_processor.pixels(TALL)["pixel_values"])
