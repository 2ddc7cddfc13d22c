"""What `finefit eval` is asked for, in words, -> evaluations."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finefit.errors import SpecError
from finefit.pipeline.taskfiles import moved_task
from finefit.spec.reader import Reader
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import task_kinds
from finefit.spec.wording import schema_faults


def named_evaluations(asked: Iterable[str], declared: Iterable[Evaluation] = ()) -> list[Evaluation]:
    """A task's name, a label that the spec has, a mapping in YAML, or a file: `.yaml` with one or several evaluations, `.py` with a task of one's
    own.

    Paths that come back are absolute, or start where those of `declared` do."""
    known = {evaluation.label: evaluation for evaluation in declared}
    found = [one for text in asked for one in ([known[text]] if text in known else _read(text))]
    labels = [evaluation.label for evaluation in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise SpecError(
            f"two tasks are called {', '.join(twice)}", "give them a name each: --task '{name: ..., task: ...}'"
        )
    return found


def _read(text: str) -> list[Evaluation]:
    path = Path(text)
    if path.suffix == ".py":
        return [_validated({"task": {"kind": "python", "path": str(path.resolve())}}, text)]
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise SpecError(
                f"--task {text}: there is no such file", f"name a file, or one of {', '.join(task_kinds())}"
            )
        return [_moved(one, path.parent) for one in _parsed(path.read_text(encoding="utf-8"), text)]
    return [_moved(one, Path()) for one in _parsed(text, text)]


def _parsed(text: str, where: str) -> list[Evaluation]:
    reader = Reader(text, lambda line: (line, f"--task {where}:{line}" if "\n" in text else f"--task {where}"))
    value = reader.read()
    if reader.faults:
        raise SpecError(
            "\n".join(str(fault) for fault in reader.faults),
            "quote it as one argument: --task '{kind: rouge, stemmer: false}'",
        )
    return [_validated(_as_evaluation(one), where) for one in (value if isinstance(value, list) else [value])]


def _as_evaluation(value: Any) -> Any:
    """A bare task is an evaluation with nothing else said."""
    return value if isinstance(value, dict) and "task" in value else {"task": value}


def _validated(value: Any, where: str) -> Evaluation:
    try:
        return Evaluation.model_validate_json(json.dumps(value))
    except ValidationError as error:
        if isinstance(value["task"], str) and value["task"] not in task_kinds():
            raise SpecError(
                f"there is no task {value['task']}",
                f"there are {', '.join(task_kinds())}; or a .yaml or .py file of your own",
            ) from None
        faults = schema_faults(error.errors(), {(): (1, f"--task {where}")}, Evaluation)
        raise SpecError("\n".join(map(str, faults)), "docs/spec.md has the tasks and their keys") from None


def _moved(evaluation: Evaluation, base: Path) -> Evaluation:
    return moved_task(evaluation, lambda path: str((base / path).resolve()))


def overlaid(evaluation: Evaluation, *, limit: int | None, max_new_tokens: int | None, batch: int | None) -> Evaluation:
    """With what the command line says."""
    given = {"limit": limit, "max_new_tokens": max_new_tokens, "batch": batch}
    return evaluation.model_copy(update={key: value for key, value in given.items() if value is not None})
