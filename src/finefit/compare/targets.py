"""What a command names -> what is compared. An evaluation of several models is all of them; a pipeline is what its stages have compared."""

from collections.abc import Sequence
from pathlib import Path

from finefit.artifacts.pipelines import PipelineState, StageState
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir, find_run, is_pipeline
from finefit.artifacts.stages import models_of
from finefit.compare.records import Comparison

FILE = "comparison.json"
"""Of a stage that compares, in its output."""


def widened(targets: Sequence[str]) -> list[str]:
    """With every evaluation replaced by its models; a pipeline with one evaluation stands for that."""
    return [one for target in targets for one in _widened(target)]


def _widened(target: str) -> list[str]:
    place = _place(target)
    if place is not None and is_pipeline(place):
        scoring = [stage for stage in _stages(place) if stage.kind == "evaluate"]
        place = _folder(place, scoring[0]) if len(scoring) == 1 else None
    models = [] if place is None else models_of(place)
    return [str(model) for model in models] or [target]


def kept(targets: Sequence[str]) -> tuple[Comparison, ...]:
    """What a stage that compares has found, or all of a pipeline's; none where one target alone does not mean such."""
    place = _place(targets[0]) if len(targets) == 1 else None
    if place is None:
        return ()
    if not is_pipeline(place):
        return (_read(place),) if _file(place).is_file() else ()
    folders = [_folder(place, stage) for stage in _stages(place) if stage.kind == "compare"]
    return tuple(_read(folder) for folder in folders if _file(folder).is_file())


def _place(target: str) -> Path | None:
    """None of what names a checkpoint, which is one of a run."""
    return find_run(Path(target)) if Path(target).is_dir() or ":" not in target else None


def _stages(pipeline: Path) -> tuple[StageState, ...]:
    return read_record(RunDir(pipeline).state, PipelineState).stages


def _folder(pipeline: Path, stage: StageState) -> Path:
    return (pipeline / stage.place).resolve()


def _file(place: Path) -> Path:
    return StageDir(place).output / FILE


def _read(place: Path) -> Comparison:
    return read_record(_file(place), Comparison)
