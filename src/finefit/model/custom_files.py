"""The file that a model of the user's own is built by: found, named by its content, and described by what stands in the place of a config.json.

Nothing is run here, and torch is not needed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.errors import ModelError
from finefit.facts.files import read_file
from finefit.facts.model import find_texts, find_weight_files, fingerprint, read_weight_file
from finefit.spec.models import CustomModel

MODEL_TYPE = "finefit_custom"
"""No architecture of transformers is called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the user has written. The file is run only as long as it has this digest."""

    file: Path
    entry: str
    config: Mapping[str, Any]
    sha256: str

    @property
    def notice(self) -> str:
        """What is said before the file is run."""
        return f"runs code of yours: {self.file.name} (sha256 {self.sha256[:12]})"

    def as_config(self) -> dict[str, Any]:
        """For whoever knows models by their config."""
        found = {
            "model_type": MODEL_TYPE,
            "file": str(self.file),
            "entry": self.entry,
            "config": dict(self.config),
            "sha256": self.sha256,
        }
        words = self.config.get("vocab_size")
        return found | ({"vocab_size": words} if isinstance(words, int) else {})


def written(model: CustomModel, base: Path) -> Written:
    """`base` is the folder that relative paths start from."""
    file = base / model.file
    if not file.is_file():
        raise ModelError(f"model.file: there is no file {model.file}", "its path is relative to the spec file")
    try:
        sha256 = read_file(file, file.parent).sha256
    except OSError as error:
        raise ModelError(
            f"model.file: {model.file} cannot be read: {error.strerror}", "its path is relative to the spec file"
        ) from None
    return Written(file=file.resolve(), entry=model.entry, config=model.config, sha256=sha256)


def written_in(config: Mapping[str, Any]) -> Written | None:
    """Of a config that `as_config` made; None for any other."""
    if config.get("model_type") != MODEL_TYPE:
        return None
    return Written(file=Path(config["file"]), entry=config["entry"], config=config["config"], sha256=config["sha256"])


def weight_files(weights: Path) -> tuple[Path, ...]:
    """Of one safetensors file, or of a folder as transformers and finefit write it."""
    if weights.is_file():
        return (weights,)
    if not weights.is_dir():
        raise ModelError(
            f"model.weights: there is nothing at {weights}",
            "name a safetensors file or a folder of them, relative to the spec file",
        )
    return tuple(weights / name for name in find_weight_files(weights))


def own_fingerprint(found: Written, tokenizer: Path, weights: Path | None) -> str:
    """Of all that decides what the model answers: the code, its config, the tokenizer and the weights that it starts from."""
    texts = {name: path for name, path in find_texts(tokenizer).items() if name != "config.json"}
    files = () if weights is None else weight_files(weights)
    content = fingerprint(texts, [read_weight_file(path) for path in files])
    told = json.dumps([found.sha256, found.entry, found.config, content], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()
