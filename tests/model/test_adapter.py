"""What an adapter is put on, what it is kept in, how one is gone on from, and what answers as the reference."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from finefit.errors import FinefitError, ModelError
from finefit.model.adapter import as_reference, freeze_reference, require_exact
from finefit.model.family import save_weights
from finefit.model.load import counts, load_base, load_for_answers, make_trainable
from finefit.model.saved_weights import restore_weights
from finefit.spec.models import Lora
from finefit.step.state import make_optimizer
from tests.conftest import make_model, make_model_folder
from tests.step.conftest import ADAMW, FULL, LORA, cut, step, tuned, unequal_examples

torch.set_num_threads(1)
INPUT_IDS = torch.arange(5, 45).reshape(2, 20)
KINDS = (LORA, LORA.model_copy(update={"dora": True}), LORA.model_copy(update={"rank_stabilised": True}))


def name_of(tuning: Lora) -> str:
    return "dora" if tuning.dora else "rank_stabilised" if tuning.rank_stabilised else "plain"


def logits(model: Any) -> Tensor:
    was_training = model.training
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=INPUT_IDS).logits
    model.train(was_training)
    return found


def train(model: nn.Module, *, steps: int = 2) -> nn.Module:
    optimizer = make_optimizer(model, ADAMW)
    for _ in range(steps):
        step(model, optimizer, cut(unequal_examples(), 4))
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# which layers


def test_a_head_that_peft_would_adapt_too_is_refused() -> None:
    """Its name ends as that of a layer which was asked for."""
    model = LlamaForCausalLM(LlamaConfig(**make_model().config.to_dict() | {"tie_word_embeddings": False}))
    model.proj, model.extra = nn.Linear(16, 16), nn.ModuleDict({"proj": nn.Linear(16, 261)})
    model.get_output_embeddings = lambda: model.extra["proj"]
    with pytest.raises(ModelError, match=r"tuning.targets: extra.proj got an adapter"):
        make_trainable(model, LORA, name="tiny")


@pytest.mark.parametrize(
    ("targets", "chosen", "problem"),
    [
        (["q_proj", "v_proj"], ("q_proj",), "v_proj got an adapter"),
        (["q_proj"], ("q_proj", "v_proj"), "v_proj got no adapter"),
    ],
)
def test_more_or_fewer_adapters_than_asked_for_are_refused(
    targets: list[str], chosen: tuple[str, ...], problem: str
) -> None:
    adapted = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    wanted = {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in chosen}
    with pytest.raises(ModelError, match=problem):
        require_exact(adapted, wanted)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda name, p: p.requires_grad_("norm" in name or "lora_" in name),
            "input_layernorm.weight.* would be trained beside the adapters",
        ),
        (
            lambda name, p: p.requires_grad_("lora_" in name and "layers.1" not in name),
            "layers.1.self_attn.q_proj has an adapter that is not trained",
        ),
    ],
)
def test_anything_else_that_is_trained_is_refused(change: Callable[[str, nn.Parameter], Any], problem: str) -> None:
    adapted = peft.get_peft_model(make_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        change(name, parameter)
    with pytest.raises(ModelError, match=problem):
        require_exact(adapted, {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)})


@pytest.mark.parametrize("tuning", KINDS, ids=name_of)
def test_exactly_the_resolved_layers_carry_adapters_and_nothing_else_is_trained(tuning: Lora) -> None:
    model = make_trainable(
        make_model(), tuning.model_copy(update={"targets": ("q_proj", "layers.1.mlp.up_proj")}), name="tiny"
    )
    wanted = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    carrying = {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert (
        carrying == {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in trained(model)} == wanted
    )


# what they are


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank() -> None:
    plain, stable = (make_trainable(make_model(), tuning, name="tiny") for tuning in (KINDS[0], KINDS[2]))
    scales = [
        {module.scaling["default"] for module in model.modules() if isinstance(module, LoraLayer)}
        for model in (plain, stable)
    ]
    assert scales == [{8 / 4}, {8 / 2}]


def test_dora_learns_a_length_for_every_row_of_a_weight_beside_its_direction() -> None:
    model = make_trainable(make_model(), KINDS[1], name="tiny")
    lengths = {name: p for name, p in trained(model).items() if "magnitude" in name}
    assert len(lengths) == 14
    assert torch.allclose(logits(model), logits(make_model()), atol=1e-6)
    before = {name: p.detach().clone() for name, p in lengths.items()}
    train(model)
    assert all(not torch.equal(p, before[name]) for name, p in lengths.items())


@pytest.mark.parametrize("tuning", KINDS, ids=name_of)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
def test_adapter_weights_are_kept_in_what_was_asked_for_whatever_the_base_is_in(
    tuning: Lora, weights: str, base: torch.dtype
) -> None:
    asked = tuning.model_copy(update={"weights": weights})
    model = make_trainable(make_model().to(base), asked, name="tiny")
    assert {p.dtype for p in trained(model).values()} == {torch.float32 if weights == "fp32" else torch.bfloat16}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {base}


def test_bf16_adapters_train_and_are_saved_in_bf16(tmp_path: Path) -> None:
    asked = LORA.model_copy(update={"weights": "bf16"})
    model = train(tuned(asked))
    optimizer_moments = make_optimizer(model, ADAMW)
    step(model, optimizer_moments, cut(unequal_examples(), 4))
    assert {t.dtype for state in optimizer_moments.state.values() for name, t in state.items() if name != "step"} == {
        torch.bfloat16
    }
    save_weights(model, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}
    other = tuned(asked)
    restore_weights(other, tmp_path)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("tuning", KINDS[1:], ids=name_of)
def test_other_kinds_of_adapters_are_saved_and_read_by_plain_peft(tuning: Lora, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "base")
    model = train(make_trainable(load_base(folder, device="cpu", dtype=torch.float32), tuning, name=str(folder)))
    save_weights(model, tmp_path / "adapter")
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(model))
    other = make_trainable(make_model(), tuning, name="tiny")
    restore_weights(other, tmp_path / "adapter")
    assert torch.equal(logits(other), logits(model))


# going on


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    folder: Path
    """Holds `model` and the adapter `first`."""
    model: nn.Module


def earlier(folder: Path, tuning: Lora = LORA) -> Earlier:
    base = load_base(make_model_folder(folder / "model"), device="cpu", dtype=torch.float32)
    model = train(make_trainable(base, tuning, name="model"))
    save_weights(model, folder / "first")
    return Earlier(folder=folder, model=model)


def go_on(found: Earlier, *, name: str = "model", **changes: Any) -> nn.Module:
    tuning = LORA.model_copy(update={"adapter": "first"} | changes)
    base = load_base(found.folder / "model", device="cpu", dtype=torch.float32)
    model: nn.Module = make_trainable(base, tuning, name=name, base=found.folder)
    return model


@pytest.mark.parametrize("tuning", KINDS, ids=name_of)
def test_training_goes_on_from_the_adapter_and_lays_no_second_one_over_it(tuning: Lora, tmp_path: Path) -> None:
    found = earlier(tmp_path, tuning)
    model = go_on(found, dora=tuning.dora, rank_stabilised=tuning.rank_stabilised)
    assert torch.equal(logits(model), logits(found.model))
    assert list(model.peft_config) == ["default"]  # type: ignore[arg-type]
    assert counts(model) == counts(found.model)
    assert set(trained(model)) == set(trained(found.model))
    train(model)
    assert not torch.equal(logits(model), logits(found.model))


def test_an_adapter_is_widened_or_rounded_to_what_was_asked_for(tmp_path: Path) -> None:
    model = go_on(earlier(tmp_path), weights="bf16")
    assert {p.dtype for p in trained(model).values()} == {torch.bfloat16}
    assert not torch.equal(logits(model), logits(make_model()))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (
            {"rank": 8, "alpha": 16.0},
            "tuning.rank is 8, the adapter has 4; tuning.alpha is 16.0, the adapter has 8.0",
        ),
        ({"dora": True}, "tuning.dora is True, the adapter has False"),
        ({"rank_stabilised": True}, "tuning.rank_stabilised is True, the adapter has False"),
        ({"name": "other/llama"}, "the model is other/llama, the adapter was made for model"),
        (
            {"targets": ("q_proj",)},
            "first adapts layers that tuning.targets does not name: model.layers.0.mlp.down_proj",
        ),
    ],
)
def test_an_adapter_that_the_spec_does_not_describe_is_refused_by_what_differs(
    changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        go_on(earlier(tmp_path), **changes)
    assert difference in caught.value.problem


def test_an_adapter_of_fewer_layers_is_refused(tmp_path: Path) -> None:
    found = earlier(tmp_path, LORA.model_copy(update={"targets": ("q_proj",)}))
    with pytest.raises(ModelError, match=r"first lacks layers that tuning.targets names: .*down_proj.* and 9 more"):
        go_on(found)


def test_an_adapter_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    found = earlier(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"intermediate_size": 64}
    LlamaForCausalLM(make_model().config.__class__(**config)).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"first was made for another model: .*mlp.* differ"):
        go_on(found)


def _with_config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _cut_off(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_with_config(bias="all"), "the adapter has bias .*, which finefit does not train"),
        (_with_config(modules_to_save=["lm_head"]), "the adapter has modules_to_save .*, which finefit does not train"),
        (_with_config(rank_pattern={"q_proj": 8}), "the adapter has rank_pattern .*, which finefit does not train"),
        (_with_config(alpha_pattern={"q_proj": 8}), "the adapter has alpha_pattern .*, which finefit does not train"),
        (_with_config(peft_type="IA3"), "first holds no LoRA adapter"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (_cut_off, "adapter_model.safetensors is truncated"),
    ],
)
def test_a_folder_that_training_cannot_continue_from_is_refused_by_what_is_wrong(
    change: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    found = earlier(tmp_path)
    change(tmp_path / "first")
    with pytest.raises(ModelError, match=problem):
        go_on(found)


def test_the_base_model_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    found = earlier(tmp_path)
    for name in ("../../model", "/somewhere/else/model", "hub/model"):
        go_on(found, name=name)


def test_a_rehearsal_makes_an_adapter_of_the_same_shape_without_reading_one() -> None:
    tuning = LORA.model_copy(update={"adapter": "nowhere"})
    assert counts(make_trainable(make_model(), tuning, name="tiny")) == counts(
        make_trainable(make_model(), LORA, name="tiny")
    )


def test_the_starting_model_answers_with_the_adapter_that_it_has(tmp_path: Path) -> None:
    found = earlier(tmp_path)
    read = load_for_answers(tmp_path / "model", None, device="cpu", dtype=torch.float32, start=tmp_path / "first")
    assert torch.equal(logits(read), logits(found.model))


# the reference


def state_of(model: nn.Module) -> tuple[dict[str, bool], list[tuple[Any, bool]]]:
    layers = [(list(m.active_adapters), m.disable_adapters) for m in model.modules() if isinstance(m, LoraLayer)]
    return {name: p.requires_grad for name, p in model.named_parameters()}, layers


@pytest.mark.parametrize("tuning", KINDS, ids=name_of)
def test_the_reference_of_a_new_adapter_is_the_model_without_it(tuning: Lora) -> None:
    model = train(make_trainable(make_model(), tuning, name="tiny"))
    before, answer = state_of(model), logits(model)
    with as_reference(model):
        assert torch.equal(logits(model), logits(make_model()))
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, is_trained in before[0].items() if is_trained
        }
    assert state_of(model) == before
    assert torch.equal(logits(model), answer)


@pytest.mark.parametrize("tuning", KINDS, ids=name_of)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_reference_of_an_adapter_gone_on_from_is_that_adapter(tuning: Lora, weights: Any, tmp_path: Path) -> None:
    found = earlier(tmp_path, tuning)
    model = go_on(found, dora=tuning.dora, rank_stabilised=tuning.rank_stabilised, weights=weights, dropout=0.5)
    before, start, size = state_of(model), logits(model), counts(model)
    assert isinstance(model, peft.PeftModel)
    freeze_reference(model)
    assert {name: is_trained for name, is_trained in state_of(model)[0].items() if ".reference" not in name} == before[
        0
    ]
    assert not any(is_trained for name, is_trained in state_of(model)[0].items() if ".reference" in name)
    assert state_of(model)[1] == before[1]
    assert model.active_adapter == "default"
    assert counts(model) == size
    assert torch.equal(logits(model), start)
    train(model)
    after, answer = state_of(model), logits(model)
    assert not torch.equal(answer, start)
    with as_reference(model):
        assert torch.equal(logits(model), start)
    assert state_of(model) == after
    assert torch.equal(logits(model), answer)


def test_what_was_frozen_by_hand_stays_frozen_beside_a_reference() -> None:
    model = make_trainable(make_model(), LORA, name="tiny")
    assert isinstance(model, peft.PeftModel)
    model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight").requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    freeze_reference(model)
    assert {name: p.requires_grad for name, p in model.named_parameters() if ".reference" not in name} == before


def test_the_reference_has_no_dropout_of_the_adapter(tmp_path: Path) -> None:
    model = go_on(earlier(tmp_path), dropout=0.5)
    assert isinstance(model, peft.PeftModel)
    freeze_reference(model)
    with as_reference(model), torch.no_grad():
        first, second = (model.train()(input_ids=INPUT_IDS).logits for _ in range(2))
    assert torch.equal(first, second)


def test_the_reference_is_left_when_something_fails_inside() -> None:
    model = make_trainable(make_model(), LORA, name="tiny")
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), as_reference(model):
        _ = 1 // 0
    assert state_of(model) == before


def test_saving_writes_the_trained_adapter_alone_in_the_plain_layout(tmp_path: Path) -> None:
    model = go_on(earlier(tmp_path))
    assert isinstance(model, peft.PeftModel)
    freeze_reference(model)
    train(model)
    save_weights(model, tmp_path / "second")
    files = {path.name for path in (tmp_path / "second").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    other = go_on(Earlier(folder=tmp_path, model=model))
    assert isinstance(other, peft.PeftModel)
    freeze_reference(other)
    restore_weights(other, tmp_path / "second")
    assert torch.equal(logits(other), logits(model))
    with as_reference(other), as_reference(model):
        assert torch.equal(logits(other), logits(model))


def test_a_model_without_adapters_has_no_reference() -> None:
    with (
        pytest.raises(FinefitError, match="without adapters"),
        as_reference(make_trainable(make_model(), FULL, name="tiny")),
    ):
        pass
