"""What an eye of any family is opened from: the model's configuration, its image processor, and the words that its tokenizer has for images."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import BaseImageProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from finefit.errors import ModelError


def settings_of(config: Mapping[str, Any]) -> Any:
    """The family's configuration, with what config.json leaves out."""
    try:
        return CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the config.json of a {config['model_type']} cannot be read: {reason}",
            "take the config.json of the published model",
        ) from None


def image_processor(folder: Path, pil: type[BaseImageProcessor] | None = None) -> Any:
    """The model's own, with PIL whether torchvision is installed or not: that gives slightly other pixels, and rows would depend on where they were
    prepared. `pil` is its class where transformers does not find that by itself."""
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil") if pil is None else pil.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            f"{folder} has no image processor that can be loaded: {reason}",
            "put the model's preprocessor_config.json there",
        ) from None


def token_of(folder: Path, name: str = "image_token", usual: str = "<image>") -> str:
    """As the tokenizer's settings spell it, or as the family does."""
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    extra = told.get("extra_special_tokens")
    found = told.get(name) or (extra.get(name) if isinstance(extra, dict) else None) or usual
    return str(found["content"] if isinstance(found, dict) else found)


def identity_of(processor: Any, *others: object) -> str:
    """Of what makes pixels and tokens of an image: its processor, and what the family adds."""
    told = json.dumps([type(processor).__name__, processor.to_dict(), others], sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()
