"""What two configs must agree on before their models are made into one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finefit.errors import ModelError
from finefit.facts.files import read_config
from finefit.moe.build import average_experts, build_moe, prove_experts
from finefit.moe.dense import config_diff, require_same_tokenizer, with_defaults
from tests.conftest import make_tokenizer
from tests.mixtures import DENSE
from tests.moe.test_build import built, edited, make_base, make_expert

torch.set_num_threads(1)
KINDS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"rms_norm_eps": 1e-2}, {"rms_norm_eps": (1e-6, 1e-2)}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": (True, False)}),
        ({"rope_theta": 500.0}, {"rope_parameters.rope_theta": (10000.0, 500.0)}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            {"rope_parameters.rope_theta": (10000.0, 500.0)},
        ),
        ({"hidden_act": "gelu"}, {"hidden_act": ("silu", "gelu")}),
    ],
)
def test_what_decides_the_answers_is_told_with_both_values(
    kind: str, other: dict[str, Any], found: dict[str, Any]
) -> None:
    base = {"model_type": kind, **DENSE}
    assert config_diff(base, base | other) == found


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_decide_them_may_differ(kind: str) -> None:
    base = {"model_type": kind, **DENSE}
    names = {"dtype": "bfloat16", "torch_dtype": "float16", "_name_or_path": "a/b", "architectures": ["X"]}
    tokens = {"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 4}
    others = tokens | {"use_cache": False, "attention_dropout": 0.1, "of_somebody": "else"}
    assert config_diff(base, base | names | others) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [{}, {"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 2.0}}],
    ids=["plain", "theta", "scaled"],
)
def test_a_default_is_the_same_written_or_left_out(kind: str, more: dict[str, Any]) -> None:
    base = {"model_type": kind, **DENSE, **more}
    assert config_diff(base, with_defaults(base)) == {}


def test_layers_with_a_window_are_compared_however_they_are_named() -> None:
    base = {"model_type": "qwen2", **DENSE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    named = base | {"max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"]}
    assert config_diff(base, named) == {}
    assert list(config_diff(base, base | {"max_window_layers": 0})) == ["layer_types"]


def test_another_architecture_is_all_that_is_told_and_one_that_nobody_knows_is_compared_as_it_stands() -> None:
    assert config_diff({"model_type": "llama", **DENSE}, {"model_type": "qwen2"}) == {"model_type": ("llama", "qwen2")}
    assert config_diff({"model_type": "my-own", "width": 3}, {"model_type": "my-own", "width": 4}) == {"width": (3, 4)}


def test_a_config_that_its_class_refuses_is_told() -> None:
    with pytest.raises(ModelError, match=r"the config.json of a llama cannot be read: .*hidden_size"):
        config_diff({"model_type": "llama"}, {"model_type": "llama", "hidden_size": "wide"})


@pytest.mark.parametrize("merge", ["mixture", "average"])
@pytest.mark.parametrize(
    ("family", "other", "told"),
    [
        ("llama", {"rms_norm_eps": 1e-2}, "rms_norm_eps 0.01 where the base has 1e-06"),
        (
            "llama tied",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            "rope_parameters.rope_theta 9.0 where the base has 500.0",
        ),
        ("qwen2 sliding", {"sliding_window": 41}, "sliding_window 41 where the base has 40"),
        ("llama tied", {"tie_word_embeddings": False}, "tie_word_embeddings False where the base has True"),
    ],
)
def test_an_expert_that_computes_otherwise_is_refused_by_key(
    tmp_path: Path, merge: str, family: str, other: dict[str, Any], told: str
) -> None:
    base = make_base(tmp_path / "base", family)
    experts = {
        "fine": make_expert(base, tmp_path / "fine", 2),
        "odd": edited(make_expert(base, tmp_path / "odd", 3), **other),
    }
    tensors = load_file(experts["odd"] / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head + 1}, experts["odd"] / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=f"expert odd computes differently from the base: its config.json has {told}"):
        build_moe(base, experts, tmp_path / "out", top_k=2) if merge == "mixture" else average_experts(
            base, experts, tmp_path / "out"
        )
    assert not list((tmp_path / "out").iterdir())


def test_experts_may_leave_out_what_their_class_says_and_name_other_tokens(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2")
    experts = {
        "a": edited(make_expert(base, tmp_path / "a", 2), eos_token_id=7, use_cache=False, _name_or_path="a/b"),
        "b": tmp_path / "b",
    }
    config = read_config(make_expert(base, experts["b"], 3))
    (experts["b"] / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ("rms_norm_eps", "layer_types")})
    )
    prove_experts(built(tmp_path, base, **experts), experts)


# A mixture cuts every text as its base does, though transformers takes another class of tokenizer for it.

torch.set_num_threads(1)
TEXTS = (
    "Order 4512: two cafe\u0301s,  it's 12/31/2024.\n\nDon't   stop",
    "<|user|>\nhi<|end|>\n<|assistant|>hi to",
    "hi</s>hi to",
)


def with_tokenizer(folder: Path, tokenizer: Any, **told: Any) -> Path:
    """`told`: over what it saves into tokenizer_config.json."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    return folder


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """Of the form that Llama-2 has: a space is put before a text, and stands for every other."""
    own = ("▁h", "▁hi", "▁t", "▁to", "hi")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{at:02X}>" for at in range(256)), *"▁abcdefghijklmnopqrstuvwxyz", *own]
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "t"), ("▁t", "o"), ("h", "i")]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def mixed(tmp_path: Path, base: Path) -> Path:
    experts = {"a": make_expert(base, tmp_path / "a", 2), "b": make_expert(base, tmp_path / "b", 3)}
    (tmp_path / "moe").mkdir()
    build_moe(base, experts, tmp_path / "moe", top_k=2)
    return tmp_path / "moe"


def require_equal(folder: Path, base: Path) -> None:
    found, wanted = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(base)
    for text in TEXTS:
        tokens = wanted(text).input_ids
        assert found(text).input_ids == tokens
        assert found.decode(tokens) == wanted.decode(tokens)
    assert found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    assert found.special_tokens_map == wanted.special_tokens_map
    assert found.chat_template == wanted.chat_template


NAMED = [
    *(("llama", name) for name in ("LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer")),
    *(
        ("qwen2", name)
        for name in ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "TokenizersBackend")
    ),
]
"""Families, and names of classes that transformers heeds for the one model type and not for the other."""


@pytest.mark.parametrize(("family", "name"), NAMED)
def test_a_mixture_tokenises_as_its_base_whatever_class_its_files_name(tmp_path: Path, family: str, name: str) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", family), make_tokenizer(), tokenizer_class=name)
    require_equal(mixed(tmp_path, base), base)


@pytest.mark.parametrize("told", [{}, {"legacy": False}, {"legacy": True}], ids=str)
def test_a_tokenizer_of_llama_2s_form_stays_what_it_is(tmp_path: Path, told: dict[str, Any]) -> None:
    base = with_tokenizer(
        make_base(tmp_path / "base", "llama"), pieces_tokenizer(), tokenizer_class="LlamaTokenizer", **told
    )
    require_equal(mixed(tmp_path, base), base)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_files_that_open_as_the_same_tokenizer_are_copied_as_they_are(tmp_path: Path, family: str) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", family), make_tokenizer())
    moe = mixed(tmp_path, base)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert [(moe / name).read_bytes() for name in names] == [(base / name).read_bytes() for name in names]
    assert {path.name for path in moe.iterdir()} == {path.name for path in moe.glob("model*")} | {
        "config.json",
        "generation_config.json",
        *names,
    }


def test_an_average_has_the_files_of_its_base(tmp_path: Path) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", "qwen2"), make_tokenizer(), tokenizer_class="LlamaTokenizerFast")
    (tmp_path / "mean").mkdir()
    average_experts(base, {"a": make_expert(base, tmp_path / "a", 2)}, tmp_path / "mean")
    assert (tmp_path / "mean" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    require_equal(tmp_path / "mean", base)


@pytest.mark.parametrize("in_files", [True, False], ids=["in files", "in tokenizer_config.json"])
def test_named_chat_templates_go_along_with_a_tokenizer_that_is_written_anew(tmp_path: Path, in_files: bool) -> None:
    base, tokenizer = make_base(tmp_path / "base", "qwen2"), make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(base, save_jinja_files=in_files)
    moe = mixed(tmp_path, base)
    require_equal(moe, base)
    assert AutoTokenizer.from_pretrained(moe).chat_template == tokenizer.chat_template
    assert (moe / "tokenizer.json").read_bytes() != (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_checkpoint_that_saves_what_it_opened_reads_back_as_the_same_tokenizer(tmp_path: Path, family: str) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", family), make_tokenizer(), tokenizer_class="LlamaTokenizer")
    moe = mixed(tmp_path, base)
    AutoTokenizer.from_pretrained(moe).save_pretrained(tmp_path / "checkpoint")
    shutil.copy(moe / "config.json", tmp_path / "checkpoint")
    require_equal(tmp_path / "checkpoint", base)


def in_bytes(tmp_path: Path, family: str) -> Path:
    """A base whose tokenizer is code alone and has no fast form."""
    base = make_base(tmp_path / "base", family)
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 2}))
    return base


def test_a_tokenizer_without_a_fast_form_is_held_against_the_bases_by_what_it_does(tmp_path: Path) -> None:
    base = in_bytes(tmp_path, "qwen3")
    moe = mixed(tmp_path, base)
    assert (
        AutoTokenizer.from_pretrained(moe)(TEXTS[0]).input_ids
        == AutoTokenizer.from_pretrained(base)(TEXTS[0]).input_ids
    )
    make_tokenizer().save_pretrained(moe)
    with pytest.raises(
        ModelError, match=r"its base, a ByT5Tokenizer: opened as a TokenizersBackend it has another cut of a text"
    ):
        require_same_tokenizer(base, moe)


def test_a_mixture_that_cannot_tokenise_as_its_base_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"the mixture would not tokenise as its base, a ByT5Tokenizer: the tokenizer of .* cannot be read",
    ):
        mixed(tmp_path, in_bytes(tmp_path, "llama"))
    assert not list((tmp_path / "moe").iterdir())


def test_a_base_whose_tokenizer_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer of .*base cannot be read"):
        mixed(tmp_path, base)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_base_without_a_tokenizer_gives_a_mixture_without_one(tmp_path: Path, family: str) -> None:
    base = make_base(tmp_path / "base", family)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    assert {path.name for path in mixed(tmp_path, base).glob("*") if "model" not in path.name} == {
        *("config.json", "generation_config.json", "chat_template.jinja")
    }


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "another cut of a text"),
        ("tokenizer_config.json", {"eos_token": "<|pad|>"}, "another set of special tokens"),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}, "another way of decoding"),
        ("chat_template.jinja", None, "another chat template"),
    ],
    ids=["normalizer", "eos", "decoding", "template"],
)
def test_a_mixture_whose_tokenizer_is_another_is_found_out(
    tmp_path: Path, file: str, changes: dict[str, Any] | None, told: str
) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", "llama"), make_tokenizer())
    moe = mixed(tmp_path, base)
    require_same_tokenizer(base, moe)
    path = moe / file
    path.write_text("{{ messages }}" if changes is None else json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=told):
        require_same_tokenizer(base, moe)
