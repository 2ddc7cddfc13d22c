"""Every kind of model source becomes a local folder that transformers loads, with a fingerprint of its content."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finefit.errors import ModelError
from finefit.facts.model import read_config, read_model_folder, require_folder
from finefit.model.adapter_files import adapter_fingerprint, require_agreement
from finefit.model.custom_files import own_fingerprint, written
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora, Model, ShapeModel, Tuning

_OUTLINE = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("*.jinja", "*.model", "merges.txt", "vocab.txt", "vocab.json", "chat_template.json", "*processor_config.json"),
)
"""Of a model on the hub, what a plan needs: no weights."""
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    folder: Path
    """Of a model of the user's own that of its tokenizer."""
    name: str
    """What adapters record as their base: a hub id, or the path as the user wrote it."""
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a model without its weights."""

    config: dict[str, Any]
    tokenizer: Path | None
    folder: Path | None = None
    """Of a model of transformers: where it lies, its weights may be there too."""


def outline(model: Model, base: Path) -> Outline:
    match model:
        case ShapeModel():
            return Outline(config=model.config, tokenizer=None)
        case CustomModel():
            return Outline(config=written(model, base).as_config(), tokenizer=_tokenizer_of(model, base))
        case FolderModel():
            folder = base / model.path
            require_folder(folder)
        case EmbeddedModel():
            from finefit.model import embedded  # torch comes with it

            folder = embedded.converted(embedded.find(model.name))
        case HubModel():
            folder = _download(model, _OUTLINE)
    return Outline(config=read_config(folder), tokenizer=folder if _has_tokenizer(folder) else None, folder=folder)


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    )


def _tokenizer_of(model: CustomModel, base: Path) -> Path:
    """A folder that need hold nothing else."""
    match model.tokenizer:
        case FolderModel(path=path):
            folder = base / path
            require_folder(folder)
        case EmbeddedModel(name=name):
            from finefit.model import embedded  # torch comes with it

            folder = embedded.converted(embedded.find(name))
        case HubModel() as named:
            folder = _download(named, _OUTLINE)
    if not _has_tokenizer(folder):
        raise ModelError(f"model.tokenizer: {folder} holds no tokenizer", "name a folder with tokenizer.json")
    return folder


def locate(model: Model, base: Path) -> Located:
    """`base` is the folder that relative paths start from."""
    match model:
        case FolderModel():
            folder = base / model.path
            return Located(folder=folder, name=model.path, fingerprint=read_model_folder(folder).fingerprint)
        case EmbeddedModel():
            from finefit.model import embedded  # torch comes with it

            source = embedded.find(model.name)
            return Located(folder=embedded.converted(source), name=source.hub_id, fingerprint=source.fingerprint)
        case HubModel():
            folder = _download(model, _WANTED)
            return Located(folder=folder, name=model.id, fingerprint=read_model_folder(folder).fingerprint)
        case CustomModel():
            found, tokenizer = written(model, base), _tokenizer_of(model, base)
            weights = None if model.weights is None else base / model.weights
            return Located(
                folder=tokenizer, name=found.file.name, fingerprint=own_fingerprint(found, tokenizer, weights)
            )
        case ShapeModel():
            raise ModelError(
                "a model of kind shape has no weights to train", "plan it, or name a model that has weights"
            )


def commit_of(model: HubModel) -> str:
    """What its revision means now; no weights are fetched for it."""
    return _download(model, ("config.json",)).name  # the snapshot's folder is named by its commit


def locate_start(model: Model, tuning: Tuning, base: Path) -> Located:
    """What training starts from: the model and, where it goes on from an adapter, that too. The fingerprint is of both."""
    return with_adapter(locate(model, base), tuning, base)


def with_adapter(located: Located, tuning: Tuning, base: Path) -> Located:
    if not isinstance(tuning, Lora) or tuning.adapter is None:
        return located
    folder = base / tuning.adapter
    require_agreement(folder, tuning, model=located.name)
    return replace(
        located, fingerprint=hashlib.sha256(f"{located.fingerprint} {adapter_fingerprint(folder)}".encode()).hexdigest()
    )


def _download(model: HubModel, wanted: tuple[str, ...]) -> Path:
    try:
        return Path(snapshot_download(model.id, revision=model.revision, allow_patterns=list(wanted)))
    except GatedRepoError:
        raise ModelError(
            f"{model.id} is gated", "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the hub has no model {model.id} at {model.revision}: {reason}",
            "check the id; a local folder is `kind: folder`",
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{model.id} is not in the local cache and the hub cannot be reached: {reason}",
            "connect, or name a local folder with `model: {kind: folder, path: ...}`",
        ) from None
