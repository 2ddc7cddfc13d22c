"""What a mixture or an average will refuse is told before its experts are trained, and its size is that of what will be built."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finefit.artifacts.forecasts import StageOutlook
from finefit.errors import ModelError
from finefit.facts.model import read_model_folder
from finefit.model.moe import average, build_moe
from finefit.pipeline.outlines import Outlines
from finefit.pipeline.outlooks import look_at
from tests.conftest import make_model_folder, make_tokenizer
from tests.mixtures import DENSE, make_mixture_folder
from tests.model.test_moe import make_expert
from tests.pipeline.test_foreseen import pipeline_of

CARD = ("RTX 4090",)
MLPS = "tuning: {kind: subset, trainable: [layers.*.mlp]}"
BASE = "{kind: folder, path: base}"
FOLDERS = "{letters: {kind: folder, path: letters}, digits: {kind: folder, path: digits}}"
TRAINED = f"""\
  letters: {{kind: train, model: {BASE}, {MLPS}}}
  digits: {{kind: train, model: {{kind: folder, path: other}}, {MLPS}}}
"""
TWO = "{letters: {kind: stage, name: letters}, digits: {kind: stage, name: digits}}"


def foreseen(folder: Path, experts: str, *, more: str = "", before: str = "", base: str = BASE) -> StageOutlook:
    stages = f"{before}  mix: {{kind: build_moe, base: {base}, experts: {experts}{more}}}\n"
    return look_at(Outlines(pipeline=pipeline_of(stages), base=folder), "mix", CARD)


def make_other(folder: Path, kind: str, **changes: Any) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(DENSE | changes))).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda at: make_other(at, "llama", hidden_size=32, num_hidden_layers=3),
            "hidden_size 32 where the base has 16, .*num_hidden_layers 3 where",
        ),
        (lambda at: make_other(at, "llama", rms_norm_eps=1e-3), r"rms_norm_eps 0\.001 where the base has 1e-06$"),
        (lambda at: make_other(at, "qwen3"), "model_type 'qwen3' where the base has 'llama'$"),
        (lambda at: make_mixture_folder(at, "llama"), "model_type 'mixtral' where the base has 'llama'$"),
    ],
    ids=["another shape", "another norm", "another family", "a mixture"],
)
def test_an_expert_of_another_model_than_the_base_is_told_before_it_is_trained(
    make: Callable[[Path], Path], words: str, merge: str, tmp_path: Path
) -> None:
    make_model_folder(tmp_path / "base")
    make(tmp_path / "other")
    with pytest.raises(
        ModelError, match=f"(?m)^stage mix: expert digits computes otherwise than the base: its config.json has {words}"
    ) as caught:
        foreseen(tmp_path, TWO, before=TRAINED, more=f", merge: {merge}")
    assert caught.value.remedy == "train it from this base"


def test_a_mixture_that_a_stage_makes_is_no_expert_of_another(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "base")
    make_model_folder(tmp_path / "other")
    first = f"  first: {{kind: build_moe, base: {BASE}, experts: {TWO}}}\n"
    with pytest.raises(
        ModelError,
        match=r"expert two computes otherwise than the base: its config\.json has model_type 'mixtral' where",
    ):
        foreseen(
            tmp_path, "{one: {kind: stage, name: letters}, two: {kind: stage, name: first}}", before=TRAINED + first
        )


def test_an_expert_that_is_left_out_may_be_of_another_model(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "base")
    make_other(tmp_path / "other", "llama", hidden_size=32)
    found = foreseen(tmp_path, TWO, before=TRAINED, more=", router: {kind: select_one, expert: letters}")
    assert found.parameters == 8864 + 2 * 16  # and a router of one in each of two layers


@pytest.mark.parametrize(
    "base",
    [BASE, "{kind: stage, name: warm}", f"{{kind: shape, config: {json.dumps({'model_type': 'phi3', **DENSE})}}}"],
)
def test_a_mean_of_mlps_that_are_not_known_is_told_before_its_experts_are_trained(base: str, tmp_path: Path) -> None:
    """Phi-3 has two parts of its MLP in one tensor."""
    make_other(tmp_path / "base", "phi3")
    trained = f"  warm: {{kind: train, model: {BASE}, {MLPS}}}\n  a: {{kind: train, model: {{kind: stage, name: warm}}, {MLPS}}}\n"
    with pytest.raises(
        ModelError,
        match=r"^stage mix: the base's model\.layers\.0\.mlp\.gate_up_proj\.weight is no part of an MLP that is known",
    ):
        foreseen(
            tmp_path, f"{{a: {{kind: stage, name: a}}, b: {base}}}", base=base, before=trained, more=", merge: average"
        )


def as_they_are(_: Path) -> None:
    pass


def in_bf16(folder: Path) -> None:
    rewrite(folder, torch.bfloat16)


def rewrite(
    folder: Path,
    dtype: torch.dtype,
    *,
    norms: torch.dtype | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
) -> None:
    tensors = load_file(folder / "model.safetensors")
    stored = {name: tensor.to(norms if norms and "norm" in name else dtype) for name, tensor in tensors.items()}
    save_file(stored | dict(more or {}), folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, str(dtype).removeprefix("torch."))


def say(folder: Path, dtype: str | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    said = {} if dtype is None else {"dtype": dtype}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | said)
    )


def silently_in_bf16(folder: Path) -> None:
    rewrite(folder, torch.bfloat16)
    say(folder, None)


def with_norms_in_fp32(folder: Path) -> None:
    rewrite(folder, torch.bfloat16, norms=torch.float32)


def with_what_a_model_computes(folder: Path) -> None:
    rewrite(folder, torch.bfloat16, more={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})


def digits_in_fp16(folder: Path) -> None:
    """Rounded to what both halves hold, so that the rest of it is the base's in either."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: (tensor * 256).round() / 256 for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    rewrite(folder, torch.float16 if folder.name == "digits" else torch.bfloat16)


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("stored", "width"),
    [
        (as_they_are, 4),
        (in_bf16, 2),
        (silently_in_bf16, 2),
        (lambda folder: say(folder, "bfloat16"), 4),
        (with_norms_in_fp32, 4),
        (with_what_a_model_computes, 2),
        (digits_in_fp16, 4),
    ],
    ids=[
        "fp32",
        "bf16",
        "a config that says nothing",
        "a config that says bf16 of fp32",
        "norms in fp32",
        "what is computed in fp32",
        "two halves",
    ],
)
def test_a_mixture_is_foreseen_as_large_as_it_will_be(
    stored: Callable[[Path], None], width: int, merge: str, tmp_path: Path
) -> None:
    """It is built in what nothing is lost in, whatever configs say."""
    base = make_model_folder(tmp_path / "base")
    experts = {name: make_expert(base, tmp_path / name, seed) for seed, name in enumerate(("letters", "digits"))}
    for folder in (base, *experts.values()):
        stored(folder)
    found = foreseen(tmp_path, FOLDERS, more=f", merge: {merge}")
    out = tmp_path / "out"
    out.mkdir()
    build_moe(base, experts, out, top_k=2) if merge == "mixture" else average(base, experts, out)
    built = read_model_folder(out)
    assert (found.parameters, found.disk_bytes) == (built.num_parameters, built.weight_bytes)
    assert built.weight_bytes == width * (built.num_parameters or 0)


@pytest.mark.parametrize(
    ("trained", "width"),
    [
        (f"{{kind: train, model: {BASE}, {MLPS}}}", 4),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a}}", 2),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a, precision: bf16}}", 2),
        (f"{{kind: merge_adapter, model: {BASE}, adapter: a, precision: fp16}}", 4),
    ],
    ids=["trained", "merged as the base is", "merged in bf16", "merged in the other half"],
)
def test_experts_to_come_are_foreseen_in_what_their_stages_will_write(trained: str, width: int, tmp_path: Path) -> None:
    in_bf16(make_model_folder(tmp_path / "base"))
    found = foreseen(tmp_path, f"{{a: {{kind: stage, name: a}}, b: {BASE}}}", before=f"  a: {trained}\n")
    assert found.disk_bytes == width * (found.parameters or 0)


def test_an_adapter_is_merged_in_what_most_of_its_base_is_stored_in(tmp_path: Path) -> None:
    with_norms_in_fp32(make_model_folder(tmp_path / "base"))
    stages = f"  merged: {{kind: merge_adapter, model: {BASE}, adapter: a}}\n"
    found = look_at(Outlines(pipeline=pipeline_of(stages), base=tmp_path), "merged", CARD)
    assert found.disk_bytes == 2 * 8864


def test_weights_that_are_to_be_fetched_are_foreseen_as_their_config_says(tmp_path: Path) -> None:
    """Shards that are named and not there yet."""
    shape = json.dumps({"model_type": "llama", **DENSE, "dtype": "bfloat16"})
    base = make_model_folder(tmp_path / "base")
    say(base, "bfloat16")
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    for asked in (BASE, f"{{kind: shape, config: {shape}}}"):
        found = foreseen(tmp_path, f"{{a: {asked}, b: {asked}}}", base=asked)
        assert found.disk_bytes == 2 * (found.parameters or 0)
