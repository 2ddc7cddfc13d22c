"""What the Qwen models make of rows with images, against transformers' own forward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from finefit.model.attention import choose_attention, for_answers
from finefit.vision import geometry_of, tower_of, vision_forward_of
from finefit.vision.attention import PIECES
from finefit.vision.family import ImageInput, VisionForward
from tests.qwen_rows import (
    QWENS,
    SMALL,
    TALL,
    WIDE,
    Rows,
    config_of,
    image_processor_of,
    mixed_rows,
    random_images,
    rows_of,
)
from tests.vision_models import make_vlm, vlm_config, vlm_processor

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=QWENS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights large enough that images and their order matter to the answer."""
    folder = make_vlm(request.param, tmp_path_factory.mktemp("vlm") / request.param)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def _load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def _forward(model: Any) -> VisionForward:
    vision_forward = vision_forward_of(model.config)
    assert vision_forward is not None
    return vision_forward


def _read(model: Any, rows: Rows) -> Tensor:
    hidden: Tensor = _forward(model)(model.model, rows.input_ids, rows.extra, use_cache=False).last_hidden_state
    return hidden


def _ours(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    hidden = _read(model, rows)
    logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
    return hidden, cross_entropy(logits, rows.labels[:, 1:].flatten())


def _theirs(model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    hidden = model.model(input_ids=rows.input_ids, use_cache=False, **rows.theirs).last_hidden_state
    return hidden, model(input_ids=rows.input_ids, labels=rows.labels, use_cache=False, **rows.theirs).loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _assert_equal(folder: Path, rows: Rows, mine: Any = None) -> dict[str, Tensor]:
    """Hidden states, loss and all gradients; gives the gradients."""
    mine, reference = mine or _load(folder), _load(folder)
    (hidden, loss), (expected, expected_loss) = _ours(mine, rows), _theirs(reference, rows)
    torch.testing.assert_close(hidden[rows.is_own], expected[rows.is_own], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    (loss + expected_loss).backward()  # type: ignore[no-untyped-call]
    found, wanted = _gradients(mine), _gradients(reference)
    assert sorted(found) == sorted(wanted)
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name} is off by {error:.1e} of its largest gradient"
    return found


def test_padded_rows_with_two_images_one_and_none_are_read_as_by_the_model_itself(folder: Path) -> None:
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    assert len(set(rows.lengths)) == 3
    gradients = _assert_equal(folder, rows)
    assert {tower_of(vision_forward_of(AutoConfig.from_pretrained(folder)), name) for name in gradients} == {  # type: ignore[arg-type]
        "language",
        "vision",
        "projector",
    }
    assert all(
        gradient.abs().max() > 1e-6
        for name, gradient in gradients.items()
        if not name.endswith(("k_proj.bias", "qkv.bias"))
    )


@pytest.mark.parametrize("sizes", [(WIDE,), (SMALL, TALL), (WIDE, WIDE, SMALL)])
def test_one_row_with_any_number_of_images_is_read_as_by_the_model_itself(
    folder: Path, sizes: tuple[tuple[int, int], ...]
) -> None:
    _assert_equal(folder, rows_of(image_processor_of(folder), vlm_processor(folder), ("Which?", random_images(*sizes))))


def test_rows_of_text_alone_are_read_as_by_the_model_itself(folder: Path) -> None:
    rows = rows_of(
        image_processor_of(folder), vlm_processor(folder), ("Short?", []), ("A little longer, this one?", [])
    )
    gradients = _assert_equal(folder, rows)
    assert not any("visual" in name for name in gradients)


def test_rows_of_text_need_nothing_beside_their_tokens(folder: Path) -> None:
    model = _load(folder)
    rows = rows_of(image_processor_of(folder), vlm_processor(folder), ("Short?", []), ("A longer one, this?", []))
    bare = _forward(model)(model.model, rows.input_ids, None, use_cache=False).last_hidden_state
    torch.testing.assert_close(bare[rows.is_own], _read(model, rows)[rows.is_own])


def test_layers_that_are_computed_again_give_the_same_gradients(folder: Path) -> None:
    model = _load(folder)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _assert_equal(folder, mixed_rows(image_processor_of(folder), vlm_processor(folder)), model)


def test_decoding_goes_on_behind_a_prompt_with_images(folder: Path) -> None:
    """Prompts of unequal length with a cache, then tokens one by one, against one pass over everything."""
    model, rows = _load(folder), mixed_rows(image_processor_of(folder), vlm_processor(folder))
    vision_forward = _forward(model)
    tails = torch.tensor([[11, 12, 13], [14, 15, 16], [17, 18, 19]])
    cache = DynamicCache(config=model.config.get_text_config())
    vision_forward(model.model, rows.input_ids, rows.extra, past_key_values=cache, use_cache=True)
    positions, width = torch.tensor(rows.extra.host["next_positions"]).unsqueeze(1), rows.input_ids.shape[1]
    found = []
    for step in range(3):
        own = torch.cat([rows.is_own, torch.ones(3, step + 1, dtype=torch.bool)], dim=1)[:, None, None]
        told = {"position_ids": positions + step, "attention_mask": own, "past_key_values": cache, "use_cache": True}
        found.append(vision_forward(model.model, tails[:, step : step + 1], None, **told).last_hidden_state)
    assert cache.get_seq_length() == width + 3
    for row, length in enumerate(rows.lengths):
        whole = torch.cat([rows.input_ids[row, :length], tails[row]])[None]
        torch.testing.assert_close(
            torch.cat(found, dim=1)[row], _alone(model, rows, row, whole)[0, length:], rtol=1e-5, atol=1e-5
        )


def _alone(model: Any, rows: Rows, row: int, whole: Tensor) -> Tensor:
    """By the model's own forward."""
    firsts, counts = (0, 2, 3), (2, 1, 0)
    grids = rows.theirs["image_grid_thw"][firsts[row] : firsts[row] + counts[row]]
    if not counts[row]:
        return _hidden(model, input_ids=whole)
    patches = rows.theirs["image_grid_thw"].prod(1)
    before = int(patches[: firsts[row]].sum())
    pixels = rows.theirs["pixel_values"][before : before + int(grids.prod(1).sum())]
    types = (whole == model.config.image_token_id).int()
    return _hidden(model, input_ids=whole, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types)


def _hidden(model: Any, **given: Tensor) -> Tensor:
    hidden: Tensor = model.model(use_cache=False, **given).last_hidden_state
    return hidden


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_every_operation_has_a_form_that_gives_the_same_bits_again(folder: Path) -> None:
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    seen = []
    for _ in range(2):
        model = _load(folder)
        _ours(model, rows)[1].backward()  # type: ignore[no-untyped-call]
        seen.append(_gradients(model))
    assert all(torch.equal(gradient, seen[1][name]) for name, gradient in seen[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rehearsal_passes_forward_and_backward_on_fake_tensors(folder: Path, dtype: torch.dtype) -> None:
    """Shapes without values: whatever waits for the device fails here."""
    config = AutoConfig.from_pretrained(folder)
    vision_forward, geometry = vision_forward_of(config), geometry_of(config_of(folder))
    assert vision_forward is not None
    assert geometry is not None
    grids = [(1, 6, 12), (1, 12, 6)]
    tokens = sum(geometry.num_tokens(grid) for grid in grids)
    ids = np.full((2, 50), 9)
    ids[:, :tokens] = geometry.image_token
    extra = geometry.extra(ids, [50, 50], [[ImageInput(grid, geometry.blank_pixels(grid)) for grid in grids]] * 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        faked = extra.moved(torch.empty_like)
        hidden = vision_forward(
            model.model, torch.empty(2, 50, dtype=torch.long), faked, use_cache=False
        ).last_hidden_state
        hidden.sum().backward()
    assert tuple(hidden.shape) == (2, 50, config.get_text_config().hidden_size)
    assert not [name for name, parameter in model.model.named_parameters() if parameter.grad is None]


def test_half_precision_under_autocast_comes_close(folder: Path) -> None:
    rows, model = mixed_rows(image_processor_of(folder), vlm_processor(folder)), _load(folder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, loss = _ours(model, rows)
    exact = _theirs(_load(folder), rows)[1]
    torch.testing.assert_close(loss.detach(), exact.detach(), rtol=0.02, atol=0)
    assert hidden.isfinite().all()


def test_every_parameter_belongs_to_one_tower(folder: Path) -> None:
    model = _load(folder)
    for name, _ in model.named_parameters():
        expected = "projector" if "merger" in name else "vision" if "visual" in name else "language"
        assert tower_of(_forward(model), name) == expected, name


def test_only_the_tower_attends_by_piece(folder: Path) -> None:
    model, rows = _load(folder), mixed_rows(image_processor_of(folder), vlm_processor(folder))
    _read(model, rows)
    assert model.config.vision_config._attn_implementation == "sdpa" + PIECES
    assert model.config.text_config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert "_deepstack_process" not in vars(model.model.language_model)


@pytest.mark.parametrize("attention", ["eager", "sdpa_repeated", "sdpa_grouped"])
def test_whatever_attention_a_model_was_loaded_with_its_tower_sees_the_same(folder: Path, attention: str) -> None:
    assert choose_attention("cuda", (7, 5), "fp16", AutoConfig.from_pretrained(folder)) == "sdpa_repeated"
    assert for_answers("sdpa") == "sdpa_grouped"
    rows, model = mixed_rows(image_processor_of(folder), vlm_processor(folder)), _load(folder)
    other = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    torch.testing.assert_close(_read(other, rows)[rows.is_own], _read(model, rows)[rows.is_own], rtol=1e-5, atol=1e-5)
    assert other.config.vision_config._attn_implementation == attention + PIECES


def test_a_mixture_of_experts_sees_as_the_dense_model_does(tmp_path: Path) -> None:
    dense = vlm_config("qwen3_vl").to_dict()
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    text = dense["text_config"] | experts | {"model_type": "qwen3_vl_moe_text"}
    vision = dense["vision_config"] | {"model_type": "qwen3_vl_moe_vision"}
    folder = make_vlm("qwen3_vl", tmp_path / "moe")
    rows = mixed_rows(image_processor_of(folder), vlm_processor(folder))
    changed = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**dense | changed))
    expected, loss = _theirs(model, rows)
    hidden, own_loss = _ours(model, rows)
    torch.testing.assert_close(hidden[rows.is_own], expected[rows.is_own], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-5)
