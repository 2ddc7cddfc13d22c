"""A declared part is trained, the rest does not move, and a name that means nothing or too much is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finefit.errors import ModelError
from finefit.model.family import save_weights
from finefit.model.load import counts, load_base, make_trainable, weight_dtype
from finefit.model.saved_weights import restore_weights, weight_bytes
from finefit.objective.losses import sft_loss
from finefit.spec.models import Subset
from finefit.step.forward import autocast_for, bind
from finefit.step.optimize import optimizer_step
from finefit.step.state import frozen_checksums, make_optimizer
from tests.conftest import make_model, make_model_folder
from tests.step.conftest import ADAMW, cut, unequal_examples

torch.set_num_threads(1)
MLP = ("layers.*.mlp",)
NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION, PARTS = [f"self_attn.{p}_proj" for p in "qkvo"], [f"mlp.{p}_proj" for p in ("gate", "up", "down")]


def subset(*trainable: str, model: LlamaForCausalLM | None = None) -> nn.Module:
    tuned: nn.Module = make_trainable(model or make_model(), Subset(kind="subset", trainable=trainable), name="tiny")
    return tuned


def trained(model: nn.Module) -> set[str]:
    return {name.removesuffix(".weight") for name, p in model.named_parameters() if p.requires_grad}


def untied() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**make_model().config.to_dict() | {"tie_word_embeddings": False}))


def steps(model: nn.Module, precision: str = "fp32", *, count: int = 3) -> list[float]:
    optimizer, forward = make_optimizer(model, ADAMW), bind(model, autocast=autocast_for("cpu", precision))
    batches = cut(unequal_examples(), 4)
    scale = 1024.0 if precision == "fp16" else 1.0
    return [
        optimizer_step(
            batches, forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=bool, loss_scale=scale
        ).loss.item()
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (MLP, {f"model.layers.{n}.mlp.{part}_proj" for n in (0, 1) for part in ("gate", "up", "down")}),
        (("layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        (("model.layers.1.mlp.up_proj",), {"model.layers.1.mlp.up_proj"}),
        (("layers.*.*_layernorm",), None),
        (("norm",), {"model.norm"}),
        (
            ("input_layernorm", "layers.0.self_attn.*"),
            {f"model.layers.{n}.input_layernorm" for n in (0, 1)}
            | {f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"},
        ),
        (("0",), {f"model.layers.0.{part}" for part in (*NORMS, *ATTENTION, *PARTS)}),
    ],
)
def test_a_pattern_is_the_end_of_a_name_and_a_star_is_one_part_of_it(
    patterns: tuple[str, ...], chosen: set[str] | None
) -> None:
    if chosen is None:  # a star is a whole part
        with pytest.raises(ModelError, match="matches no module"):
            subset(*patterns)
    else:
        assert trained(subset(*patterns)) == chosen


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("layers.*.ffn", "tuning.trainable: layers.*.ffn matches no module of the model"),
        ("ayers.0.mlp", "tuning.trainable: ayers.0.mlp matches no module of the model"),
        ("mlp.act_fn", "tuning.trainable: mlp.act_fn matches only modules without trainable weights"),
        ("rotary_emb", "tuning.trainable: rotary_emb matches only modules without trainable weights"),
    ],
)
def test_a_pattern_that_means_no_weights_is_refused_with_what_there_is(pattern: str, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        subset("layers.*.mlp", pattern)
    assert caught.value.problem == problem
    assert "model.layers.*.mlp.up_proj" in caught.value.remedy
    assert "model.layers.0" not in caught.value.remedy


@pytest.mark.parametrize(("chosen", "other"), [("lm_head", "model.embed_tokens"), ("embed_tokens", "lm_head")])
def test_a_tied_weight_that_would_move_a_frozen_module_is_refused_by_both_names(chosen: str, other: str) -> None:
    with pytest.raises(ModelError) as caught:
        subset(chosen)
    assert f"{chosen}.weight is one tensor with {other}.weight" in caught.value.problem
    assert caught.value.remedy.startswith(f"name {other} in tuning.trainable too")


def test_tied_weights_may_be_trained_together() -> None:
    model = subset("lm_head", "embed_tokens")
    assert trained(model) == {"model.embed_tokens"}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]


def test_a_head_of_its_own_may_be_trained_alone() -> None:
    assert trained(subset("lm_head", model=untied())) == {"lm_head"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("patterns", [MLP, ("self_attn", "input_layernorm"), ("embed_tokens", "lm_head")])
def test_the_part_learns_in_fp32_and_the_rest_does_not_move(precision: str, patterns: tuple[str, ...]) -> None:
    tuning = Subset(kind="subset", trainable=patterns)
    kept = weight_dtype(precision, tuning)
    model = make_trainable(make_model().to(kept), tuning, name="tiny")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {kept}
    before, frozen = {name: p.detach().clone() for name, p in model.named_parameters()}, frozen_checksums(model)
    losses = steps(model, precision)
    assert losses[-1] < losses[0]
    assert frozen_checksums(model) == frozen
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_the_whole_model_and_comes_back_bit_for_bit(precision: str, tmp_path: Path) -> None:
    tuning, folder = Subset(kind="subset", trainable=MLP), make_model_folder(tmp_path / "base")

    def fresh() -> Any:
        base = load_base(folder, device="cpu", dtype=weight_dtype(precision, tuning))
        return make_trainable(base, tuning, name="tiny")

    model = fresh()
    steps(model, precision)
    save_weights(model, tmp_path / "checkpoint")
    (weights,) = (tmp_path / "checkpoint").glob("*.safetensors")
    assert weight_bytes(model) <= weights.stat().st_size <= weight_bytes(model) + 8192
    other = fresh()
    frozen = frozen_checksums(other)
    restore_weights(other, tmp_path / "checkpoint")
    theirs: dict[str, Tensor] = other.state_dict()
    assert [
        name
        for name, t in model.state_dict().items()
        if not (torch.equal(t, theirs[name]) and t.dtype == theirs[name].dtype)
    ] == []
    assert frozen_checksums(other) == frozen
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, model.float().eval()(input_ids=ids).logits, atol=1e-5)


def test_only_the_part_counts_as_trained() -> None:
    model = subset(*MLP)
    assert counts(model).trainable == 2 * 3 * 16 * 32
    assert counts(model).total == make_model().num_parameters()
