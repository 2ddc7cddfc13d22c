"""Which folder `finefit export` and other users of a single model mean: `RUN`, `RUN:CHECKPOINT`, a stage of a
pipeline, or any folder with a model or an adapter."""

from pathlib import Path

from finefit.artifacts.checkpoint import list_checkpoints
from finefit.artifacts.reading import is_there
from finefit.artifacts.rundir import find_run, is_pipeline, is_run, names_checkpoint, open_target, stage_of
from finefit.errors import RunError
from finefit.facts.files import INDEX, WEIGHTS
from finefit.model.resolve_model import ADAPTER_CONFIG
from finefit.run.eval_subjects import resolve_checkpoint

_MODEL_FILES = (ADAPTER_CONFIG, WEIGHTS, INDEX)


def model_folder(target: str, checkpoint: str | None = None, *, default: str = "best") -> str:
    """What `open_subject` takes. `default`: of a run if neither `target` nor `checkpoint` names one; a run without a
    best checkpoint has a final one."""
    path, _, named = target.rpartition(":") if names_checkpoint(target) else (target, "", checkpoint)
    if target.partition(":")[0] in ("hub", "embedded") and not Path(target).exists():
        path, named = target, checkpoint
    place = find_run(Path(path)) if Path(path).exists() or named != checkpoint or _is_below_run(Path(path)) else None
    if place is not None and is_run(place) and not is_pipeline(place):
        return str(_checkpoint_folder(path, named or checkpoint, default))
    if checkpoint is not None or named is not None:
        raise RunError(f"{target} is not a run, so it has no checkpoint {named or checkpoint}", "leave it out")
    if place is not None and is_run(place):
        open_target(target)  # says that a pipeline has several runs, and which
    if place is not None and is_there(place / "output"):
        place = place / "output"
    return path if place is None else str(_with_model(place, target))


def _is_below_run(path: Path) -> bool:
    return any(is_pipeline(parent) for parent in path.parents)


def _checkpoint_folder(path: str, checkpoint: str | None, default: str) -> Path:
    run, _ = open_target(path)
    where = stage_of(run)
    if is_there(where.eval_stage):
        raise RunError(f"{path} only evaluates, so it has made no model", "name the model itself")
    if checkpoint == "base":
        raise RunError("the base is not what this run has trained", "name the base's own folder")
    asked = checkpoint
    if asked is None:
        asked = default if (where.checkpoints / default).is_dir() else "final"
        asked = asked if (where.checkpoints / asked).is_dir() else resolve_newest(where.checkpoints, path)
    return where.checkpoints / resolve_checkpoint(where, asked)


def resolve_newest(checkpoints: Path, run: str) -> str:
    found = list_checkpoints(checkpoints)
    if not found:
        raise RunError(f"{run} has no checkpoint yet", f"`finefit run {run}` goes on with it")
    return found[-1].name


def _with_model(place: Path, target: str) -> Path:
    if place.is_dir() and not any((place / name).is_file() for name in _MODEL_FILES):
        problem = f"{target} holds neither a model nor an adapter"
        raise RunError(problem, "name a run, a checkpoint, a stage that trains or merges, or a folder with a model")
    return place
