"""A user's own task in one Python file: METRICS, `extract` and `score`, or `weigh`, and `build` where rows need it. Its
errors are reported with the line of that file, without a traceback of ours."""

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from finefit.data.rows import Row
from finefit.errors import SpecError
from finefit.spec.tasks import CustomTask
from finefit.stats.metrics import Metric, mean, rate
from finefit.tasks.likelihood import require_finite
from finefit.tasks.task import (
    Likelihood,
    NoResult,
    Reply,
    ScoredReply,
    Task,
    against_references,
    require_right,
    right_answers,
    wrong_answers,
)

_AGGREGATES: Mapping[str, Callable[[str], Metric]] = {"mean": mean, "rate": rate}
_REMEDY = "docs/evaluation.md has an example"


def custom_task(name: str, settings: CustomTask, base: Path | None) -> Task:
    file = _TaskFile(settings, base)
    if file.has("weigh") == (file.has("extract") and file.has("score")):
        raise file.fault("must have either extract(answer) and score(found, reference), or weigh(right, wrong)")
    make = _weighing_task if file.has("weigh") else _generating_task
    return replace(make(name, file, file.metrics()), signature={"file": file.path.name, "sha256": file.digest})


def custom_builder(settings: CustomTask, base: Path | None) -> Callable[[Row], Row]:
    """How rows become prompt and answer, for `data.task`. Raises NoResult for a row that cannot be built."""
    file = _TaskFile(settings, base)
    if not file.has("build"):
        raise SpecError(f"{settings.path} is named in data.task and has no build(prompt, answer)", _REMEDY)
    return file.built


class _TaskFile:
    """The user's file, read once."""

    def __init__(self, settings: CustomTask, base: Path | None) -> None:
        self.path = (base or Path()) / settings.path
        if not self.path.is_file():
            raise SpecError(f"task: there is no file {settings.path}", "its path is relative to the spec file")
        source = self.path.read_bytes()
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
        """The file raises ValueError where an answer holds no result."""
        if not text.strip():
            raise NoResult("the answer is empty")
        try:
            found = self._module.extract(text)
        except ValueError as reason:
            raise NoResult(str(reason) or "extract found no result") from None
        except Exception as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._located("extract", error) from None
        try:
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as reason:
            problem = f"has an extract that gave {_shown(found)}, which no record can hold ({reason})"
            raise self.fault(f"{problem}; give text, numbers, lists or dicts") from None
        return found

    def can_extract(self, text: str) -> bool:
        try:
            self.extract(text)
        except NoResult:
            return False
        return True

    def built(self, row: Row) -> Row:
        """Right and wrong answers are built alike, so that they differ only in what the row says."""
        if not row.prompt:
            raise NoResult("it has no prompt that could be built")
        if row.rejected and (len(row.rejected) != 1 or len(row.messages) != row.num_given + 1):
            problem = "is a pair whose sides differ in more than their last answer"
            raise NoResult(f"{problem}, so there is no one prompt that could be built")
        texts = (row.answer, *row.references, *row.wrong, *(message.content for message in row.rejected))
        made = {text: self._built_text(row.prompt[-1].content, text) for text in dict.fromkeys(texts)}
        if len({prompt for prompt, _ in made.values()}) > 1:
            problem = f"has several answers, and {self.path.name} builds another prompt for each"
            raise NoResult(f"{problem}; give one that does not depend on the answer")
        built = {text: answer for text, (_, answer) in made.items()}
        prompt = replace(row.prompt[-1], content=made[row.answer][0])
        return replace(
            row,
            messages=(*row.prompt[:-1], prompt, replace(row.messages[-1], content=built[row.answer])),
            rejected=tuple(replace(message, content=built[message.content]) for message in row.rejected),
            references=tuple(built[text] for text in row.references),
            wrong=tuple(built[text] for text in row.wrong),
        )

    def _built_text(self, prompt: str, answer: str) -> tuple[str, str]:
        made = self.call("build", prompt, answer)
        if not (isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(text, str) for text in made)):
            raise self.fault(f"has a build that gave {_shown(made)}; give a pair of texts, prompt and answer")
        return made[0], made[1]

    def values(self, function: str, given: Any, metrics: Sequence[Metric]) -> dict[str, float]:
        """Every metric exactly once, each a number from 0 to 1."""
        names = [metric.name for metric in metrics]
        if not isinstance(given, dict):
            raise self.fault(f"has a {function} that gave {_shown(given)}; give a value for each of {', '.join(names)}")
        if missing := [name for name in names if name not in given]:
            raise self.fault(f"has a {function} that gave no {', '.join(missing)}, which METRICS names")
        if foreign := [str(name) for name in given if name not in names]:
            raise self.fault(f"has a {function} that gave {', '.join(foreign)}, which METRICS does not name")
        for metric in metrics:
            is_rate, value = metric.aggregate == "rate", given[metric.name]
            try:
                is_allowed = float(value) in (0, 1) if is_rate else 0 <= float(value) <= 1
            except (TypeError, ValueError):
                is_allowed = False
            if not is_allowed:
                allowed = "0 or 1" if is_rate else "a number from 0 to 1"
                raise self.fault(f"has a {function} that gave {metric.name} = {_shown(value)}; give {allowed}")
        return {name: float(given[name]) for name in names}

    def _guarded(self, doing: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._located(doing, error) from None

    def _located(self, doing: str, error: BaseException) -> SpecError:
        """With the line of the user's file, where it is known."""
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


def _generating_task(name: str, file: _TaskFile, metrics: tuple[Metric, ...]) -> Task:
    def compare(found: Any, reference: Any) -> dict[str, float]:
        return file.values("score", file.call("score", found, reference), metrics)

    task = against_references(name, metrics=metrics, extract=file.extract, compare=compare)

    def require(row: Row) -> None:
        """Scores the reference as an answer: faults of the file show before a model has answered anything."""
        task.require(row)
        task.read(Reply(text=next(text for text in right_answers(row) if file.can_extract(text))), row)

    return replace(task, require=require)


def _weighing_task(name: str, file: _TaskFile, metrics: tuple[Metric, ...]) -> Task:
    def plain(found: Sequence[Likelihood]) -> list[tuple[str, float, int]]:
        return [(one.text, one.logprob, one.tokens) for one in found]

    def read(reply: Reply, _: Row) -> ScoredReply:
        require_finite(reply)
        given = file.call("weigh", plain(reply.right), plain(reply.wrong))
        return ScoredReply(extracted=None, counts=file.values("weigh", given, metrics))

    return Task(
        name=name,
        metrics=metrics,
        read=read,
        nothing=lambda _: {metric.name: 0.0 for metric in metrics},
        require=require_right,
        generates=False,
        candidates=lambda row: (right_answers(row), wrong_answers(row)),
    )
