"""The dense models that a mixture is built from: whether their configs agree, their tensors, their tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from finefit.errors import ModelError
from finefit.facts.files import COMPUTED, TEMPLATES, find_texts, find_weight_files, read_config, reading_model

_IRRELEVANT = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout"),
        *("pretraining_tp", "max_window_layers"),  # layer_types repeats the latter
        "rope_parameters.type",  # rope_parameters.rope_type repeats it
    }
)
"""Keys that a config class declares but that do not affect a model's answers."""
_HEAD = "lm_head.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NO_TOKENIZER = ("config.json", "generation_config.json", "chat_template.jinja")
_PROBES = (
    *("", " Hello,  world!\n\n\tDon't   stop", "12/31/2024: 4512 x 0.5"),
    *("café cafe\u0301 Ångström ﬁ", "北京 Привет 🙂\u200d", "<s>a</s> b"),
)
"""Texts that compare tokenizers which cannot be serialised whole."""


def config_diff(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ between two config.json files and decide a model's answers, by key (dotted if nested),
    with each class's defaults filled in."""
    if base.get("model_type") != other.get("model_type"):
        return {"model_type": (base.get("model_type"), other.get("model_type"))}
    one, two = _deciding_keys(base), _deciding_keys(other)
    pairs = {key: (one.get(key), two.get(key)) for key in sorted(one.keys() | two.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def require_same_config(expert: str, base: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    if found := config_diff(base, other):
        values = (f"{key} {brief(theirs)} where the base has {brief(ours)}" for key, (ours, theirs) in found.items())
        problem = f"expert {expert} computes differently from the base: its config.json has {', '.join(values)}"
        raise ModelError(problem, "train it from this base")


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of its class, if transformers knows the model type, and without what every model has
    by default."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return dict(config)
    try:
        found = AutoConfig.for_model(**config).to_dict()
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        problem = f"the config.json of a {kind} cannot be read: {' '.join(str(error).split())}"
        raise ModelError(problem, "take the config.json of the published model") from None
    common = PreTrainedConfig().to_dict()
    own = {key: value for key, value in found.items() if key not in common or value != common[key]}
    return own | {"model_type": kind}


def _deciding_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out keys that the class does not declare, because they are not read."""
    kind, found = config.get("model_type"), with_defaults(config)
    if kind in CONFIG_MAPPING:
        declared = AutoConfig.for_model(kind).to_dict().keys() - PreTrainedConfig().to_dict().keys()
        found = {key: value for key, value in found.items() if key in declared}
    return {key: value for key, value in _flat(found).items() if key not in _IRRELEVANT}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": inner for name, inner in _flat(value).items()}
        else:
            found[key] = value
    return found


class DenseWeights:
    """The tensors of a dense model's folder, read one at a time. A head that the config ties to the embeddings does not
    count, whether it is stored or not; nor do tensors that every model computes for itself."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for name in find_weight_files(folder):
            file: Any = safe_open(folder / name, framework="pt")
            self._file_of |= {key: file for key in file.keys() if not key.endswith(COMPUTED)}  # noqa: SIM118 not a dict
        if with_defaults(read_config(folder)).get("tie_word_embeddings"):
            self._file_of.pop(_HEAD, None)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self._file_of[name].get_slice(name).get_shape()
        return shape

    def dtypes(self) -> set[torch.dtype]:
        found = {name: self._file_of[name].get_slice(name).get_dtype() for name in self._file_of}
        if odd := sorted(name for name, dtype in found.items() if dtype not in _DTYPES):
            problem = f"{odd[0]} is stored as {found[odd[0]]}, which cannot be mixed or averaged"
            raise ModelError(problem, "take weights in fp32, fp16 or bf16")
        return {_DTYPES[dtype] for dtype in found.values()}


def keep_tokenizer(source: Path, folder: Path) -> None:
    """Gives `folder` the text files of `source`, beside a config of its own. transformers chooses the class of the
    tokenizer, and with it its normalisation, by the model type in that config. The files stay if they open as the same
    tokenizer there; else the tokenizer that opens from `source` is saved over them."""
    if _has_tokenizer(source):
        wanted = _opened(source)
        if _difference(wanted, folder):
            wanted.save_pretrained(folder)
        _require_same(wanted, folder)


def require_same_tokenizer(source: Path, folder: Path) -> None:
    if _has_tokenizer(source):
        _require_same(_opened(source), folder)


def _require_same(wanted: PreTrainedTokenizerBase, folder: Path) -> None:
    if difference := _difference(wanted, folder):
        problem = f"the mixture would not tokenise as its base, a {type(wanted).__name__}: {difference}"
        raise ModelError(problem, "take a base whose tokenizer.json transformers opens alike for any model type")


def _has_tokenizer(folder: Path) -> bool:
    return any(name not in _NO_TOKENIZER and not name.startswith(TEMPLATES) for name in find_texts(folder))


def _opened(folder: Path) -> PreTrainedTokenizerBase:
    with reading_model(f"the tokenizer of {folder}", "put all of its files there, or none of them"):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def _difference(wanted: PreTrainedTokenizerBase, folder: Path) -> str | None:
    try:
        found = _opened(folder)
    except ModelError as error:
        return error.problem
    is_whole = all(hasattr(tokenizer, "backend_tokenizer") for tokenizer in (wanted, found))

    def behaviour(tokenizer: Any) -> dict[str, Any]:
        cut = tokenizer.backend_tokenizer.to_str() if is_whole else [tokenizer(text).input_ids for text in _PROBES]
        return {
            "cut of a text": cut,
            "set of special tokens": (tokenizer.special_tokens_map, tokenizer.all_special_ids),
            "chat template": tokenizer.chat_template,
            "way of decoding": tokenizer.clean_up_tokenization_spaces,
        }

    one, two = behaviour(wanted), behaviour(found)
    differing = [what for what in one if one[what] != two[what]]
    return f"opened as a {type(found).__name__} it has another {' and another '.join(differing)}" if differing else None
