"""Experts become one model that plain transformers loads, and nothing of them is lost."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finefit.errors import FinefitError, ModelError
from finefit.facts.files import read_config
from finefit.model.family import save_weights
from finefit.model.load import Counts, counts, load_base, make_trainable, weight_dtype
from finefit.model.saved_weights import frozen_weights_of
from finefit.moe import build
from finefit.moe.build import average_experts, build_moe, moe_config, prove_experts
from finefit.rehearse.fake_model import measure_size
from finefit.spec.models import Full, Lora, Subset, Tuning
from tests.conftest import make_tokenizer
from tests.rehearse.conftest import make_cfg

torch.set_num_threads(1)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama wide heads": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mistral long": {"sliding_window": 40},
    "qwen2 sliding": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3 sliding": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0},
    "qwen3 never slides": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3},
}
INPUTS = torch.randint(0, 64, (2, 60), generator=torch.Generator().manual_seed(5))


def make_base(folder: Path, family: str) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.split()[0], **(SHAPE | FAMILIES[family]))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # biases too, which begin at zero
    model.save_pretrained(folder)
    return folder


def make_expert(base: Path, folder: Path, seed: int, *, part: str = ".mlp.") -> Path:
    """A copy of the base in which some weights have moved."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found: Tensor = model(INPUTS).logits
    return found


def built(tmp_path: Path, base: Path, **experts: Path) -> Path:
    (tmp_path / "moe").mkdir()
    build_moe(base, experts, tmp_path / "moe", top_k=min(2, len(experts)))
    return tmp_path / "moe"


def same_experts(moe: Path) -> None:
    """Every expert becomes the first one, which is the base: a build refuses copies."""
    for file in sorted(moe.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if ".experts.0." in name]:
            for at in (1, 2):
                tensors[name.replace(".experts.0.", f".experts.{at}.")] = tensors[name].clone()
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "shared"), [*((family, "none") for family in FAMILIES), ("qwen2", "base"), ("qwen2 tied", "base")]
)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_identical_experts_give_the_logits_of_the_base(tmp_path: Path, family: str, shared: Any, top_k: int) -> None:
    base = make_base(tmp_path / "base", family)
    (tmp_path / "moe").mkdir()
    experts = {"a": base, "b": make_expert(base, tmp_path / "b", 2), "c": make_expert(base, tmp_path / "c", 3)}
    build_moe(base, experts, tmp_path / "moe", top_k=top_k, shared=shared)
    assert (logits(tmp_path / "moe") - logits(base)).abs().max() > 1e-2
    same_experts(tmp_path / "moe")
    torch.testing.assert_close(logits(tmp_path / "moe"), logits(base), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_router_that_always_takes_one_expert_gives_that_experts_logits(
    tmp_path: Path, family: str, chosen: int
) -> None:
    base = make_base(tmp_path / "base", family)
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    (tmp_path / "moe").mkdir()
    build_moe(base, experts, tmp_path / "moe", top_k=1, start=lambda _: lambda _: torch.zeros(2, 16))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    for layer in model.model.layers:  # a router has no bias: what it is asked is replaced by what it shall answer
        layer.mlp.gate.register_forward_hook(lambda *_: (None, torch.ones(120, 1), torch.full((120, 1), chosen)))
    with torch.no_grad():
        torch.testing.assert_close(model(INPUTS).logits, logits(experts["ab"[chosen]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("merge", "why"),
    [(partial(build_moe, top_k=2), "they would take memory"), (average_experts, "the mean would be biased")],
    ids=["mixture", "average"],
)
def test_copies_of_an_expert_are_refused_or_collapsed_with_a_word(tmp_path: Path, merge: Any, why: str) -> None:
    base, out = make_base(tmp_path / "base", "llama"), tmp_path / "out"
    one, other = make_expert(base, tmp_path / "one", 2), make_expert(base, tmp_path / "other", 3)
    experts = {"one": one, "again": one, "other": other}
    out.mkdir()
    with pytest.raises(ModelError, match=f"experts are copies: again of one; {why}"):
        merge(base, experts, out)
    assert not list(out.iterdir())
    found = merge(base, experts, out, copies="collapse")
    assert (found.experts, found.collapsed) == (("one", "other"), {"again": "one"})
    if merge is average_experts:
        name = "model.layers.0.mlp.up_proj.weight"
        (written,) = (load_file(file)[name] for file in out.glob("*.safetensors") if name in load_file(file))
        values = [load_file(folder / "model.safetensors")[name] for folder in (one, other)]
        torch.testing.assert_close(written, sum(values) / 2)
    else:
        assert read_config(out)["num_local_experts"] == 2


@pytest.mark.parametrize("part", ["q_proj", "post_attention_layernorm", "embed_tokens"])
def test_an_expert_that_has_moved_outside_of_its_mlps_is_refused_by_name(tmp_path: Path, part: str) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    odd = make_expert(base, tmp_path / "odd", 2, part=part)
    with pytest.raises(ModelError, match=rf"expert odd has changed model\..*{part}"):
        built(tmp_path, base, odd=odd, fine=make_expert(base, tmp_path / "fine", 3))


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2 tied")
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    tensors = load_file(base / "model.safetensors")
    assert "lm_head.weight" not in tensors
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    moe = built(tmp_path, base, **experts)
    assert logits(moe).shape == (2, 60, 64)


def edited(folder: Path, **told: Any) -> Path:
    """Its config.json says other things."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return folder


def test_an_expert_of_another_base_is_refused(tmp_path: Path) -> None:
    base, wide = make_base(tmp_path / "base", "llama"), make_base(tmp_path / "wide", "llama wide heads")
    with pytest.raises(
        ModelError,
        match=r"expert odd computes differently from the base: its config.json has head_dim 8 where the base has 4",
    ):
        built(tmp_path, base, odd=wide)
    with pytest.raises(ModelError, match=r"expert odd has .*_proj.weight as"):
        build_moe(base, {"odd": edited(wide, head_dim=4)}, tmp_path / "moe", top_k=1)
    biased = edited(make_base(tmp_path / "biased", "qwen2"), **read_config(base))
    with pytest.raises(ModelError, match="do not have the same tensors"):
        build_moe(base, {"odd": biased}, tmp_path / "moe", top_k=1)


def test_the_average_is_the_mean_of_the_experts_in_the_bases_architecture(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    experts = {name: make_expert(base, tmp_path / name, seed) for name, seed in (("a", 2), ("b", 3), ("c", 4))}
    (tmp_path / "mean").mkdir()
    average_experts(base, experts, tmp_path / "mean")
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in experts.values()]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "mean")
    assert type(found) is type(models[0])
    for name, parameter in found.named_parameters():
        expected = torch.stack([dict(model.named_parameters())[name] for model in models]).mean(0)
        torch.testing.assert_close(parameter, expected)


def test_the_config_of_a_mixture_is_known_before_it_is_built(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3")
    moe = built(tmp_path, base, a=make_expert(base, tmp_path / "a", 2), b=make_expert(base, tmp_path / "b", 3))
    expected = moe_config(json.loads((base / "config.json").read_text()), num_experts=2, top_k=2)
    assert json.loads((moe / "config.json").read_text()) == expected | {"expert_names": ["a", "b"]}
    config = AutoConfig.for_model(**expected)
    with torch.device("meta"):
        planned: nn.Module = AutoModelForCausalLM.from_config(config)
    real = AutoModelForCausalLM.from_pretrained(moe)
    assert {name: p.shape for name, p in planned.named_parameters()} == {
        name: p.shape for name, p in real.named_parameters()
    }


def test_what_a_mixture_has_no_place_for_is_refused() -> None:
    dense = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 4,
        "mlp_bias": True,
    }
    with pytest.raises(ModelError, match="the base has mlp_bias"):
        moe_config(dense, num_experts=2, top_k=1)
    with pytest.raises(ModelError, match="mixtral has no shared expert"):
        moe_config(dense | {"mlp_bias": False}, num_experts=2, top_k=1, shared="base")
    with pytest.raises(ModelError, match="top_k 3 of 2 experts"):
        moe_config(dense | {"mlp_bias": False}, num_experts=2, top_k=3)
    sliding = {"model_type": "qwen3", **SHAPE, "use_sliding_window": True, "max_window_layers": 2}
    with pytest.raises(ModelError, match="1 of the base's 3 layers have a sliding window, and qwen3_moe has one in"):
        moe_config(sliding, num_experts=2, top_k=1)
    with pytest.raises(ModelError, match="a model of type gpt2 has no known mixture-of-experts architecture"):
        moe_config({"model_type": "gpt2"}, num_experts=2, top_k=1)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("llama", ("rope_parameters",)),
        ("llama", ("rms_norm_eps",)),
        ("llama all heads", ("num_key_value_heads",)),
        ("mistral by default", ("sliding_window",)),
        ("qwen2 sliding", ("layer_types",)),
        ("qwen3 wide heads", ("head_dim",)),
        ("qwen3", ("rope_parameters", "rms_norm_eps")),
    ],
)
def test_what_the_base_leaves_to_its_class_is_not_left_to_the_mixtures(
    tmp_path: Path, family: str, left_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these keys has another default there."""
    more = {
        "llama all heads": {"num_key_value_heads": 4},
        "mistral by default": {"sliding_window": 4096},
        "qwen3 wide heads": {"head_dim": 128},
    }
    monkeypatch.setattr("tests.moe.test_build.FAMILIES", FAMILIES | more)
    base = make_base(tmp_path / "base", family)
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    for folder in (base, *experts.values()):
        before = logits(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key not in left_out})
        )
        assert torch.equal(logits(folder), before)
    prove_experts(built(tmp_path, base, **experts), experts)


def test_frequencies_that_a_base_has_stored_are_no_part_of_it(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    more = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in range(3)}
    save_file(load_file(base / "model.safetensors") | more, base / "model.safetensors", metadata={"format": "pt"})
    moe = built(tmp_path, base, **experts)
    prove_experts(moe, experts)
    assert not any("inv_freq" in name for file in moe.glob("*.safetensors") for name in load_file(file))


HALVES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rewritten(folder: Path, dtype: torch.dtype) -> Path:
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("precision", HALVES)
def test_experts_may_be_trained_in_any_precision_from_a_base_in_any(
    tmp_path: Path, stored: str, precision: str
) -> None:
    base = rewritten(make_base(tmp_path / "base", "llama"), HALVES[stored])
    tuning = Subset(kind="subset", trainable=("layers.*.mlp",))
    for seed, name in enumerate("ab"):
        model = make_trainable(
            load_base(base, device="cpu", dtype=weight_dtype(precision, tuning)), tuning, name="tiny"
        )
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        (tmp_path / name).mkdir()
        save_weights(model, tmp_path / name, frozen=frozen_weights_of(model, base))
    experts = {name: tmp_path / name for name in "ab"}
    prove_experts(built(tmp_path, base, **experts), experts)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("written", HALVES)
def test_experts_may_be_stored_in_any_precision_over_a_base_in_any(tmp_path: Path, stored: str, written: str) -> None:
    """As an adapter is merged in the precision that is asked for: every tensor is rounded, and the base's own are taken
    from the base."""
    base = rewritten(make_base(tmp_path / "base", "qwen2"), HALVES[stored])
    experts = {
        name: rewritten(make_expert(base, tmp_path / name, seed), HALVES[written]) for seed, name in enumerate("ab")
    }
    prove_experts(built(tmp_path, base, **experts), experts)


@pytest.mark.parametrize("in_files", [True, False], ids=["in files", "in tokenizer_config.json"])
def test_chat_templates_of_every_name_go_along_into_an_average(tmp_path: Path, in_files: bool) -> None:
    base = make_base(tmp_path / "base", "llama")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(base, save_jinja_files=in_files)
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    (tmp_path / "out").mkdir()
    average_experts(base, experts, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def trained_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def qwen(tmp_path: Path, shared: Literal["none", "base"], dtype: torch.dtype = torch.float32) -> Path:
    base = rewritten(make_base(tmp_path / "base", "qwen2"), dtype)
    (tmp_path / "moe").mkdir()
    experts = {name: rewritten(make_expert(base, tmp_path / name, seed), dtype) for seed, name in enumerate("ab")}
    build_moe(base, experts, tmp_path / "moe", top_k=2, shared=shared)
    return tmp_path / "moe"


ALL = Lora(kind="lora", rank=2, targets="all-linear")


MLPS = Subset(kind="subset", trainable=("layers.*.mlp",))


@pytest.mark.parametrize(
    ("tuning", "num_tensors"),
    [(Full(kind="full"), 3 * (2 + 7 + 3) + 3), (ALL, 3 * 4 * 2), (MLPS, 3 * 3)],
    ids=["full", "lora", "subset"],
)
def test_what_stands_in_for_a_shared_expert_is_not_trained_and_all_that_is_trained_has_a_gradient(
    tmp_path: Path, tuning: Tuning, num_tensors: int
) -> None:
    model = make_trainable(load_base(qwen(tmp_path, "none"), device="cpu", dtype=torch.float32), tuning, name="tiny")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)  # at zero its partner has no gradient yet
    model(input_ids=INPUTS, labels=INPUTS).loss.backward()
    trained = trained_of(model)
    assert len(trained) == num_tensors
    assert not [
        name
        for name, parameter in trained.items()
        if parameter.grad is None or not parameter.grad.any() or ".shared_expert" in name
    ]


@pytest.mark.parametrize(
    ("tuning", "num_tensors"),
    [(Full(kind="full"), 3 * 4), (ALL, 3 * 4 * 2), (MLPS, 3 * 4)],
    ids=["full", "lora", "subset"],
)
def test_a_shared_expert_that_is_the_base_is_trained_with_its_gate(
    tmp_path: Path, tuning: Tuning, num_tensors: int
) -> None:
    model = make_trainable(load_base(qwen(tmp_path, "base"), device="cpu", dtype=torch.float32), tuning, name="tiny")
    assert sum(".shared_expert" in name for name in trained_of(model)) == num_tensors


@pytest.mark.parametrize("target", ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"])
def test_adapters_on_what_stands_in_for_a_shared_expert_are_refused(tmp_path: Path, target: str) -> None:
    model = load_base(qwen(tmp_path, "none"), device="cpu", dtype=torch.float32)
    with pytest.raises(ModelError, match=f"tuning.targets: {target} matches no linear layer of the model") as refused:
        make_trainable(model, ALL.model_copy(update={"targets": (target,)}), name="tiny")
    assert refused.value.remedy == "its linear layers are k_proj, o_proj, q_proj, v_proj"


@pytest.mark.parametrize("pattern", ["shared_expert", "shared_expert.up_proj", "shared_expert_gate"])
def test_what_stands_in_for_a_shared_expert_is_no_part_that_can_be_trained(tmp_path: Path, pattern: str) -> None:
    model = load_base(qwen(tmp_path, "none"), device="cpu", dtype=torch.float32)
    with pytest.raises(
        ModelError, match=rf"tuning\.trainable: {pattern} matches only modules without trainable weights"
    ):
        make_trainable(model, MLPS.model_copy(update={"trainable": (pattern,)}), name="tiny")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tuning", [Full(kind="full"), ALL, MLPS], ids=["full", "lora", "subset"])
def test_as_many_parameters_are_trained_as_are_planned(tmp_path: Path, family: str, tuning: Tuning) -> None:
    base = make_base(tmp_path / "base", family)
    moe = built(tmp_path, base, a=make_expert(base, tmp_path / "a", 2), b=make_expert(base, tmp_path / "b", 3))
    predicted = measure_size(make_cfg(moe_config(read_config(base), num_experts=2, top_k=2), tuning=tuning))
    found = make_trainable(load_base(moe, device="cpu", dtype=torch.float32), tuning, name="tiny")
    assert counts(found) == Counts(trainable=predicted.trainable, total=predicted.parameters)
    assert len(trained_of(found)) == predicted.trainable_tensors


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_a_mixture_that_was_trained_whole_is_saved_whole_and_reads_back_with_equal_logits(
    tmp_path: Path, stored: str
) -> None:
    moe, folder, tuning = qwen(tmp_path, "none", HALVES[stored]), tmp_path / "checkpoint", Full(kind="full")
    model = make_trainable(load_base(moe, device="cpu", dtype=weight_dtype("bf16", tuning)), tuning, name="tiny").eval()
    torch.manual_seed(9)
    for parameter in trained_of(model).values():
        parameter.data.add_(torch.randn_like(parameter) * 1e-3)
    folder.mkdir()
    save_weights(model, folder)
    before, after = (
        {key for file in found.glob("*.safetensors") for key in load_file(file)} for found in (moe, folder)
    )
    assert before == after
    with torch.no_grad():
        torch.testing.assert_close(logits(folder), model(INPUTS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("part", ["mlp.up_proj", "q_proj"])
def test_an_average_that_reads_back_otherwise_is_found_out(
    tmp_path: Path, dtype: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = rewritten(make_base(tmp_path / "base", "llama"), HALVES[dtype])
    experts = {
        name: rewritten(make_expert(base, tmp_path / name, seed), HALVES[dtype]) for seed, name in enumerate("abc")
    }
    (tmp_path / "mean").mkdir()
    average_experts(base, experts, tmp_path / "mean")
    really = save_file

    def bent(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        really({name: tensor * 1.05 if part in name else tensor for name, tensor in tensors.items()}, *args, **kwargs)

    monkeypatch.setattr(build, "save_file", bent)
    with pytest.raises(FinefitError, match=rf"{part}.weight was read back and is not the mean of"):
        average_experts(base, experts, tmp_path / "mean")
