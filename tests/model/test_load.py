import importlib.util
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.errors import ModelError, RunError, SpecError
from finefit.evaluate.batches import answers
from finefit.model.family import family_of, save_weights
from finefit.model.load import counts, load_base, load_for_answers, make_trainable, weight_dtype
from finefit.model.saved_weights import restore_weights, weight_bytes
from finefit.spec.models import Full, Lora, Subset, Tuning
from finefit.step.state import make_optimizer
from tests.conftest import make_model, make_model_folder
from tests.step.conftest import ADAMW, FULL, LORA, RENDERER, TUNINGS, cut, step, tuned, unequal_examples

torch.set_num_threads(1)

INPUT_IDS = torch.arange(5, 45).reshape(2, 20)


def _targeting(*targets: str) -> Lora:
    return Lora(kind="lora", rank=2, alpha=4, targets=targets)


def _adapted(model: nn.Module) -> set[str]:
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def _targets(adapted: Any) -> set[str]:
    """As adapter_config.json names them."""
    return set(adapted.peft_config["default"].target_modules)


def _untied() -> LlamaForCausalLM:
    config = make_model().config.to_dict() | {"tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**config))


def _trained(tuning: Tuning, *, model: nn.Module | None = None) -> nn.Module:
    """Two steps away from where it began."""
    trained = model or tuned(tuning)
    optimizer = make_optimizer(trained, ADAMW)
    for _ in range(2):
        step(trained, optimizer, cut(unequal_examples(), 4))
    return trained


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=INPUT_IDS).logits
    return logits


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    model = _untied()
    wanted = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    adapted = make_trainable(model, LORA, name="tiny")
    assert _targets(adapted) == {"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"}
    assert _adapted(adapted) == wanted


def test_the_linear_layers_of_gpt2_are_its_convolutions_of_width_one() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    chosen = family_of(model).adapter_layers(Lora(kind="lora"))
    assert {name.rsplit(".", 1)[-1] for name in chosen} == {"c_attn", "c_fc", "c_proj"}


def test_an_architecture_that_transformers_does_not_know_is_the_users_to_mend(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "unheard-of", "architectures": ["UnheardOf"]})
    )
    with pytest.raises(ModelError, match=r"model cannot be read: .*unheard-of"):
        load_base(folder, device="cpu", dtype=torch.float32)


def test_named_targets_get_adapters_and_no_others_do() -> None:
    adapted = _adapted(make_trainable(make_model(), _targeting("q_proj", "mlp.up_proj"), name="tiny"))
    assert adapted == {
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")
    }


def test_a_target_in_one_layer_keeps_its_whole_name() -> None:
    name = "model.layers.1.self_attn.q_proj"
    for target in ("layers.1.self_attn.q_proj", name):
        adapted = make_trainable(make_model(), _targeting(target), name="tiny")
        assert _targets(adapted) == _adapted(adapted) == {name}


def test_a_short_name_is_taken_only_where_it_means_the_same_modules() -> None:
    model = make_model()
    model.model.layers[0].self_attn.extra = nn.ModuleDict({"q_proj": nn.Identity()})
    adapted = make_trainable(model, _targeting("q_proj"), name="tiny")
    assert _targets(adapted) == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}


@pytest.mark.parametrize("target", ["c_attn", "lm_head", "embed_tokens", "proj", "self_attn"])
def test_a_target_that_matches_no_linear_layer_is_refused_with_those_there_are(target: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_trainable(make_model(), _targeting("q_proj", target), name="tiny")
    assert caught.value.problem == f"tuning.targets: {target} matches no linear layer of the model"
    assert caught.value.remedy == "its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


def test_importing_the_libraries_says_nothing_and_errors_are_still_heard() -> None:
    """bitsandbytes logs missing kernels as it is imported, which peft does."""
    code = "import logging, finefit.model.load; logging.getLogger('bitsandbytes.x').error('a fault')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.strip()) == ("", "a fault")


def test_an_adapter_leaves_the_model_as_it_was_until_it_is_trained() -> None:
    assert torch.equal(_logits(make_trainable(make_model(), LORA, name="tiny")), _logits(make_model()))


def test_only_adapters_are_trainable_in_lora_and_everything_in_full() -> None:
    adapted, whole = make_trainable(make_model(), LORA, name="tiny"), make_trainable(make_model(), FULL, name="tiny")
    assert {name.split(".")[-3] for name, p in adapted.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert all(p.requires_grad for p in whole.parameters())
    assert counts(whole).trainable == counts(whole).total == make_model().num_parameters()
    assert counts(adapted).trainable == counts(adapted).total - counts(whole).total
    assert adapted.training
    assert whole.training


def test_the_base_does_not_move_in_lora_training() -> None:
    model = tuned(LORA)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _trained(LORA, model=model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_saved_weights_come_back_bit_for_bit(tuning: Tuning, tmp_path: Path) -> None:
    model = _trained(tuning)
    save_weights(model, tmp_path)
    other = tuned(tuning)
    assert not torch.equal(_logits(other), _logits(model))
    restore_weights(other, tmp_path)
    assert [name for name, t in model.state_dict().items() if not torch.equal(t, other.state_dict()[name])] == []
    assert torch.equal(_logits(other), _logits(model))


def test_a_whole_model_is_read_by_plain_transformers_and_its_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = _trained(FULL)
    save_weights(model, tmp_path)
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), _logits(model))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    other = tuned(FULL)
    restore_weights(other, tmp_path)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight  # type: ignore[operator]


def test_a_model_whose_head_is_its_own_is_saved_and_restored_whole(tmp_path: Path) -> None:
    model = make_trainable(_untied(), FULL, name="tiny")
    save_weights(model, tmp_path)
    other = make_trainable(_untied(), FULL, name="tiny")
    other.get_output_embeddings().weight.data.add_(1)
    assert not torch.equal(_logits(other), _logits(model))
    restore_weights(other, tmp_path)
    assert torch.equal(_logits(other), _logits(model))


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_equal_weights_are_equal_files_of_the_predicted_size(tuning: Tuning, tmp_path: Path) -> None:
    model = _trained(tuning)
    for name in ("a", "b"):
        save_weights(model, tmp_path / name)
    a, b = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b
    (weights,) = (tmp_path / "a").glob("*.safetensors")
    assert weight_bytes(model) <= weights.stat().st_size <= weight_bytes(model) + 8192


def test_an_adapter_folder_is_read_by_plain_peft(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "base")
    model = _trained(
        LORA, model=make_trainable(load_base(folder, device="cpu", dtype=torch.float32), LORA, name=str(folder))
    )
    save_weights(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["target_modules"] == sorted(_targets(model))
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    assert torch.equal(_logits(read), _logits(model))
    assert torch.equal(_logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), _logits(model))


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.kind)
def test_the_model_that_answers_is_the_one_that_was_trained(tuning: Tuning, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "base")
    model = _trained(
        tuning, model=make_trainable(load_base(folder, device="cpu", dtype=torch.float32), tuning, name="tiny")
    )
    save_weights(model, tmp_path / "checkpoint")
    read = load_for_answers(folder, tmp_path / "checkpoint", device="cpu", dtype=torch.float32)
    assert not read.training
    assert torch.equal(_logits(read), _logits(model))
    start = load_for_answers(folder, None, device="cpu", dtype=torch.float32)
    assert torch.equal(_logits(start), _logits(make_model()))


@pytest.mark.parametrize(
    "theirs",
    [Lora(kind="lora", rank=8, alpha=8), _targeting("q_proj"), Lora(kind="lora", rank=4, alpha=8, targets=("q_proj",))],
)
def test_an_adapter_of_another_shape_is_refused(theirs: Lora, tmp_path: Path) -> None:
    save_weights(tuned(theirs), tmp_path / "checkpoint-3")
    model = tuned(LORA)
    before = deepcopy(model.state_dict())
    with pytest.raises(RunError, match=r"checkpoint-3 holds an adapter for another model or other targets: .* differ"):
        restore_weights(model, tmp_path / "checkpoint-3")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.pop("model.layers.0.mlp.up_proj.weight"), "lacks model.layers.0.mlp.up_proj.weight"),
        (lambda w: w.pop("model.embed_tokens.weight"), "lacks lm_head.weight, model.embed_tokens.weight"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(7)}),
            "holds model.norm.weight, which this model does not have in that shape",
        ),
        (lambda w: w.update({"model.bias": torch.ones(7)}), "holds model.bias, which this model does not have"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: Any, reason: str, tmp_path: Path) -> None:
    save_weights(tuned(FULL), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=reason):
        restore_weights(tuned(FULL), tmp_path)


def test_a_model_that_lacks_a_tensor_is_refused_and_not_made_up(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"^model has no weights for model.layers.0.self_attn.q_proj.weight\n.*incomplete"
    ):
        load_base(folder, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_that_is_left_without_values_is_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model")
    really = AutoModelForCausalLM.from_pretrained

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        model, report = really(*args, **kwargs)
        if kind == "parameter":
            model.model.norm.weight = nn.Parameter(model.model.norm.weight.to("meta"))
        else:
            model.model.rotary_emb.register_buffer("inv_freq", torch.ones(2, device="meta"), persistent=False)
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forgetful)
    name = {"parameter": "model.norm.weight", "buffer": "model.rotary_emb.inv_freq"}[kind]
    with pytest.raises(ModelError, match=f"^model was loaded without values for {name}\n"):
        load_base(folder, device="cpu", dtype=torch.float32)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("tuning", "dtypes"),
    [
        (LORA, HALVES),
        (Subset(kind="subset", trainable=("mlp",)), HALVES),
        (FULL, dict.fromkeys(HALVES, torch.float32)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_frozen_weights_are_halves_and_whole_models_stay_in_fp32(
    tuning: Tuning, dtypes: dict[str, torch.dtype]
) -> None:
    assert {precision: weight_dtype(precision, tuning) for precision in dtypes} == dtypes


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_without_bitsandbytes_are_told_what_to_install(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SpecError, match=rf"tuning.base_bits {bits} needs bitsandbytes"):
        load_base(folder, device="cpu", dtype=torch.float32, bits=bits)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the mapped files of a process are known on Linux")
def test_beside_packed_weights_no_file_stays_in_memory(tmp_path: Path) -> None:
    """A tensor of the file's precision lies in the file; it would keep the pages that the others were packed from."""
    folder = make_model_folder(tmp_path / "model")
    model = load_base(folder, device="cpu", dtype=torch.float32, bits=4)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _with_generation_config(folder: Path, **values: Any) -> Path:
    make_model_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_a_model_that_has_a_temperature_without_sampling_can_be_saved(tmp_path: Path) -> None:
    folder = _with_generation_config(tmp_path / "base", do_sample=False, temperature=0.6, top_p=0.9)
    model = make_trainable(load_base(folder, device="cpu", dtype=torch.float32), Full(kind="full"), name="tiny")
    save_weights(model, tmp_path / "checkpoint")
    saved = json.loads((tmp_path / "checkpoint" / "generation_config.json").read_text())
    assert saved.items() >= {"do_sample": True, "temperature": 0.6, "top_p": 0.9}.items()


def test_a_generation_config_that_cannot_be_saved_is_told_before_training(tmp_path: Path) -> None:
    folder = _with_generation_config(tmp_path / "base", num_beams=1, length_penalty=2.0)
    with pytest.raises(ModelError, match=r"generation_config cannot be saved: .*length_penalty"):
        make_trainable(load_base(folder, device="cpu", dtype=torch.float32), Full(kind="full"), name="tiny")


@pytest.mark.parametrize("checkpoint", [None, "adapter"])
def test_answers_are_greedy_whatever_the_models_own_penalties_are(checkpoint: str | None, tmp_path: Path) -> None:
    folder = _with_generation_config(
        tmp_path / "base", repetition_penalty=9.0, temperature=0.1, do_sample=True, min_new_tokens=3
    )
    if checkpoint:
        save_weights(make_trainable(make_model(), LORA, name="tiny"), tmp_path / checkpoint)
    bent = load_for_answers(folder, tmp_path / checkpoint if checkpoint else None, device="cpu", dtype=torch.float32)
    straight = load_for_answers(make_model_folder(tmp_path / "plain"), None, device="cpu", dtype=torch.float32)
    prompts = [list(e.tokens[:at]) for e in unequal_examples() for at in (5, 6)]
    batch_limit = EvalBatchLimit(rows=4, tokens=4096)
    found = [
        dict(answers(model, RENDERER, prompts, max_new_tokens=12, batch_limit=batch_limit, device="cpu", warn=print))
        for model in (bent, straight)
    ]
    assert found[0] == found[1]
