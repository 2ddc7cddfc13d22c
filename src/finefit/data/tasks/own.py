"""A task in one Python file of the user's: METRICS, `extract` and `score`, or `weigh`, and `build` where rows need it.

What goes wrong in it is told with its own line; no traceback of ours stands around it.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from finefit.data.rows import Row
from finefit.data.tasks.likely import require_finite
from finefit.data.tasks.references import require_right, right_answers, wrong_answers
from finefit.data.tasks.task import Likelihood, NoResult, Reading, Reply, Task, against_references
from finefit.errors import SpecError
from finefit.spec.tasks import OwnTask
from finefit.stats.metrics import Metric, mean, rate

_KINDS: Mapping[str, Callable[[str], Metric]] = {"mean": mean, "rate": rate}
_REMEDY = "docs/evaluation.md has an example"


def own_task(name: str, settings: OwnTask, base: Path | None) -> Task:
    file = _Own(_file(settings, base or Path()))
    if file.has("weigh") == (file.has("extract") and file.has("score")):
        raise file.fault("must have either extract(answer) and score(found, reference), or weigh(right, wrong)")
    make = _weighed if file.has("weigh") else _generated
    task = make(name, file, file.metrics())
    return replace(task, signature={"file": file.path.name, "sha256": file.digest})


def own_form(settings: OwnTask, base: Path | None) -> Callable[[Row], Row]:
    """How rows become prompt and answer, for `data.task`."""
    file = _Own(_file(settings, base or Path()))
    if not file.has("build"):
        raise SpecError(f"{settings.path} is named in data.task and has no build(prompt, answer)", _REMEDY)
    return file.built


def _file(settings: OwnTask, base: Path) -> Path:
    named = base / settings.path
    if not named.is_file():
        raise SpecError(f"task: there is no file {settings.path}", "its path is relative to the spec file")
    return named


class _Own:
    """The user's file, read once."""

    def __init__(self, path: Path) -> None:
        source = path.read_bytes()
        self.path, self.digest = path, sha256(source).hexdigest()
        self._module = ModuleType(f"finefit_task_{self.digest[:16]}")
        self._module.__file__ = str(path)
        sys.modules[self._module.__name__] = self._module  # a dataclass in it looks itself up
        self._guarded("import", lambda: exec(compile(source, str(path), "exec"), self._module.__dict__))

    def has(self, name: str) -> bool:
        return callable(getattr(self._module, name, None))

    def fault(self, problem: str) -> SpecError:
        return SpecError(f"the task file {self.path.name} {problem}", _REMEDY)

    def metrics(self) -> tuple[Metric, ...]:
        named = getattr(self._module, "METRICS", None)
        if (
            not isinstance(named, dict)
            or not named
            or not all(isinstance(name, str) and name.isidentifier() for name in named)
        ):
            raise self.fault(f"has METRICS = {named!r}; give names with mean or rate, such as {{'score': 'mean'}}")
        if unknown := {name: kind for name, kind in named.items() if kind not in _KINDS}:
            raise self.fault(
                f"has METRICS with {unknown}: a metric is a mean of values from 0 to 1, or a rate of values that are 0 or 1"
            )
        return tuple(_KINDS[kind](name) for name, kind in named.items())

    def call(self, name: str, *arguments: Any) -> Any:
        return self._guarded(name, lambda: getattr(self._module, name)(*arguments))

    def extract(self, text: str) -> Any:
        """ValueError is how the file says that an answer holds no result."""
        try:
            found = self._module.extract(text) if text.strip() else _empty()
        except ValueError as reason:
            raise NoResult(str(reason) or "extract found no result") from None
        except Exception as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._told("extract", error) from None
        self._require_plain(found)
        return found

    def can_extract(self, text: str) -> bool:
        try:
            self.extract(text)
        except NoResult:
            return False
        return True

    def built(self, row: Row) -> Row:
        """All that is answered to the prompt is built as the answer is: what differs between right and wrong ones is what the row says."""
        if not row.prompt:
            raise NoResult("it has no prompt that could be built")
        if row.rejected and (len(row.rejected) != 1 or len(row.messages) != row.num_given + 1):
            raise NoResult(
                "is a pair whose sides differ in more than their last answer, so there is no one prompt that could be built"
            )
        texts = (row.answer, *row.references, *row.wrong, *(message.content for message in row.rejected))
        made = {text: self._made(row.prompt[-1].content, text) for text in dict.fromkeys(texts)}
        if len({prompt for prompt, _ in made.values()}) > 1:
            raise NoResult(
                f"has several answers, and {self.path.name} builds another prompt for each; give one that does not depend on the answer"
            )
        built = {text: answer for text, (_, answer) in made.items()}
        asked = replace(row.prompt[-1], content=made[row.answer][0])
        return replace(
            row,
            messages=(*row.prompt[:-1], asked, replace(row.messages[-1], content=built[row.answer])),
            rejected=tuple(replace(message, content=built[message.content]) for message in row.rejected),
            references=tuple(built[text] for text in row.references),
            wrong=tuple(built[text] for text in row.wrong),
        )

    def _made(self, prompt: str, answer: str) -> tuple[str, str]:
        made = self.call("build", prompt, answer)
        if not (isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(text, str) for text in made)):
            raise self.fault(f"has a build that gave {_shown(made)}; give a pair of texts, prompt and answer")
        return made[0], made[1]

    def values(self, function: str, given: Any, metrics: Sequence[Metric]) -> dict[str, float]:
        """Each named metric once, and a number from 0 to 1."""
        names = [metric.name for metric in metrics]
        if not isinstance(given, dict):
            raise self.fault(f"has a {function} that gave {_shown(given)}; give a value for each of {', '.join(names)}")
        if missing := [name for name in names if name not in given]:
            raise self.fault(f"has a {function} that gave no {', '.join(missing)}, which METRICS names")
        if foreign := [str(name) for name in given if name not in names]:
            raise self.fault(f"has a {function} that gave {', '.join(foreign)}, which METRICS does not name")
        for metric in metrics:
            self._require_share(function, metric, given[metric.name])
        return {name: float(given[name]) for name in names}

    def _require_share(self, function: str, metric: Metric, value: Any) -> None:
        allowed = "0 or 1" if metric.aggregate == "rate" else "a number from 0 to 1"
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.fault(f"has a {function} that gave {metric.name} = {_shown(value)}; give {allowed}") from None
        if not 0 <= number <= 1 or (metric.aggregate == "rate" and number not in (0, 1)) or math.isnan(number):
            raise self.fault(f"has a {function} that gave {metric.name} = {_shown(value)}; give {allowed}")

    def _require_plain(self, found: Any) -> None:
        try:
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as reason:
            raise self.fault(
                f"has an extract that gave {_shown(found)}, which no record can hold ({reason}); give text, numbers, lists or dicts"
            ) from None

    def _guarded(self, doing: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 whatever a user's file raises is the user's
            raise self._told(doing, error) from None

    def _told(self, doing: str, error: BaseException) -> SpecError:
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
        line = (
            error.lineno
            if isinstance(error, SyntaxError) and error.filename == str(self.path)
            else own[-1]
            if own
            else None
        )
        place = self.path.name if line is None else f"{self.path.name}:{line}"
        return SpecError(
            f"the task file {place} failed in {doing}: {type(error).__name__}: {error}",
            "mend the file; answers are asked for again then",
        )


def _empty() -> Any:
    raise ValueError("the answer is empty")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _generated(name: str, file: _Own, metrics: tuple[Metric, ...]) -> Task:
    def compare(found: Any, reference: Any) -> dict[str, float]:
        return file.values("score", file.call("score", found, reference), metrics)

    task = against_references(name, metrics=metrics, extract=file.extract, compare=compare)

    def require(row: Row) -> None:
        """The reference as an answer: what is wrong with the file shows before a model has answered anything."""
        task.require(row)
        task.read(Reply(text=next(text for text in right_answers(row) if file.can_extract(text))), row)

    return replace(task, require=require)


def _weighed(name: str, file: _Own, metrics: tuple[Metric, ...]) -> Task:
    def read(reply: Reply, _: Row) -> Reading:
        require_finite(reply)
        given = file.call("weigh", _plain(reply.right), _plain(reply.wrong))
        return Reading(extracted=None, counts=file.values("weigh", given, metrics))

    return Task(
        name=name,
        metrics=metrics,
        read=read,
        nothing=lambda _: {metric.name: 0.0 for metric in metrics},
        require=require_right,
        generates=False,
        candidates=lambda row: (right_answers(row), wrong_answers(row)),
    )


def _plain(found: Sequence[Likelihood]) -> list[tuple[str, float, int]]:
    return [(one.text, one.logprob, one.tokens) for one in found]
