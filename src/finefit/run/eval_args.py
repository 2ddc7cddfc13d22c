"""What `finefit eval` is asked on the command line. An evaluation is a name, a mapping in YAML or a file; a server is a
URL or a mapping."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from finefit.errors import RunError, SpecError, UserError
from finefit.evaluate.server_answers import only_model_at
from finefit.run.eval_subjects import Device
from finefit.spec.load import spec_text
from finefit.spec.reader import Reader, schema_problems
from finefit.spec.schema import Evaluation
from finefit.spec.served import Server
from finefit.spec.stages import moved
from finefit.spec.tasks import task_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArgs:
    target: str | None
    checkpoint: str = "final"
    tasks: tuple[str, ...] = ()
    data: str | None = None
    limit: int | None = None
    device: Device | None = None
    base: str | None = None
    max_new_tokens: int | None = None
    batch: int | None = None
    answers: Path | None = None
    server: str | None = None
    """A server's URL, or its settings in YAML."""
    runs: Path = Path("runs")

    def __post_init__(self) -> None:
        counts = {"limit": self.limit, "max_new_tokens": self.max_new_tokens, "batch": self.batch}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, and at least 1 is needed", "leave it out for the default")
        if self.device not in (None, *get_args(Device)):
            raise UserError(f"there is no device {self.device}", f"name one of {', '.join(get_args(Device))}")


def server_of(args: EvalArgs) -> Server:
    given = {"--answers": args.answers, "--device": args.device, "--batch": args.batch}
    if unused := [name for name, value in given.items() if value is not None]:
        raise RunError(f"{', '.join(unused)} does not apply to the answers of a server", "leave it out")
    assert args.server is not None
    if args.server.startswith(("http://", "https://")):
        return only_model_at(args.server)
    place = (1, "--server")
    reader = Reader(args.server, lambda _: place)
    value, faults = reader.read(), tuple(reader.problems)
    if not faults:
        try:
            return Server.model_validate_json(json.dumps(value))
        except ValidationError as error:
            faults = tuple(schema_problems(error.errors(), {(): place}, Server))
    raise SpecError("\n".join(map(str, faults)), "give its URL, or '{url: http://localhost:8000/v1, model: NAME}'")


def named_evaluations(asked: Iterable[str], declared: Iterable[Evaluation] = ()) -> list[Evaluation]:
    """Each is a task's name, a label of the spec, a mapping in YAML, or a file: `.yaml` with evaluations, `.py` with a
    user's own task. The returned paths are absolute, or relative to the same folder as those of `declared`."""
    known = {evaluation.label: evaluation for evaluation in declared}
    found = [one for text in asked for one in ([known[text]] if text in known else _read(text))]
    labels = [evaluation.label for evaluation in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        remedy = "give them a name each: --task '{name: ..., task: ...}'"
        raise SpecError(f"two tasks are called {', '.join(twice)}", remedy)
    return found


def _read(text: str) -> list[Evaluation]:
    path, source, base = Path(text), text, Path()
    if path.suffix == ".py":
        return [_validated({"task": {"kind": "python", "path": str(path.resolve())}}, text)]
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            remedy = f"name a file, or one of {', '.join(task_kinds())}"
            raise SpecError(f"--task {text}: there is no such file", remedy)
        source, base = spec_text(path), path.parent
    reader = Reader(source, lambda line: (line, f"--task {text}:{line}" if "\n" in source else f"--task {text}"))
    value = reader.read()
    if reader.problems:
        remedy = "quote it as one argument: --task '{kind: rouge, stemmer: false}'"
        raise SpecError("\n".join(str(fault) for fault in reader.problems), remedy)
    values = value if isinstance(value, list) else [value]
    # a task alone is an evaluation with default settings
    whole = [one if isinstance(one, dict) and "task" in one else {"task": one} for one in values]
    return [with_absolute_paths(_validated(one, text), base) for one in whole]


def _validated(value: Any, where: str) -> Evaluation:
    try:
        return Evaluation.model_validate_json(json.dumps(value))
    except ValidationError as error:
        if isinstance(value["task"], str) and value["task"] not in task_kinds():
            remedy = f"there are {', '.join(task_kinds())}; or a .yaml or .py file of your own"
            raise SpecError(f"there is no task {value['task']}", remedy) from None
        faults = schema_problems(error.errors(), {(): (1, f"--task {where}")}, Evaluation)
        raise SpecError("\n".join(map(str, faults)), "docs/spec.md has the tasks and their keys") from None


def with_absolute_paths(evaluation: Evaluation, base: Path) -> Evaluation:
    return moved(evaluation, lambda path: str((base / path).resolve()))
