"""The tokenizer of a model's folder, with its chat template and what its model stops at."""

import json
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from finefit.errors import ModelError


def open_tokenizer(folder: Path | str, *, revision: str = "main", sees: bool = False) -> PreTrainedTokenizerBase:
    """`sees`: its template may lie with the processor alone."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, revision=revision)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"{folder} has no tokenizer that can be loaded: {reason}", "put the model's tokenizer files there, whole"
        ) from None
    if sees:
        tokenizer.chat_template = _processor_template(Path(folder)) or tokenizer.chat_template
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {folder} has no eos_token, so the model could not learn to stop",
            "set eos_token in tokenizer_config.json",
        )
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    found = folder / "chat_template.json"
    if not found.is_file() or (folder / "chat_template.jinja").is_file():
        return None
    template = json.loads(found.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else None


def require_template(tokenizer: PreTrainedTokenizerBase, folder: Path | str) -> None:
    if not tokenizer.chat_template:
        raise ModelError(
            f"{folder} has no chat template",
            "choose: `data.template: plain` trains on prompt + completion + end token as they stand; or take an instruct model, which has one",
        )
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise ModelError(
            f"{folder} has the chat templates {', '.join(sorted(tokenizer.chat_template))}, and none is called default",
            "name the one to use `default`",
        )


def model_stops(folder: Path | str, revision: str) -> tuple[int, ...]:
    try:
        stops = GenerationConfig.from_pretrained(folder, revision=revision).eos_token_id
    except OSError:  # it has none
        return ()
    return tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),)
