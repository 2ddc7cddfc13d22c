"""What families with tiles of one size make of a padded batch is what transformers makes of each row alone: hidden
states, loss, gradients."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoTokenizer, DynamicCache

from finefit.objective.batch import Extra
from finefit.spec.data import ImageLimits
from finefit.vision import open_image_processor, tower_of, vision_forward_of
from finefit.vision.family import ImageInput, ImageProcessor
from tests.vision_models import digit_image, make_vlm, vlm_config, vlm_processor

torch.set_num_threads(1)

WIDE, TALL, FLAT = (
    digit_image(digit, size=size, seed=digit) for digit, size in ((3, (64, 40)), (8, (33, 56)), (5, (60, 25)))
)
FAMILIES = ("llava", "llava_next", "idefics3", "smolvlm", "gemma3", "paligemma")
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llava with all of the tower": ("llava", {"vision_feature_layer": -1}),
    "llava with two layers and the class token": (
        "llava",
        {"vision_feature_layer": [0, -2], "vision_feature_select_strategy": "full"},
    ),
    "llava with SigLIP": ("llava", {**SIGLIP, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "llava_next with SigLIP": ("llava_next", {**SIGLIP, "vision_feature_select_strategy": "full"}),
    "gemma3 with a window smaller than an image": ("gemma3", {"text_config": {"sliding_window": 3}}),
    "paligemma 2": (
        "paligemma",
        {
            "text_config": {
                "model_type": "gemma2",
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 16,
            }
        },
    ),
}


@dataclass(frozen=True)
class Row:
    prompt: str
    """With marks."""
    answer: str
    images: tuple[PIL.Image.Image, ...] = ()


ROWS = (
    Row("First MARK then MARK, which?", "three", (WIDE, TALL)),
    Row("No image here.", "right"),
    Row("MARKRead.", "it is a five", (FLAT,)),
)


@dataclass(frozen=True)
class Case:
    family: str
    folder: Path
    image_processor: ImageProcessor
    tokenizer: Any
    model: Any
    rows: tuple[Row, ...] = ()

    @property
    def vision_forward(self) -> Any:
        return vision_forward_of(self.model.config)

    @cached_property
    def tokens(self) -> list[tuple[list[int], list[int]]]:
        """Of prompt and answer."""
        return [self._tokens(row) for row in self.rows]

    def _tokens(self, row: Row) -> tuple[list[int], list[int]]:
        first, *rest = self.image_processor.plain_prompt(
            row.prompt.replace("MARK", self.image_processor.placeholder), self.tokenizer.bos_token or ""
        ).split(self.image_processor.placeholder)
        text = first + "".join(
            self.image_processor.text(image.size) + after for image, after in zip(row.images, rest, strict=True)
        )
        prompt, answer = (
            self.tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in (text, row.answer + self.tokenizer.eos_token)
        )
        return prompt, answer


Cases = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    @cache
    def case_of(name: str) -> Case:
        family, changes = VARIANTS[name]
        return opened(make_vlm(family, tmp_path_factory.mktemp(family), **changes))

    return case_of


def opened(folder: Path) -> Case:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    image_processor = open_image_processor(folder, config, ImageLimits())
    assert image_processor is not None
    is_capped = config["text_config"].get("model_type") == "gemma2"  # its scores are capped, which SDPA leaves out
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager" if is_capped else "sdpa")
    return Case(config["model_type"], folder, image_processor, AutoTokenizer.from_pretrained(folder), model, ROWS)


def shown(case: Case) -> list[list[ImageInput]]:
    return [
        [ImageInput(case.image_processor.grid(image.size), case.image_processor.pixels(image)) for image in row.images]
        for row in case.rows
    ]


def padded(case: Case, *, with_answers: bool = True) -> tuple[Tensor, Extra]:
    sequences = [prompt + answer if with_answers else prompt for prompt, answer in case.tokens]
    input_ids = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for at, sequence in enumerate(sequences):
        input_ids[at, : len(sequence)] = sequence
    prompts = [len(prompt) for prompt, _ in case.tokens] if with_answers else None
    return torch.from_numpy(input_ids), case.image_processor.geometry.extra(
        input_ids, [len(sequence) for sequence in sequences], shown(case), prompts
    )


def theirs(case: Case, at: int) -> Tensor:
    """Hidden states of one row by the model's own forward."""
    row, (prompt, answer) = case.rows[at], case.tokens[at]
    input_ids = torch.tensor([prompt + answer])
    given: dict[str, Tensor] = {}
    if row.images:
        image_processor = vlm_processor(case.folder).image_processor
        nested: Any = [list(row.images)] if case.family in ("idefics3", "smolvlm") else list(row.images)
        given = {
            name: value
            for name, value in image_processor(nested, return_tensors="pt").items()
            if name in ("pixel_values", "image_sizes")
        }
    if case.family == "gemma3":
        given["token_type_ids"] = (input_ids == case.image_processor.geometry.image_token).long()
    if case.family == "paligemma":
        given["token_type_ids"] = torch.tensor([[0] * len(prompt) + [1] * len(answer)])
    hidden: Tensor = case.model.model(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **given
    ).last_hidden_state
    return hidden[0]


def ours(case: Case) -> list[Tensor]:
    input_ids, extra = padded(case)
    hidden = case.vision_forward(case.model.model, input_ids, extra, use_cache=False).last_hidden_state
    return [hidden[at, : len(prompt) + len(answer)] for at, (prompt, answer) in enumerate(case.tokens)]


def loss_of(case: Case, hidden: Sequence[Tensor]) -> Tensor:
    losses = []
    for (prompt, answer), states in zip(case.tokens, hidden, strict=True):
        losses.append(
            cross_entropy(case.model.lm_head(states[len(prompt) - 1 : -1]), torch.tensor(answer), reduction="sum")
        )
    return torch.stack(losses).sum()


def gradients(case: Case, loss: Tensor) -> dict[str, Tensor]:
    case.model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: value.grad.clone() for name, value in case.model.named_parameters() if value.grad is not None}


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max()) <= 1e-5 * max(float(expected.abs().max()), 1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_padded_batch_equals_transformers_row_by_row(case_of: Cases, name: str) -> None:
    case = case_of(name)
    found, expected = ours(case), [theirs(case, at) for at in range(len(ROWS))]
    assert len({len(states) for states in found}) == 3
    for ours_of_row, theirs_of_row in zip(found, expected, strict=True):
        assert close(ours_of_row, theirs_of_row)
    loss, reference = loss_of(case, found), loss_of(case, expected)
    assert close(loss, reference)
    made, wanted = gradients(case, loss), gradients(case, reference)
    assert made.keys() == wanted.keys()
    assert not [name for name in made if not close(made[name], wanted[name])]
    towers = {tower_of(case.vision_forward, name) for name in made if made[name].any()}
    assert towers == {"vision", "projector", "language"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_text_alone_equals_transformers(case_of: Cases, family: str) -> None:
    text = (Row("Two words.", "yes"), Row("Somewhat longer, without an image.", "no, not one"))
    case = replace(case_of(family), rows=text)
    for at, found in enumerate(ours(case)):
        assert close(found, theirs(case, at))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_behind_a_prompt_in_the_cache_is_read_as_in_one_piece(case_of: Cases, name: str) -> None:
    for row in ROWS:
        case = replace(case_of(name), rows=(row,))
        _, answer = case.tokens[0]
        prompt, extra = padded(case, with_answers=False)
        cache = DynamicCache(config=case.model.config.get_text_config())
        with torch.no_grad():
            case.vision_forward(case.model.model, prompt, extra, use_cache=True, past_key_values=cache)
            followed = [
                case.vision_forward(
                    case.model.model, torch.tensor([[token]]), None, use_cache=True, past_key_values=cache
                ).last_hidden_state[0]
                for token in answer
            ]
            assert close(torch.cat(followed), theirs(case, 0)[-len(answer) :])


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_positions_are_given_from_zero_whatever_the_family_begins_with(case_of: Cases, family: str) -> None:
    case = replace(case_of(family), rows=ROWS[:1])
    input_ids, extra = padded(case)
    positions_1T = torch.arange(input_ids.shape[1])[None]
    turned: list[Tensor] = []
    layer = case.model.model.language_model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _, __, named: turned.append(named["position_ids"]), with_kwargs=True)
    with torch.no_grad():
        case.vision_forward(case.model.model, input_ids, extra, use_cache=False)
        case.vision_forward(case.model.model, input_ids, extra, use_cache=False, position_ids=positions_1T)
        theirs(case, 0)
    hook.remove()
    assert all(positions.equal(turned[-1]) for positions in turned)
    assert int(turned[-1][0, 0]) == (family == "paligemma")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_rehearsal_reads_the_same_batch_in_fake_tensors(case_of: Cases, name: str) -> None:
    case = case_of(name)
    input_ids, extra = padded(case)
    family, changes = VARIANTS[name]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            vlm_config(family, **changes), attn_implementation=case.model.config._attn_implementation
        )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        fake = extra.moved(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        output = case.vision_forward(
            model.model, torch.empty(input_ids.shape, dtype=torch.int64), fake, use_cache=False
        )
        output.last_hidden_state.sum().backward()
        assert output.last_hidden_state.shape == (*input_ids.shape, model.config.get_text_config().hidden_size)
        reached = {
            tower_of(case.vision_forward, name) for name, value in model.named_parameters() if value.grad is not None
        }
        assert reached == {"vision", "projector", "language"}


def test_a_tower_is_computed_only_as_far_as_it_is_used(case_of: Cases) -> None:
    case = case_of("llava")
    passed: list[int] = []
    layers = enumerate(case.model.model.vision_tower.encoder.layers)
    hooks = [layer.register_forward_hook(lambda *_, number=number: passed.append(number)) for number, layer in layers]
    ours(case)
    for hook in hooks:
        hook.remove()
    assert passed == [0]  # of two, since the usual features are those before the last


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_belongs_to_a_tower(case_of: Cases, family: str) -> None:
    case = case_of(family)
    belongs = {name: tower_of(case.vision_forward, name) for name, _ in case.model.named_parameters()}
    assert None not in belongs.values()
    assert (
        belongs["lm_head.weight" if "lm_head.weight" in belongs else next(n for n in belongs if "embed_tokens" in n)]
        == "language"
    )
    if family == "llava_next":
        assert belongs["model.image_newline"] == "projector"


def test_an_image_token_beyond_the_vocabulary_is_read(tmp_path: Path) -> None:
    """As in PaliGemma's first releases: its embedding does not exist and is never wanted."""
    beyond = vlm_config("paligemma").get_text_config().vocab_size + 3
    case = opened(make_vlm("paligemma", tmp_path))
    input_ids, extra = padded(case)
    with torch.no_grad():
        expected = case.vision_forward(case.model.model, input_ids, extra, use_cache=False).last_hidden_state
        replaced = input_ids.masked_fill(input_ids == case.model.config.image_token_id, beyond)
        case.model.config.image_token_id = beyond
        assert case.vision_forward(case.model.model, replaced, extra, use_cache=False).last_hidden_state.equal(expected)


def test_what_an_answer_says_is_not_seen_by_its_prompt(case_of: Cases) -> None:
    """PaliGemma's prompt sees both ways; an answer that it saw would be known in advance."""
    case = case_of("paligemma")
    input_ids, extra = padded(case)
    changed = input_ids.clone()
    prompt, answer = case.tokens[0]
    changed[0, len(prompt) : len(prompt) + len(answer)] += 1
    with torch.no_grad():
        one, other = (
            case.vision_forward(case.model.model, ids, extra, use_cache=False).last_hidden_state[0]
            for ids in (input_ids, changed)
        )
    assert one[: len(prompt)].equal(other[: len(prompt)])
    assert not one[len(prompt) :].equal(other[len(prompt) :])
