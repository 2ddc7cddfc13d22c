"""Files of a user's own, known by content: a run keeps a copy of each, and an evaluation has its task beside its request."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from finefit.errors import SpecError
from finefit.facts.files import read_file
from finefit.spec.models import CustomModel, FolderModel
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.tasks import Form, LmEval, OwnTask, Summary, Task, TruthfulQa

TASK_FILE = "task.py"
TASK_FOLDER = "tasks"
MODEL_FOLDER = "model"
_LARGEST_BYTES = 1 << 30
_FORM = "tasks/data.task.py"
"""No evaluation is called so: a name has no dot."""


def path_of(task: object) -> str | None:
    """Of the file, or for lm-eval of the folder, that a task names."""
    match task:
        case OwnTask():
            return task.path
        case LmEval():
            return task.folder
    return None


def task_sha256(evaluation: Evaluation, base: Path) -> str | None:
    path = path_of(evaluation.task)
    return None if path is None else _sha256(base / path, evaluation.label)


def _sha256(path: Path, label: str) -> str:
    try:
        if path.is_file():
            return read_file(path, path.parent).sha256
        files = [read_file(file, path) for file in _files(path)]
    except OSError as error:
        raise SpecError(
            f"evaluate {label}: {error.filename} cannot be read: {error.strerror}",
            "its path is relative to the spec file",
        ) from None
    if not files:
        raise SpecError(
            f"evaluate {label}: {path} is not there, or holds nothing", "its path is relative to the spec file"
        )
    return hashlib.sha256("\n".join(f"{file.path} {file.sha256}" for file in files).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    found = (
        sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        if folder.is_dir()
        else []
    )
    if (size := sum(path.stat().st_size for path in found)) > _LARGEST_BYTES:
        raise SpecError(
            f"{folder} holds {size:,} bytes, and a run keeps a copy of its task files",
            "name a folder that holds the tasks and no more",
        )
    return found


def take_task_file(evaluation: Evaluation, base: Path, folder: Path) -> Evaluation:
    """Copies what the task names beside a request, which then needs nothing from elsewhere."""
    return _taken(evaluation, base, folder, TASK_FILE if isinstance(evaluation.task, OwnTask) else TASK_FOLDER)


def keep_task_files(spec: Spec, base: Path, run: Path) -> Spec:
    """Copies them into a run directory; the paths of the spec that comes back start there."""
    evaluations = []
    for evaluation in spec.evaluate:
        place = f"tasks/{evaluation.label}" + (".py" if isinstance(evaluation.task, OwnTask) else "")
        evaluations.append(_taken(evaluation, base, run, place))
    form = keep_form(spec.data.task, base, run)
    data = spec.data if form is spec.data.task else spec.data.model_copy(update={"task": form})
    return spec.model_copy(update={"evaluate": tuple(evaluations), "data": data})


def keep_form(form: Form | None, base: Path, run: Path) -> Form | None:
    """What rows are built with; a file of the user's own is copied into a run directory, and its path starts there."""
    if not isinstance(form, OwnTask):
        return form
    _copy(base / form.path, run / _FORM)
    return form.model_copy(update={"path": _FORM})


def form_content(form: Form | None, base: Path) -> str | None:
    """What rows are built with, wherever a file of the user's own lies: the same content builds the same rows."""
    if isinstance(form, OwnTask):
        return f"python {read_file(base / form.path, base).sha256}"
    return None if form is None else form.model_dump_json()


def keep_model_file(spec: Spec, run: Path) -> Spec:
    """The code that a model is built by is copied into the run directory, where the spec's paths start: the run needs no other."""
    if not isinstance(spec.model, CustomModel):
        return spec
    place = f"{MODEL_FOLDER}/{Path(spec.model.file).name}"
    _copy(run / spec.model.file, run / place)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"file": place})})


def _taken(evaluation: Evaluation, base: Path, folder: Path, place: str) -> Evaluation:
    path = path_of(evaluation.task)
    if path is None:
        return evaluation
    _copy(base / path, folder / place)
    return evaluation.model_copy(update={"task": _renamed(evaluation.task, place), "name": evaluation.label})


def _renamed(task: Task, path: str) -> Task:
    return task.model_copy(update={"path" if isinstance(task, OwnTask) else "folder": path})


def _copy(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)


def moved_task(evaluation: Evaluation, move: Callable[[str], str]) -> Evaluation:
    evaluation, path = _with_moved_model(evaluation, move), path_of(evaluation.task)
    return evaluation if path is None else evaluation.model_copy(update={"task": _renamed(evaluation.task, move(path))})


def _with_moved_model(evaluation: Evaluation, move: Callable[[str], str]) -> Evaluation:
    """A model that a task judges with stays where it is."""
    match evaluation.task:
        case Summary(nli=FolderModel(path=path)):
            return evaluation.model_copy(
                update={"task": evaluation.task.model_copy(update={"nli": FolderModel(kind="folder", path=move(path))})}
            )
        case TruthfulQa(checkpoint=str(path)):
            return evaluation.model_copy(update={"task": evaluation.task.model_copy(update={"checkpoint": move(path)})})
    return evaluation


def without_paths(evaluation: Evaluation) -> Evaluation:
    """Where a file lies does not matter, what it holds does."""
    return (
        evaluation
        if path_of(evaluation.task) is None
        else evaluation.model_copy(update={"task": _renamed(evaluation.task, ""), "name": None})
    )


def kept_paths(asked: tuple[Evaluation, ...], before: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """A run's own copies in the place of the files that its spec names, as long as it names the same ones."""
    known = {evaluation.label: evaluation for evaluation in before}
    return tuple(_kept(e, known[e.label]) if e.label in known else e for e in asked)


def _kept(asked: Evaluation, known: Evaluation) -> Evaluation:
    here, there = (moved_task(evaluation, lambda _: "").task for evaluation in (asked, known))
    is_same = here == there and here != asked.task
    return asked.model_copy(update={"task": known.task, "name": known.name}) if is_same else asked
