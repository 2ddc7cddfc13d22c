"""Checks a model's own files, by their headers alone: `check` and `run` refuse here what a worker could not load."""

from importlib.metadata import version
from pathlib import Path

from finefit.artifacts.cache import cached_record, source_digest
from finefit.artifacts.forecasts import LoadProof
from finefit.artifacts.records import Finding
from finefit.errors import ModelError
from finefit.facts.files import INDEX, SHARDS, WEIGHTS, read_object, reading_model
from finefit.model.resolve_model import ResolvedModel, files_on_hub, read_stub, resolve_model, resolve_start
from finefit.plan import client
from finefit.preflight import note
from finefit.spec.models import CustomModel, HubModel, Lora, Model, ShapeModel, Tuning

_MAX_CACHED = 200


def require_model(model: Model, tuning: Tuning | None, base: Path, *, reads_rows: bool = True) -> ResolvedModel:
    """`base`: the folder that relative paths start from; `tuning`: None for a model that is not trained. Downloads the
    weights of a model on the hub."""
    resolved = resolve_model(model, base) if tuning is None else resolve_start(model, tuning, base)
    if isinstance(model, CustomModel):
        if model.weights is None and not (isinstance(tuning, Lora) and tuning.adapter is not None):
            return resolved  # the code draws its tensors itself
    elif reads_rows:
        _require_tokenizer(model, base)
    asked = None if tuning is None else tuning.model_dump(mode="json", exclude={"adapter"})
    libraries = [version(name) for name in ("transformers", "torch", "peft")]
    code = source_digest("custom", "model", "facts", "vision")
    content = [resolved.fingerprint, resolved.name, asked, libraries, code]

    def proved() -> LoadProof:
        proof: LoadProof
        if isinstance(model, CustomModel):
            proof = client.ask("prove_custom_loadable", model, tuning, base)
        else:
            proof = client.ask("prove_loadable", resolved.folder, tuning, resolved.name, base)
        return proof

    cached_record("loadable", content, LoadProof, proved, max_entries=_MAX_CACHED)
    return resolved


def require_model_here(
    model: Model, tuning: Tuning | None, base: Path, *, reads_rows: bool = True
) -> tuple[Finding, ...]:
    """The same as far as the files are on this machine: `check` downloads no weights, and says so in a note."""
    if isinstance(model, ShapeModel):
        return ()
    if isinstance(model, HubModel) and (lacking := _weights_to_fetch(model, base)):
        if reads_rows:
            _require_tokenizer(model, base)
        problem = f"{lacking} of {model.id} is not on this machine, so its tensors were not checked"
        return (note(problem, "`finefit run` fetches it, and checks it before the first step"),)
    require_model(model, tuning, base, reads_rows=reads_rows)
    return ()


def _require_tokenizer(model: Model, base: Path) -> None:
    stub = read_stub(model, base)
    if stub.tokenizer is None:
        problem = f"{stub.folder} has no tokenizer, so no row can be read"
        raise ModelError(problem, "put the model's tokenizer.json and tokenizer_config.json there")


def _weights_to_fetch(model: HubModel, base: Path) -> str:
    """The first file of weights that a run has yet to fetch; empty where all are here. What the repository does not
    have, no run can fetch."""
    folder = read_stub(model, base).folder
    assert folder is not None
    here = {path.name for path in folder.iterdir() if path.is_file()}
    if WEIGHTS in here:
        return ""
    shards = _shards(folder) if INDEX in here else frozenset()
    if shards and shards <= here:
        return ""
    there = files_on_hub(model)
    if there is None and (shards or not _pickled(here)):
        return min(shards - here, default=WEIGHTS)
    names = here | (there or set())
    wanted = {WEIGHTS} if WEIGHTS in names else shards or {INDEX}
    if gone := sorted(wanted - names):
        raise _not_there(model, gone[0], names)
    return min(wanted - here, default="")


def _shards(folder: Path) -> frozenset[str]:
    with reading_model(folder / INDEX):
        return frozenset(SHARDS.validate_python(read_object(folder / INDEX)["weight_map"]).values())


def _pickled(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("pytorch_model") and name.endswith(".bin"))


def _not_there(model: HubModel, gone: str, names: set[str]) -> ModelError:
    if gone != INDEX:
        return ModelError(
            f"{model.id} names the weight file {gone} in {INDEX} and does not have it", "name another model"
        )
    if pickled := _pickled(names):
        problem = f"{model.id} has only pickled weights ({pickled[0]}), which run code when they are loaded"
        remedy = "convert it to safetensors: load the model with transformers and call save_pretrained on it"
        return ModelError(problem, remedy)
    return ModelError(f"{model.id} has no weights: neither {WEIGHTS} nor {INDEX} is there", "name another model")
