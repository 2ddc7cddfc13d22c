"""A user's own task files. A task in one Python file has METRICS, `extract` and `score`, or `weigh`, and `build` if
rows need it; its errors are reported with the line of that file, without a traceback of finefit's. A run keeps a copy
of every such file, identified by its content, and an evaluation has its task beside its request."""

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from finefit import bounded, tasks
from finefit.data.rows import BadRow, Row, as_item, text_key
from finefit.errors import SpecError
from finefit.facts.files import read_file, sha256_of
from finefit.spec.models import CustomModel
from finefit.spec.schema import Evaluation, Spec
from finefit.spec.stages import moved
from finefit.spec.tasks import AmrForm, CustomTask, Form, LmEval
from finefit.spec.tasks import Task as TaskSettings
from finefit.stats.metrics import Metric, mean, rate
from finefit.tasks.amr import build_row

_MAX_BYTES = 1 << 30
_FORM = "tasks/data.task.py"
"""No evaluation can have this name, because names contain no dot."""
_AGGREGATES: Mapping[str, Callable[[str], Metric]] = {"mean": mean, "rate": rate}
_REMEDY = "docs/evaluation.md has an example"


def custom_task(name: str, settings: CustomTask, base: Path | None) -> tasks.Task:
    file = _TaskFile(settings, base)
    if file.has("weigh") == (file.has("extract") and file.has("score")):
        raise file.fault("must have either extract(answer) and score(found, reference), or weigh(right, wrong)")
    make = _weighing_task if file.has("weigh") else _generating_task
    return replace(make(name, file, file.metrics()), signature={"file": file.path.name, "sha256": file.digest})


def row_builder(form: Form | None, *, base: Path) -> Callable[[Row], Row | BadRow] | None:
    """Builds prompt and answer from a row as it was read; None without a form. A row that cannot be built becomes a
    BadRow. A built row keeps its key as an item."""
    if form is None:
        return None
    build: Callable[[Row], Row]
    if isinstance(form, AmrForm):
        build = partial(build_row, form)
    else:
        file = _TaskFile(form, base)
        if not file.has("build"):
            raise SpecError(f"{form.path} is named in data.task and has no build(prompt, answer)", _REMEDY)
        build = file.built

    def built(row: Row) -> Row | BadRow:
        try:
            return replace(build(row), key=text_key(as_item(row)))
        except tasks.NoResult as reason:
            return BadRow(row.source, row.number, str(reason), row.part)

    return built


class _TaskFile:
    def __init__(self, settings: CustomTask, base: Path | None) -> None:
        self.path = (base or Path()) / settings.path
        if not self.path.is_file():
            raise SpecError(f"task: there is no file {settings.path}", "its path is relative to the spec file")
        try:
            source = bounded.read_bytes(self.path, bounded.MAX_SOURCE_BYTES)
        except OSError as error:
            raise SpecError(f"task: {settings.path} cannot be read: {error.strerror}", _REMEDY) from None
        self.digest = sha256(source).hexdigest()
        self._module = ModuleType(f"finefit_task_{self.digest[:16]}")
        self._module.__file__ = str(self.path)
        sys.modules[self._module.__name__] = self._module  # a dataclass in it looks itself up
        self._guarded("import", lambda: exec(compile(source, str(self.path), "exec"), self._module.__dict__))

    def has(self, name: str) -> bool:
        return callable(getattr(self._module, name, None))

    def fault(self, problem: str) -> SpecError:
        return SpecError(f"the task file {self.path.name} {problem}", _REMEDY)

    def metrics(self) -> tuple[Metric, ...]:
        named = getattr(self._module, "METRICS", None)
        is_named = isinstance(named, dict) and all(isinstance(name, str) and name.isidentifier() for name in named)
        if not named or not is_named:
            raise self.fault(f"has METRICS = {named!r}; give names with mean or rate, such as {{'score': 'mean'}}")
        if unknown := {name: kind for name, kind in named.items() if kind not in _AGGREGATES}:
            kinds = "a metric is a mean of values from 0 to 1, or a rate of values that are 0 or 1"
            raise self.fault(f"has METRICS with {unknown}: {kinds}")
        return tuple(_AGGREGATES[kind](name) for name, kind in named.items())

    def call(self, name: str, *arguments: Any) -> Any:
        return self._guarded(name, lambda: getattr(self._module, name)(*arguments))

    def extract(self, text: str) -> Any:
        """The file raises ValueError if an answer has no result."""
        if not text.strip():
            raise tasks.NoResult("the answer is empty")
        try:
            found = self._module.extract(text)
        except ValueError as reason:
            raise tasks.NoResult(str(reason) or "extract found no result") from None
        except Exception as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._located("extract", error) from None
        try:
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as reason:
            problem = f"has an extract that returned {_shown(found)}, which no record can hold ({reason})"
            raise self.fault(f"{problem}; return text, numbers, lists or dicts") from None
        return found

    def built(self, row: Row) -> Row:
        """Right and wrong answers are built alike, so that they differ only in what the row says."""
        if not row.prompt:
            raise tasks.NoResult("it has no prompt that could be built")
        if row.rejected and (len(row.rejected) != 1 or len(row.messages) != row.num_given + 1):
            problem = "is a pair whose sides differ in more than their last answer"
            raise tasks.NoResult(f"{problem}, so there is no one prompt that could be built")
        texts = (row.answer, *row.references, *row.wrong, *(message.content for message in row.rejected))
        prompts, built = set[str](), dict[str, str]()
        for text in dict.fromkeys(texts):
            made = self.call("build", row.prompt[-1].content, text)
            if not (isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, str) for part in made)):
                raise self.fault(f"has a build that returned {_shown(made)}; return a pair of texts, prompt and answer")
            prompts.add(made[0])
            built[text] = made[1]
        if len(prompts) > 1:
            problem = f"has several answers, and {self.path.name} builds another prompt for each"
            raise tasks.NoResult(f"{problem}; give one that does not depend on the answer")
        prompt = replace(row.prompt[-1], content=prompts.pop())
        return replace(
            row,
            messages=(*row.prompt[:-1], prompt, replace(row.messages[-1], content=built[row.answer])),
            rejected=tuple(replace(message, content=built[message.content]) for message in row.rejected),
            references=tuple(built[text] for text in row.references),
            wrong=tuple(built[text] for text in row.wrong),
        )

    def values(self, function: str, metrics: Sequence[Metric], *arguments: Any) -> dict[str, float]:
        """Every metric exactly once, each a number from 0 to 1."""
        names, given = [metric.name for metric in metrics], self.call(function, *arguments)
        if not isinstance(given, dict):
            raise self.fault(
                f"has a {function} that returned {_shown(given)}; return a value for each of {', '.join(names)}"
            )
        if missing := [name for name in names if name not in given]:
            raise self.fault(f"has a {function} that returned no {', '.join(missing)}, which METRICS names")
        if foreign := [str(name) for name in given if name not in names]:
            raise self.fault(f"has a {function} that returned {', '.join(foreign)}, which METRICS does not name")
        for metric in metrics:
            is_rate, value = metric.aggregate == "rate", given[metric.name]
            try:
                is_allowed = float(value) in (0, 1) if is_rate else 0 <= float(value) <= 1
            except (TypeError, ValueError):
                is_allowed = False
            if not is_allowed:
                allowed = "0 or 1" if is_rate else "a number from 0 to 1"
                raise self.fault(f"has a {function} that returned {metric.name} = {_shown(value)}; return {allowed}")
        return {name: float(given[name]) for name in names}

    def _guarded(self, doing: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._located(doing, error) from None

    def _located(self, doing: str, error: BaseException) -> SpecError:
        """Adds the line of the user's file, if it is known."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            lines.append(error.lineno)
        place = f"{self.path.name}:{lines[-1]}" if lines and lines[-1] is not None else self.path.name
        problem = f"the task file {place} failed in {doing}: {type(error).__name__}: {error}"
        return SpecError(problem, "fix the file; the answers are then made again")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _generating_task(name: str, file: _TaskFile, metrics: tuple[Metric, ...]) -> tasks.Task:
    compare = partial(file.values, "score", metrics)
    task = tasks.against_references(name, metrics=metrics, extract=file.extract, compare=compare)

    def require(row: Row) -> None:
        """Scores the reference as an answer, so that faults of the file show before a model has answered anything."""
        task.require(row)
        for text in tasks.right_answers(row):
            with suppress(tasks.NoResult):
                task.read(tasks.Reply(text=text), row)
                return

    return replace(task, require=require)


def _weighing_task(name: str, file: _TaskFile, metrics: tuple[Metric, ...]) -> tasks.Task:
    def read(reply: tasks.Reply, _: Row) -> tasks.ScoredReply:
        tasks.require_finite(reply)
        right, wrong = ([astuple(found) for found in side] for side in (reply.right, reply.wrong))
        return tasks.ScoredReply(extracted=None, counts=file.values("weigh", metrics, right, wrong))

    return tasks.Task(
        name=name,
        metrics=metrics,
        read=read,
        nothing=lambda _: {metric.name: 0.0 for metric in metrics},
        require=tasks.require_right,
        generates=False,
        candidates=lambda row: (tasks.right_answers(row), tasks.distinct(row.wrong)),
    )


def path_of(task: object) -> str | None:
    """The path of the file or, for lm-eval, of the folder that a task names."""
    return task.path if isinstance(task, CustomTask) else task.folder if isinstance(task, LmEval) else None


def task_sha256(evaluation: Evaluation, base: Path) -> str | None:
    named = path_of(evaluation.task)
    if named is None:
        return None
    path, remedy = base / named, "its path is relative to the spec file"
    try:
        if path.is_file():
            return sha256_of(path)
        found = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        if (size := sum(file.stat().st_size for file in found)) > _MAX_BYTES:
            problem = f"{path} holds {size:,} bytes, and a run keeps a copy of its task files"
            raise SpecError(problem, "name a folder that holds only the tasks")
        files = [read_file(file, path) for file in found]
    except OSError as error:
        problem = f"evaluate {evaluation.label}: {error.filename} cannot be read: {error.strerror}"
        raise SpecError(problem, remedy) from None
    if not files:
        raise SpecError(f"evaluate {evaluation.label}: {path} does not exist or is empty", remedy)
    return sha256("\n".join(f"{file.path} {file.sha256}" for file in files).encode()).hexdigest()


def take_task_file(evaluation: Evaluation, base: Path, folder: Path) -> Evaluation:
    """Copies what the task names beside a request, which then needs nothing from elsewhere."""
    return _taken(evaluation, base, folder, "task.py" if isinstance(evaluation.task, CustomTask) else "tasks")


def keep_task_files(spec: Spec, base: Path, run: Path) -> Spec:
    """Copies them into a run directory; the paths of the returned spec are relative to it."""
    evaluations = tuple(
        _taken(one, base, run, f"tasks/{one.label}" + (".py" if isinstance(one.task, CustomTask) else ""))
        for one in spec.evaluate
    )
    form = keep_form(spec.data.task, base, run)
    data = spec.data if form is spec.data.task else spec.data.model_copy(update={"task": form})
    return spec.model_copy(update={"evaluate": evaluations, "data": data})


def keep_form(form: Form | None, base: Path, run: Path) -> Form | None:
    """Returns how rows are built, with a user's own file copied into a run directory and its path relative to that."""
    if not isinstance(form, CustomTask):
        return form
    _copy(base / form.path, run / _FORM)
    return form.model_copy(update={"path": _FORM})


def form_content(form: Form | None, base: Path) -> str | None:
    """Identifies how rows are built, wherever a user's own file is: the same content builds the same rows."""
    if isinstance(form, CustomTask):
        return f"python {sha256_of(base / form.path)}"
    return None if form is None else form.model_dump_json()


def keep_model_file(spec: Spec, run: Path) -> Spec:
    """Copies the code of a user's own model into the run directory, to which the spec's paths are relative."""
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


def _with_path(task: TaskSettings, path: str) -> TaskSettings:
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
    """Leaves out paths, because a file's content matters and its place does not."""
    if path_of(evaluation.task) is None:
        return evaluation
    return evaluation.model_copy(update={"task": _with_path(evaluation.task, ""), "name": None})


def kept_paths(asked: tuple[Evaluation, ...], before: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """The spec with a run's own copies in place of the files that it names, as long as it names the same tasks."""
    known = {evaluation.label: evaluation for evaluation in before}
    kept = []
    for one in asked:
        if (own := known.get(one.label)) is not None:
            here, there = (moved(evaluation, lambda _: "").task for evaluation in (one, own))
            if here == there and here != one.task:
                one = one.model_copy(update={"task": own.task, "name": own.name})
        kept.append(one)
    return tuple(kept)
