"""Every kind of model source becomes a local folder that transformers loads, with a fingerprint of its content."""

from dataclasses import dataclass
from pathlib import Path

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
from finefit.facts.model import read_model_folder
from finefit.model import embedded
from finefit.spec.schema import EmbeddedModel, FolderModel, HubModel, Model

_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    folder: Path
    name: str
    """What adapters record as their base: a hub id, or the path as the user wrote it."""
    fingerprint: str


def locate(model: Model, base: Path) -> Located:
    """`base` is the folder that relative paths start from."""
    match model:
        case FolderModel():
            folder = base / model.path
            return Located(folder=folder, name=model.path, fingerprint=read_model_folder(folder).fingerprint)
        case EmbeddedModel():
            source = embedded.find(model.name)
            return Located(folder=embedded.converted(source), name=source.hub_id, fingerprint=source.fingerprint)
        case HubModel():
            folder = _download(model)
            return Located(folder=folder, name=model.id, fingerprint=read_model_folder(folder).fingerprint)


def _download(model: HubModel) -> Path:
    try:
        return Path(snapshot_download(model.id, revision=model.revision, allow_patterns=list(_WANTED)))
    except GatedRepoError:
        raise ModelError(f"{model.id} is gated", "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN") from None
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"the hub has no model {model.id} at {model.revision}: {reason}", "check the id; a local folder is `kind: folder`") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{model.id} is not in the local cache and the hub cannot be reached: {reason}",
            "connect, or name a local folder with `model: {kind: folder, path: ...}`",
        ) from None
