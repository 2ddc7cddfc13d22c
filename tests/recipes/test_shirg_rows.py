"""The rows of shirg/twin are readable, balanced and disjoint; recipe and twin are one method in two sizes, with
adapters where SHIRG has them."""

import io
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from safetensors.torch import save_file

from finefit.artifacts.forecasts import Forecast
from finefit.custom.model import build_custom, custom_family_of, load_custom_weights
from finefit.model.resolve_model import custom_source
from finefit.plan.client import forecast
from finefit.plan.stage_forecasts import row_lengths
from finefit.spec.load import load_any, load_spec
from finefit.spec.models import CustomModel, FolderModel, Lora
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Spec
from finefit.spec.stages import TrainStage

RECIPES = Path(__file__).parents[2] / "src" / "finefit" / "recipes"
DOCUMENT = Path(__file__).parents[2] / "docs" / "shirg.md"
FOLDER = RECIPES / "shirg"
NUM_ROWS = {"ink-train": 300, "ink-test": 50, "chalk-train": 300, "chalk-test": 100}
ADAPTED = {
    *(
        f"vision.encoder.layers.{layer}.self_attn.{part}_proj"
        for layer in range(6)
        for part in ("qkv" if layer < 4 else "qk")
    ),
    *("projector.0", "projector.2"),
}


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    return tuple(map(json.loads, (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()))


@cache
def images() -> dict[str, bytes]:
    with zipfile.ZipFile(FOLDER / "digits.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def stage(name: str) -> TrainStage:
    pipeline = load_any(FOLDER / "twin.yaml")
    assert isinstance(pipeline, Pipeline)
    found = pipeline.stages[name]
    assert isinstance(found, TrainStage)
    return found


def full() -> Spec:
    return load_spec(FOLDER / "spec.yaml")


def model_of(spec: Spec | TrainStage) -> CustomModel:
    assert isinstance(spec.model, CustomModel)
    return spec.model


def test_every_digit_is_drawn_equally_often_and_no_image_twice() -> None:
    assert {name: len(rows(name)) for name in NUM_ROWS} == NUM_ROWS
    for name, count in NUM_ROWS.items():
        assert Counter(row["answer"] for row in rows(name)) == dict.fromkeys("0123456789", count // 10)
    named = [row["image"] for name in NUM_ROWS for row in rows(name)]
    assert sorted(named) == sorted(images())
    assert len(set(images().values())) == len(images())
    assert (FOLDER / "digits.zip").stat().st_size < 300_000


def test_ink_is_dark_on_light_and_chalk_light_on_dark() -> None:
    for name, content in images().items():
        corner = PIL.Image.open(io.BytesIO(content)).convert("L").getpixel((0, 0))
        assert isinstance(corner, int | float)
        assert (corner > 127) == name.startswith("ink"), name


@pytest.mark.parametrize("size", ["full", "twin"])
def test_adapters_lie_on_the_18_layers_that_shirg_names_and_nowhere_else(size: str) -> None:
    tuning = full().tuning if size == "full" else stage("chalk").tuning
    model = model_of(full()) if size == "full" else model_of(stage("ink"))
    own = custom_family_of(build_custom(custom_source(model, FOLDER), device="meta"))
    assert own is not None
    assert isinstance(tuning, Lora)
    assert own.adapter_layers(tuning) == ADAPTED


def test_the_twin_keeps_as_large_a_share_of_the_patches() -> None:
    big, small = (model_of(found).config for found in (full(), stage("ink")))
    assert big["keep"] / (big["side"] // 14) ** 2 == pytest.approx(small["keep"] / (small["side"] // 8) ** 2, abs=0.02)
    assert [big[key] for key in ("score", "token_dropout")] == [small[key] for key in ("score", "token_dropout")]


def test_every_data_set_has_its_metric() -> None:
    spec = full()
    found = {source: evaluation.label for evaluation in spec.evaluate for source in evaluation.sources}
    assert found == {
        "chartqa": "relaxed_accuracy",
        "docvqa": "anls",
        "infovqa": "anls",
        "textvqa": "vqa_accuracy",
        "vqav2": "vqa_accuracy",
        "ocrvqa": "exact_match",
    }
    assert len(spec.data.train) == len(spec.data.test_sources()) == 6


@cache
def planned() -> Forecast:
    """Without the weights, and with the tokenizer of the twin: where rows are not there, every row is planned in full
    length."""
    spec = full()
    tokenizer: dict[str, Any] = {"tokenizer": FolderModel(kind="folder", path=str(FOLDER / "tokenizer"))}
    spec = spec.model_copy(update={"model": model_of(spec).model_copy(update=tokenizer)})
    (found,) = forecast(spec, FOLDER, (spec.card,), row_lengths(spec, FOLDER))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_full_size_fits_on_eight_cards_of_40_gb_and_trains_3_2_million_parameters() -> None:
    found = planned()
    assert (found.card, found.devices, found.fits) == ("8xA100-40GB", 8, True)
    assert found.trainable_parameters == 16 * 64 * 2 * 1152 + 64 * (1152 + 4096) + 64 * 2 * 4096 == 3_219_456
    assert found.gradients.unreached == ()
    assert found.gradients.trainable == 2 * len(ADAPTED)
    assert found.lengths.longest == 256


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_document_tells_what_the_plan_finds() -> None:
    found, text = planned(), DOCUMENT.read_text(encoding="utf-8")
    assert f"**{found.peak_bytes / 2**30:.1f} of {found.budget_bytes / 2**30:.1f} GiB**" in text
    assert f"micro_batch {found.levers.micro_batch}, accumulated {found.accumulation} times" in text
    assert f"{found.parameters:,} parameters, {found.trainable_parameters:,} of them trained" in text
    assert f"{found.components['weights'] / 2**30:.1f} GiB of it are weights" in text


def test_weights_by_the_names_of_lavida_are_put_where_they_belong(tmp_path: Path) -> None:
    """By the code that docs/shirg.md gives, on invented weights in LaViDa's names."""
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    theirs = {
        "vision": "model.vision_tower.vision_tower.vision_model",
        "projector": "model.mm_projector",
        "transformer": "model.transformer",
    }
    there, here = (
        build_custom(custom_source(model_of(stage("ink")), FOLDER), device="cpu", seed=seed) for seed in (1, 2)
    )
    named = {
        f"{theirs[name.partition('.')[0]]}.{name.partition('.')[2]}": tensor
        for name, tensor in there.state_dict().items()
    }
    named |= {"model.image_newline": torch.ones(3), f"{theirs['vision']}.post_layernorm.weight": torch.ones(3)}
    (tmp_path / "theirs").mkdir()
    save_file(named, tmp_path / "theirs" / "model-00001-of-00001.safetensors")
    subprocess.run([sys.executable, "-c", code[1], "theirs", "ours"], cwd=tmp_path, check=True)
    load_custom_weights(here, tmp_path / "ours")
    for mine, wanted in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(mine, wanted)
