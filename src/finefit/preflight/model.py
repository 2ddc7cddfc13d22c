"""The check of a model's own files, by their headers alone: `check` and `run` refuse here what a worker could not
load."""

from importlib.metadata import version
from pathlib import Path

from finefit.artifacts.cache import cached_record, source_digest
from finefit.artifacts.forecasts import LoadProof
from finefit.errors import ModelError
from finefit.facts.files import find_weight_files
from finefit.model.resolve_model import ResolvedModel, model_outline, resolve_model, resolve_start
from finefit.plan import client
from finefit.spec.models import CustomModel, HubModel, Model, ShapeModel, Tuning

_MAX_CACHED = 200


def require_model(model: Model, tuning: Tuning | None, base: Path, *, reads_rows: bool = True) -> ResolvedModel:
    """`base`: where relative paths start; `tuning`: None for a model that is not trained. Fetches the weights
    of a model on the hub."""
    resolved = resolve_model(model, base) if tuning is None else resolve_start(model, tuning, base)
    if isinstance(model, CustomModel):  # whose code alone knows its tensors
        return resolved
    if reads_rows and model_outline(model, base).tokenizer is None:
        problem = f"{resolved.folder} has no tokenizer, so no row can be read"
        raise ModelError(problem, "put the model's tokenizer.json and tokenizer_config.json there")
    asked = None if tuning is None else tuning.model_dump(mode="json", exclude={"adapter"})
    libraries = [version(name) for name in ("transformers", "torch", "peft")]
    code = source_digest("model", "facts", "vision")
    content = [resolved.fingerprint, resolved.name, asked, libraries, code]

    def proved() -> LoadProof:
        proof: LoadProof = client.ask("prove_loadable", resolved.folder, tuning, resolved.name, base)
        return proof

    cached_record("loadable", content, LoadProof, proved, max_entries=_MAX_CACHED)
    return resolved


def require_model_here(model: Model, tuning: Tuning | None, base: Path, *, reads_rows: bool = True) -> None:
    """The same as far as the files are on this machine: `check` downloads no weights."""
    if isinstance(model, ShapeModel) or (isinstance(model, HubModel) and not _has_weights(model, base)):
        return
    require_model(model, tuning, base, reads_rows=reads_rows)


def _has_weights(model: HubModel, base: Path) -> bool:
    folder = model_outline(model, base).folder
    try:
        return folder is not None and bool(find_weight_files(folder))
    except ModelError:  # absent, or some of them: a run fetches the rest
        return False
