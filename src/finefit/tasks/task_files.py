"""Files of a user's own tasks and models, known by content: a run keeps a copy of each, and an evaluation has its task
beside its request."""

import hashlib
import shutil
from pathlib import Path

from finefit.errors import SpecError
from finefit.facts.files import read_file, sha256_of
from finefit.spec.models import CustomModel
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.stages import moved
from finefit.spec.tasks import CustomTask, Form, LmEval, Task

_MAX_BYTES = 1 << 30
_FORM = "tasks/data.task.py"
"""No evaluation has this name: a name has no dot."""


def path_of(task: object) -> str | None:
    """Of the file, or for lm-eval the folder, that a task names."""
    match task:
        case CustomTask():
            return task.path
        case LmEval():
            return task.folder
    return None


def task_sha256(evaluation: Evaluation, base: Path) -> str | None:
    named = path_of(evaluation.task)
    if named is None:
        return None
    path, remedy = base / named, "its path is relative to the spec file"
    try:
        if path.is_file():
            return sha256_of(path)
        files = [read_file(file, path) for file in _files(path)]
    except OSError as error:
        problem = f"evaluate {evaluation.label}: {error.filename} cannot be read: {error.strerror}"
        raise SpecError(problem, remedy) from None
    if not files:
        raise SpecError(f"evaluate {evaluation.label}: {path} does not exist or is empty", remedy)
    return hashlib.sha256("\n".join(f"{file.path} {file.sha256}" for file in files).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if (size := sum(path.stat().st_size for path in found)) > _MAX_BYTES:
        problem = f"{folder} holds {size:,} bytes, and a run keeps a copy of its task files"
        raise SpecError(problem, "name a folder that holds only the tasks")
    return found


def take_task_file(evaluation: Evaluation, base: Path, folder: Path) -> Evaluation:
    """Copies what the task names beside a request, which then needs nothing from elsewhere."""
    return _taken(evaluation, base, folder, "task.py" if isinstance(evaluation.task, CustomTask) else "tasks")


def keep_task_files(spec: Spec, base: Path, run: Path) -> Spec:
    """Copies them into a run directory, where the paths of the returned spec start."""
    evaluations = []
    for evaluation in spec.evaluate:
        place = f"tasks/{evaluation.label}" + (".py" if isinstance(evaluation.task, CustomTask) else "")
        evaluations.append(_taken(evaluation, base, run, place))
    form = keep_form(spec.data.task, base, run)
    data = spec.data if form is spec.data.task else spec.data.model_copy(update={"task": form})
    return spec.model_copy(update={"evaluate": tuple(evaluations), "data": data})


def keep_form(form: Form | None, base: Path, run: Path) -> Form | None:
    """How rows are built; a user's own file is copied into a run directory, where the returned path starts."""
    if not isinstance(form, CustomTask):
        return form
    _copy(base / form.path, run / _FORM)
    return form.model_copy(update={"path": _FORM})


def form_content(form: Form | None, base: Path) -> str | None:
    """How rows are built, wherever a user's own file lies: the same content builds the same rows."""
    if isinstance(form, CustomTask):
        return f"python {sha256_of(base / form.path)}"
    return None if form is None else form.model_dump_json()


def keep_model_file(spec: Spec, run: Path) -> Spec:
    """Copies the code of a user's own model into the run directory, where the spec's paths start."""
    if not isinstance(spec.model, CustomModel):
        return spec
    place = f"model/{Path(spec.model.file).name}"
    _copy(run / spec.model.file, run / place)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"file": place})})


def _taken(evaluation: Evaluation, base: Path, folder: Path, place: str) -> Evaluation:
    path = path_of(evaluation.task)
    if path is None:
        return evaluation
    _copy(base / path, folder / place)
    return evaluation.model_copy(update={"task": _with_path(evaluation.task, place), "name": evaluation.label})


def _with_path(task: Task, path: str) -> Task:
    return task.model_copy(update={"path" if isinstance(task, CustomTask) else "folder": path})


def _copy(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)


def without_paths(evaluation: Evaluation) -> Evaluation:
    """The place of a file does not matter, its content does."""
    if path_of(evaluation.task) is None:
        return evaluation
    return evaluation.model_copy(update={"task": _with_path(evaluation.task, ""), "name": None})


def kept_paths(asked: tuple[Evaluation, ...], before: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """With a run's own copies in the place of the files that its spec names, as long as it names the same tasks."""
    known = {evaluation.label: evaluation for evaluation in before}
    return tuple(_with_kept_path(one, known[one.label]) if one.label in known else one for one in asked)


def _with_kept_path(asked: Evaluation, known: Evaluation) -> Evaluation:
    here, there = (moved(evaluation, lambda _: "").task for evaluation in (asked, known))
    is_same = here == there and here != asked.task
    return asked.model_copy(update={"task": known.task, "name": known.name}) if is_same else asked
