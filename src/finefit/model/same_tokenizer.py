"""The tokenizer of a model goes along to one of another type. Transformers chooses a tokenizer's class, and with it what is done to a text before
it is cut, by the model type beside it: the same files may open as another tokenizer there."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finefit.errors import ModelError
from finefit.facts.model import TEMPLATES, find_texts

_NO_TOKENIZER = ("config.json", "generation_config.json", "chat_template.jinja")
_PROBES = (
    "",
    " Hello,  world!\n\n\tDon't   stop",
    "12/31/2024: 4512 x 0.5",
    "café cafe\u0301 Ångström ﬁ",
    "北京 Привет 🙂\u200d",
    "<s>a</s> b",
)
"""For tokenizers that cannot be written down whole."""


def keep_tokenizer(source: Path, folder: Path) -> None:
    """`folder` has the texts of `source` beside a config of its own. They stay if they open as the same tokenizer there; else what is opened from
    `source` is saved over them."""
    if _has_tokenizer(source):
        wanted = _opened(source)
        if _fault(wanted, folder):
            wanted.save_pretrained(folder)
        _require_same(wanted, folder)


def require_same_tokenizer(source: Path, folder: Path) -> None:
    if _has_tokenizer(source):
        _require_same(_opened(source), folder)


def _require_same(wanted: PreTrainedTokenizerBase, folder: Path) -> None:
    if fault := _fault(wanted, folder):
        raise ModelError(
            f"the mixture would not tokenise as its base, a {type(wanted).__name__}: {fault}",
            "take a base whose tokenizer.json transformers opens alike for any model type",
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(name not in _NO_TOKENIZER and not name.startswith(TEMPLATES) for name in find_texts(folder))


def _opened(folder: Path) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, LookupError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"the tokenizer of {folder} cannot be opened: {reason}", "put its files there, whole, or none of them"
        ) from None
    return found


def _fault(wanted: PreTrainedTokenizerBase, folder: Path) -> str | None:
    try:
        found = _opened(folder)
    except ModelError as error:
        return error.problem
    is_whole = all(hasattr(tokenizer, "backend_tokenizer") for tokenizer in (wanted, found))
    one, two = (_told(tokenizer, is_whole=is_whole) for tokenizer in (wanted, found))
    differing = [what for what in one if one[what] != two[what]]
    return f"opened as a {type(found).__name__} it has another {' and another '.join(differing)}" if differing else None


def _told(tokenizer: Any, *, is_whole: bool) -> dict[str, Any]:
    return {
        "cut of a text": tokenizer.backend_tokenizer.to_str()
        if is_whole
        else [tokenizer(text).input_ids for text in _PROBES],
        "set of special tokens": (tokenizer.special_tokens_map, tokenizer.all_special_ids),
        "chat template": tokenizer.chat_template,
        "way of decoding": tokenizer.clean_up_tokenization_spaces,
    }
