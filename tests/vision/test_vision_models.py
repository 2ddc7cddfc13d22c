"""The tiny vision-language models are whole, see their images, and are the same each time; the reading task can be
read."""

from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.utils import is_torchvision_available

from finefit.data.images import decode
from finefit.data.rows import Row
from finefit.data.sources import open_source
from finefit.spec.data import Source
from tests.vision_models import (
    FAMILIES,
    ask,
    digit_image,
    make_vlm,
    vlm_config,
    vlm_inputs,
    vlm_processor,
    write_reading_task,
)

WIDE, TALL = digit_image(3, size=(64, 40), seed=1), digit_image(8, size=(33, 56), seed=2)
WHOLE = ("llava", "llava_next", "gemma3", "paligemma")
"""The families that AutoProcessor loads without torchvision."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_vlm(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def _logits(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_folder_agree(folders: dict[str, Path], family: str) -> None:
    config, tokenizer = AutoConfig.from_pretrained(folders[family]), AutoTokenizer.from_pretrained(folders[family])
    processor = vlm_processor(folders[family])
    text = config.get_text_config()
    assert config.model_type == family
    assert len(tokenizer) == len(processor.tokenizer) == text.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        text.bos_token_id,
        text.eos_token_id,
        text.pad_token_id,
    )
    assert (processor.chat_template is None) == (tokenizer.chat_template is None) == (family == "paligemma")
    assert tokenizer.decode(tokenizer.encode("Größe: 7", add_special_tokens=False)) == "Größe: 7"
    ids = vlm_inputs(processor, "Which?", [WIDE])["input_ids"][0].tolist()
    named = {
        name: getattr(config, name)
        for name in ("image_token_id", "vision_start_token_id", "boi_token_id", "eoi_token_id")
        if hasattr(config, name)
    }
    assert all(found in ids for found in named.values()), named
    assert tokenizer.bos_token_id is None or ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # PaliGemma's processor makes numpy of torch tensors
def test_a_processor_of_parts_is_the_one_that_autoprocessor_loads(folders: dict[str, Path], family: str) -> None:
    whole, parts = AutoProcessor.from_pretrained(folders[family], backend="pil"), vlm_processor(folders[family])
    text = ask(parts, "Which?", images=2)
    assert type(whole) is type(parts)
    assert text == ask(whole, "Which?", images=2)
    one, other = (processor(text=[text], images=[[WIDE, TALL]], return_tensors="pt") for processor in (whole, parts))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WHOLE])
def test_autoprocessor_still_asks_for_torchvision_where_images_need_none(folders: dict[str, Path], family: str) -> None:
    with pytest.raises(
        (ImportError, ValueError), match=r"(?i)torchvision"
    ):  # once this fails, vlm_processor need not make parts of this family
        AutoProcessor.from_pretrained(folders[family], backend="pil")


def test_the_families_keep_what_tells_them_apart(folders: dict[str, Path]) -> None:
    seen: dict[str, Any] = {
        family: vlm_inputs(vlm_processor(folders[family]), "Which?", [WIDE, TALL]) for family in FAMILIES
    }
    assert vlm_config("qwen2_5_vl").vision_config.fullatt_block_indexes == [1]
    assert vlm_config("qwen3_vl").vision_config.deepstack_visual_indexes == [0]
    assert vlm_config("gemma3").text_config.layer_types == ["sliding_attention", "full_attention"]
    assert seen["qwen2_vl"]["image_grid_thw"].tolist() == [[1, 4, 8], [1, 8, 4]]
    assert seen["idefics3"]["pixel_values"].shape[1] == seen["smolvlm"]["pixel_values"].shape[1] == 2 * (4 + 1)
    assert seen["llava_next"]["pixel_values"].shape[:2] == (2, 4 + 1)
    assert seen["gemma3"]["input_ids"].shape[1] > vlm_config("gemma3").text_config.sliding_window


def test_a_changed_configuration_holds_for_the_processor_too(tmp_path: Path) -> None:
    folder = make_vlm("llava", tmp_path, vision_config={"image_size": 48}, text_config={"num_hidden_layers": 3})
    inputs = vlm_inputs(vlm_processor(folder), "Which?", [WIDE])
    config = AutoConfig.from_pretrained(folder)
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (3, 64)
    assert (inputs["input_ids"] == config.image_token_id).sum() == 36
    assert _logits(folder, inputs).isfinite().all()


def _ink(image: PIL.Image.Image) -> tuple[int, int, int, int]:
    box = image.convert("L").point(lambda value: 255 * (value < 150)).getbbox()
    assert box is not None
    return box


@pytest.mark.parametrize("size", [(32, 32), (64, 33), (40, 56)])
def test_digits_are_whole_seeded_and_differ_in_place_size_and_colour(size: tuple[int, int]) -> None:
    images = [digit_image(7, size=size, seed=seed) for seed in range(20)]
    boxes = [_ink(image) for image in images]
    assert all(image.size == size and image.mode == "RGB" for image in images)
    assert (
        images[4].tobytes()
        == digit_image(7, size=size, seed=4).tobytes()
        != digit_image(1, size=size, seed=4).tobytes()
    )
    shapes = {round((right - left) / (bottom - top), 1) for left, top, right, bottom in boxes}
    assert max(shapes) - min(shapes) < 0.25  # one that was cut at an edge would be another shape
    assert len({box[:2] for box in boxes}) > 10
    assert len({box[3] - box[1] for box in boxes}) > 3
    assert len({image.getpixel((0, 0)) for image in images}) > 10


def test_the_reading_task_is_read_with_its_images(tmp_path: Path) -> None:
    for name in ("train", "test"):
        path = write_reading_task(tmp_path, rows=20, seed=0, name=name)
        rows = [row for row in open_source(Source(path=path.name), tmp_path, split=name).rows() if isinstance(row, Row)]
        assert sorted(row.answer for row in rows) == sorted("0123456789" * 2)
        assert all(len(row.images) == 1 for row in rows)
        assert len({decode(row.images[0]).size for row in rows}) > 10
    text = (tmp_path / "train.jsonl").read_text()
    assert text != (tmp_path / "test.jsonl").read_text()
    assert len(list((tmp_path / "images").iterdir())) == 40
    assert text == write_reading_task(tmp_path, rows=20, seed=0, name="train").read_text()
