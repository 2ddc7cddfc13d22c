"""A mixture cuts every text as its base does, though transformers takes another class of tokenizer for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finefit.errors import ModelError
from finefit.model.moe import average, build_moe
from finefit.model.same_tokenizer import require_same_tokenizer
from tests.conftest import make_tokenizer
from tests.model.test_moe import make_base, make_expert

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
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{at:02X}>" for at in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz",
        "▁h",
        "▁hi",
        "▁t",
        "▁to",
        "hi",
    ]
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
    average(base, {"a": make_expert(base, tmp_path / "a", 2)}, tmp_path / "mean")
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
        match=r"the mixture would not tokenise as its base, a ByT5Tokenizer: the tokenizer of .* cannot be opened",
    ):
        mixed(tmp_path, in_bytes(tmp_path, "llama"))
    assert not list((tmp_path / "moe").iterdir())


def test_a_base_whose_tokenizer_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer of .*base cannot be opened"):
        mixed(tmp_path, base)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_base_without_a_tokenizer_gives_a_mixture_without_one(tmp_path: Path, family: str) -> None:
    base = make_base(tmp_path / "base", family)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    assert {path.name for path in mixed(tmp_path, base).glob("*") if "model" not in path.name} == {
        *("config.json", "generation_config.json", "chat_template.jinja")
    }


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("tokenizer.json", lambda whole: whole | {"normalizer": {"type": "Lowercase"}}, "another cut of a text"),
        ("tokenizer_config.json", lambda whole: whole | {"eos_token": "<|pad|>"}, "another set of special tokens"),
        (
            "tokenizer_config.json",
            lambda whole: whole | {"clean_up_tokenization_spaces": True},
            "another way of decoding",
        ),
    ],
    ids=["normalizer", "eos", "decoding"],
)
def test_a_mixture_whose_tokenizer_is_another_is_found_out(tmp_path: Path, file: str, change: Any, told: str) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", "llama"), make_tokenizer())
    moe = mixed(tmp_path, base)
    require_same_tokenizer(base, moe)
    (moe / file).write_text(json.dumps(change(json.loads((moe / file).read_text()))))
    with pytest.raises(ModelError, match=told):
        require_same_tokenizer(base, moe)


def test_a_mixture_with_another_chat_template_is_found_out(tmp_path: Path) -> None:
    base = with_tokenizer(make_base(tmp_path / "base", "llama"), make_tokenizer())
    moe = mixed(tmp_path, base)
    (moe / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match="another chat template"):
        require_same_tokenizer(base, moe)
