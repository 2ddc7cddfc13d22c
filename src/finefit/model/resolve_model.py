"""Every kind of model source becomes a local folder that transformers loads, with a fingerprint of its content. Also
the files of an adapter that training continues from, and the source file of a custom model.

No code of a user runs here, and torch is not imported."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
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
from finefit.facts.files import (
    find_texts,
    find_weight_files,
    fingerprint,
    read_config,
    read_model_folder,
    read_weight_file,
    require_folder,
    sha256_of,
)
from finefit.model import embedded
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora, Model, ShapeModel, Tuning

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_UNTRAINED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
}
"""Settings that a spec cannot express, with the values of finefit's own adapters; any other value would be lost."""
MODEL_TYPE = "finefit_custom"
"""Of a custom model; transformers has no such architecture."""
_WITHOUT_WEIGHTS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("*.jinja", "*.model", "merges.txt", "vocab.txt", "vocab.json", "chat_template.json", "*processor_config.json"),
)
"""What a plan needs of a model on the hub."""
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    folder: Path
    """Of a custom model that of its tokenizer."""
    name: str
    """What adapters record as their base: a hub id, or the path as the user wrote it."""
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """What is known of a model without its weights."""

    config: dict[str, Any]
    tokenizer: Path | None
    folder: Path | None = None
    """Of a transformers model; its weights may be there too."""


def model_outline(model: Model, base: Path) -> ModelOutline:
    match model:
        case ShapeModel():
            return ModelOutline(config=model.config, tokenizer=None)
        case CustomModel():
            return ModelOutline(config=custom_source(model, base).as_config(), tokenizer=_tokenizer_of(model, base))
        case _:
            folder = _folder_without_weights(model, base)
    return ModelOutline(config=read_config(folder), tokenizer=folder if _has_tokenizer(folder) else None, folder=folder)


def _folder_without_weights(model: FolderModel | EmbeddedModel | HubModel, base: Path) -> Path:
    match model:
        case FolderModel():
            require_folder(base / model.path)
            return base / model.path
        case EmbeddedModel():
            return embedded.converted(embedded.find(model.name))
        case HubModel():
            return _download(model, _WITHOUT_WEIGHTS)


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    return any((folder / name).is_file() for name in names)


def _tokenizer_of(model: CustomModel, base: Path) -> Path:
    """A folder that may hold nothing else."""
    folder = _folder_without_weights(model.tokenizer, base)
    if not _has_tokenizer(folder):
        raise ModelError(f"model.tokenizer: {folder} holds no tokenizer", "name a folder with tokenizer.json")
    return folder


def resolve_model(model: Model, base: Path) -> ResolvedModel:
    """`base` is the folder that relative paths start from."""
    match model:
        case FolderModel():
            folder = base / model.path
            return ResolvedModel(folder=folder, name=model.path, fingerprint=read_model_folder(folder).fingerprint)
        case EmbeddedModel():
            source = embedded.find(model.name)
            return ResolvedModel(folder=embedded.converted(source), name=source.hub_id, fingerprint=source.fingerprint)
        case HubModel():
            folder = _download(model, _WANTED)
            return ResolvedModel(folder=folder, name=model.id, fingerprint=read_model_folder(folder).fingerprint)
        case CustomModel():
            custom, tokenizer = custom_source(model, base), _tokenizer_of(model, base)
            digest = custom_fingerprint(custom, tokenizer, None if model.weights is None else base / model.weights)
            return ResolvedModel(folder=tokenizer, name=custom.file.name, fingerprint=digest)
        case ShapeModel():
            problem = "a model of kind shape has no weights to train"
            raise ModelError(problem, "plan it, or name a model that has weights")


def commit_of(model: HubModel) -> str:
    """What its revision means now; no weights are downloaded for it."""
    return _download(model, ("config.json",)).name  # the snapshot's folder is named by its commit


def resolve_start(model: Model, tuning: Tuning, base: Path) -> ResolvedModel:
    """What training starts from: the model and the adapter that it continues from, if any. The fingerprint covers
    both."""
    return with_adapter_fingerprint(resolve_model(model, base), tuning, base)


def with_adapter_fingerprint(resolved: ResolvedModel, tuning: Tuning, base: Path) -> ResolvedModel:
    if not isinstance(tuning, Lora) or tuning.adapter is None:
        return resolved
    folder = base / tuning.adapter
    require_matching_adapter(folder, tuning, model=resolved.name)
    both = f"{resolved.fingerprint} {adapter_fingerprint(folder)}"
    return replace(resolved, fingerprint=hashlib.sha256(both.encode()).hexdigest())


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


# adapters


def adapter_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        digest.update(hashlib.sha256(_read_adapter_file(folder, file)).digest())
    return digest.hexdigest()


def require_matching_adapter(folder: Path, tuning: Lora, *, model: str) -> None:
    """`model`: the base model's name. Which layers it adapts is checked by its tensors, once the model is loaded."""
    try:
        config = json.loads(_read_adapter_file(folder, ADAPTER_CONFIG))
    except ValueError as error:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG} is not JSON: {error}", "name another adapter in tuning.adapter"
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder.name} holds no LoRA adapter", "name another one in tuning.adapter")
    if differing := list(_adapter_differences(config, tuning, model)):
        raise ModelError(
            f"the adapter in {folder.name} is not the one that the spec describes: " + "; ".join(differing),
            "write its own values into the spec, or name another adapter in tuning.adapter",
        )


def _adapter_differences(config: dict[str, Any], tuning: Lora, model: str) -> Iterator[str]:
    for key, theirs, ours in (
        ("tuning.rank", config.get("r"), tuning.rank),
        ("tuning.alpha", config.get("lora_alpha"), tuning.alpha),
        ("tuning.rank_stabilised", bool(config.get("use_rslora")), tuning.rank_stabilised),
        ("tuning.dora", bool(config.get("use_dora")), tuning.dora),
    ):
        if theirs != ours:
            yield f"{key} is {ours}, the adapter has {theirs}"
    for key, plain in _UNTRAINED_SETTINGS.items():
        if config.get(key, plain[0]) not in plain:
            yield f"the adapter has {key} {config[key]}, which finefit does not train"
    base = config.get("base_model_name_or_path")
    if base and _last(base) and _last(model) and _last(base) != _last(model):
        yield f"the model is {model}, the adapter was made for {base}"


def _last(name: str) -> str:
    """Of a path or a hub id: the same model may be in several places. A path may end without a name, as `..` does."""
    return PurePosixPath(name).name.strip(".")


def _read_adapter_file(folder: Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(
            f"{folder / file} cannot be read: {reason}", f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        ) from None


# custom models


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSource:
    """A user's file. It is run only as long as it has this digest."""

    file: Path
    entry: str
    config: Mapping[str, Any]
    sha256: str

    @property
    def notice(self) -> str:
        """Shown before the file is run."""
        return f"runs code of yours: {self.file.name} (sha256 {self.sha256[:12]})"

    def as_config(self) -> dict[str, Any]:
        """In place of a config.json."""
        found = {
            "model_type": MODEL_TYPE,
            "file": str(self.file),
            "entry": self.entry,
            "config": dict(self.config),
            "sha256": self.sha256,
        }
        words = self.config.get("vocab_size")
        return found | ({"vocab_size": words} if isinstance(words, int) else {})


def custom_source(model: CustomModel, base: Path) -> CustomSource:
    """`base` is the folder that relative paths start from."""
    file = base / model.file
    if not file.is_file():
        raise ModelError(f"model.file: there is no file {model.file}", "its path is relative to the spec file")
    try:
        sha256 = sha256_of(file)
    except OSError as error:
        raise ModelError(
            f"model.file: {model.file} cannot be read: {error.strerror}", "its path is relative to the spec file"
        ) from None
    return CustomSource(file=file.resolve(), entry=model.entry, config=model.config, sha256=sha256)


def custom_source_in(config: Mapping[str, Any]) -> CustomSource | None:
    """Of a config that `as_config` made; None for any other."""
    if config.get("model_type") != MODEL_TYPE:
        return None
    return CustomSource(
        file=Path(config["file"]), entry=config["entry"], config=config["config"], sha256=config["sha256"]
    )


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


def custom_fingerprint(found: CustomSource, tokenizer: Path, weights: Path | None) -> str:
    """Of all that decides the model's answers: code, config, tokenizer, and the weights that it starts from."""
    texts = {name: path for name, path in find_texts(tokenizer).items() if name != "config.json"}
    files = () if weights is None else weight_files(weights)
    content = fingerprint(texts, [read_weight_file(path) for path in files])
    content_key = json.dumps([found.sha256, found.entry, found.config, content], sort_keys=True)
    return hashlib.sha256(content_key.encode()).hexdigest()
