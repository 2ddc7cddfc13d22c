"""Checkpoints whose weights are stored packed: trained on as they are, or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from finefit.artifacts.records import Levers
from finefit.errors import ModelError
from finefit.model.load import counts, load_base, make_trainable, quiet
from finefit.model.loadable import prove_loadable
from finefit.rehearse.fake_kernels import device_kernels
from finefit.rehearse.fake_model import StepConfig, build_on_meta, measure_size, read_config
from finefit.rehearse.layer_kinds import names_layers
from finefit.spec.models import Full, Lora, Subset, Tuning
from finefit.spec.schema import AdamW
from finefit.step.state import frozen_checksums
from tests.conftest import make_model, make_model_folder
from tests.model.test_quantised import train

pytest.importorskip("bitsandbytes")
torch.set_num_threads(1)
quiet()
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "some": {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]},
}
OTHERS = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "mxfp4": "MXFP4", "compressed-tensors": "compressed-tensors"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("stored")
    plain = make_model_folder(place / "plain")
    for kind, settings in KINDS.items():
        shutil.copytree(plain, place / kind)
        (place / kind / "model.safetensors").unlink()
        asked = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=asked, device_map={"": "cpu"})
        model.save_pretrained(place / kind)
    return {folder.name: folder for folder in place.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def lora(kind: str) -> Lora:
    return Lora(kind="lora", rank=4, alpha=8, base_bits=8 if kind == "int8" else 4)


def step_config(folder: Path, tuning: Tuning) -> StepConfig:
    return StepConfig(
        config=config_of(folder),
        tuning=tuning,
        optimizer=AdamW(lr=1e-3),
        device="cpu",
        capability=(0, 0),
        precision="fp32",
        levers=Levers(micro_batch=1),
        tokens=8,
        supervised=4,
        accumulates=False,
    )


def relabelled(folder: Path, out: Path, label: dict[str, Any] | None) -> Path:
    shutil.copytree(folder, out)
    config = {key: value for key, value in config_of(folder).items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config | ({} if label is None else {"quantization_config": label})))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_planned_bytes_are_those_of_the_loaded_model(folders: dict[str, Path], kind: str) -> None:
    model = make_trainable(load_base(folders[kind], device="cpu", dtype=torch.float32), lora(kind), name="m")
    size = measure_size(step_config(folders[kind], lora(kind)))
    assert size.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert (size.trainable, size.parameters) == tuple(counts(model))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_scales_are_planned_as_they_are_stored(folders: dict[str, Path], kind: str) -> None:
    layer: Any = load_base(folders[kind], device="cpu", dtype=torch.float32).model.layers[0].mlp.gate_proj
    cfg = step_config(folders[kind], lora(kind))
    fake: Any = build_on_meta(cfg, device_kernels("cpu", (0, 0), "fp32"))
    planned = fake.base_model.model.model.layers[0].mlp.gate_proj.base_layer
    state = layer.weight.quant_state
    found = [
        state.absmax,
        state.code,
        *([state.offset, state.state2.absmax, state.state2.code] if state.nested else []),
    ]
    assert sum(t.nbytes for t in planned.buffers()) == sum(t.nbytes for t in found)
    assert planned.made_from == ()  # nothing dense is loaded first


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_learn_on_stored_packed_weights_that_do_not_move(folders: dict[str, Path], kind: str) -> None:
    prove_loadable(folders[kind], lora(kind), "m", folders[kind])
    model = make_trainable(load_base(folders[kind], device="cpu", dtype=torch.float32), lora(kind), name="m")
    frozen = frozen_checksums(model)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.01
    assert frozen_checksums(model) == frozen


def test_products_are_computed_in_the_precision_of_the_run(folders: dict[str, Path]) -> None:
    model = load_base(folders["nf4"], device="cpu", dtype=torch.bfloat16)
    found = {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
    assert found == {torch.bfloat16}


def test_layers_that_are_left_out_by_number_are_not_extrapolated(folders: dict[str, Path]) -> None:
    assert names_layers(step_config(folders["some"], lora("some")))
    assert not names_layers(step_config(folders["nf4"], lora("nf4")))


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_are_refused_by_name_when_planned_checked_and_loaded(
    folders: dict[str, Path], tmp_path: Path, method: str
) -> None:
    """Over plain weights, as a wrong label is."""
    folder = relabelled(folders["plain"], tmp_path / "labelled", {"quant_method": method, "bits": 4})
    refused = pytest.raises(ModelError, match=rf"quantised \({OTHERS[method]}\).*\n.*base_bits")
    with refused:
        read_config(config_of(folder))
    with refused:
        prove_loadable(folder, None, "m", folder)
    with refused:
        load_base(folder, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("tuning", "said"),
    [
        (Full(kind="full"), "tuning.kind full cannot train them"),
        (Subset(kind="subset", trainable=("norm",)), "tuning.kind subset cannot train them"),
        (Lora(kind="lora", rank=4, alpha=8), "tuning.base_bits is not set"),
        (Lora(kind="lora", rank=4, alpha=8, base_bits=8), "tuning.base_bits is 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_tunings_of_stored_packed_weights_are_refused(
    folders: dict[str, Path], tuning: Tuning, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        measure_size(step_config(folders["nf4"], tuning))
    with pytest.raises(ModelError, match=said):
        prove_loadable(folders["nf4"], tuning, "m", folders["nf4"])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_label_of_bitsandbytes_over_plain_weights_is_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = relabelled(folders["plain"], tmp_path / "labelled", config_of(folders[kind])["quantization_config"])
    num_layers = sum("_proj" in name for name, _ in make_model().named_parameters())
    with pytest.raises(ModelError, match=f"describes {num_layers} layers in . bits, the weights have 0"):
        prove_loadable(folder, lora(kind), "m", folder)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_packed_weights_without_their_label_are_refused(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = relabelled(folders[kind], tmp_path / "bare", None)
    with pytest.raises(ModelError):
        prove_loadable(folder, lora(kind), "m", folder)
