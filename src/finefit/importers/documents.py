"""Reads configs of other tools: YAML and JSON with the liberties that those tools take (YAML 1.1, anchors), and the
arguments of a Python script or notebook, which is parsed and never run."""

import ast
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from finefit import bounded
from finefit.errors import SpecError, first_line

MAX_CONFIG_BYTES = 4 << 20
_MAX_VALUES = 100_000
_CALLS = {
    "from_pretrained": "model",
    "get_peft_model": "adapter",
    "SFTConfig": "training",
    "DPOConfig": "training",
    "TrainingArguments": "training",
    "UnslothTrainingArguments": "training",
    "SFTTrainer": "training",
    "DPOTrainer": "training",
    "load_dataset": "dataset",
    "train_on_responses_only": "answers",
}
"""Calls whose arguments are a training's settings."""
_TRAINERS = ("SFTTrainer", "DPOTrainer")


def read_document(path: Path) -> dict[str, Any]:
    """Returns the values of a config."""
    try:
        text = bounded.read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{path} is not there", "name the config of another tool") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {first_line(error)}", "name the config of another tool") from None
    if path.suffix in (".py", ".ipynb"):
        return arguments_of(text, path)
    values = _json(text, path) if path.suffix == ".json" else _yaml(text, path)
    if not isinstance(values, dict) or not values:
        raise SpecError(f"{path} holds no settings by name", "name the config of another tool")
    require_size(values, path)
    return {str(key): _plain(value) for key, value in values.items()}


def _yaml(text: str, path: Path) -> Any:
    """Another tool's reader takes the last of two equal keys, this one refuses them."""
    try:
        yaml = YAML(typ="safe", pure=True)
        yaml.version = (1, 1)
        with warnings.catch_warnings(action="ignore"):  # about 2e-5, which has no dot
            return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"{path}, line {mark.line + 1}: {error.problem}" if mark else f"{path}: {error.problem}"
        raise SpecError(problem, "correct the config") from None
    except (YAMLError, ValueError, AssertionError, ArithmeticError, RecursionError, TypeError) as error:
        raise SpecError(f"{path} is not YAML: {first_line(error)}", "correct the config") from None


def _json(text: str, path: Path) -> Any:
    try:
        return bounded.parse_json(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {first_line(error)}", "correct the config") from None


def require_size(values: object, path: Path) -> None:
    """Aliases of YAML can make a small file large beyond bounds."""
    todo, count = [values], 0
    while todo:
        value = todo.pop()
        count += 1
        if count > _MAX_VALUES:
            raise SpecError(f"{path} holds more than {_MAX_VALUES} values", "name the config of another tool")
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _plain(value: Any) -> Any:
    """YAML 1.1 also has dates, bytes and sets, which no setting is: they become text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def arguments_of(text: str, path: Path) -> dict[str, Any]:
    """Returns the keyword arguments of the calls that set up a training, as far as they are literals or names of them.
    `load_dataset` gives `dataset_name`, and `train_on_responses_only` a key of that name."""
    try:
        tree = ast.parse(_code(text, path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{path} is not Python: {first_line(error)}", "save the notebook again") from None
    calls = _calls_of_training(tree, path)
    known = _constants(tree)
    found: dict[str, Any] = {}
    for call in calls:
        for key, value in _arguments(call, _name(call.func), known):
            if key in found and found[key] != value:  # which of them is trained with, only running would tell
                problem = f"{path} gives {key} twice before it trains, as {found[key]!r} and as {value!r}"
                raise SpecError(problem, "keep the call that the training uses, or write its arguments as YAML")
            found[key] = value
    if not found:
        raise SpecError(f"{path} calls none of {', '.join(_CALLS)}", "name a training script or notebook")
    return found


def _calls_of_training(tree: ast.AST, path: Path) -> list[ast.Call]:
    """Returns the calls in the order of the text, without those that load a tokenizer, those under `if False`, and
    those that come after the trainer: a notebook goes on to load what it has trained."""
    dead = {
        id(node) for branch in ast.walk(tree) if _is_dead(branch) for part in branch.body for node in ast.walk(part)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in dead]
    calls = [call for call in calls if _name(call.func) in _CALLS and not _loads_texts(call.func)]
    trainers = [call for call in calls if _name(call.func) in _TRAINERS]
    if len(trainers) > 1:
        lines = " and ".join(str(call.lineno) for call in trainers)
        raise SpecError(f"{path} sets up {len(trainers)} trainings, in lines {lines}", "keep the one that is meant")
    end = trainers[0].end_lineno if trainers else None
    kept = (call for call in calls if end is None or call.lineno <= end or _CALLS[_name(call.func)] == "answers")
    return sorted(kept, key=lambda call: (call.lineno, call.col_offset))


def _is_dead(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value


def _loads_texts(function: ast.expr) -> bool:
    """Whether it loads a tokenizer or a processor instead of a model."""
    owner = _name(function.value) if isinstance(function, ast.Attribute) else ""
    return owner.endswith(("Tokenizer", "TokenizerFast", "Processor"))


def _constants(tree: ast.AST) -> dict[str, Any]:
    """Returns the literals that names stand for. A name that is bound twice, or by anything but an assignment, may
    stand for another value where it is used."""
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    bound = Counter([node.id for node in stores] + [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)])
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and bound[node.targets[0].id] == 1:
            value, is_known = _literal(node.value, known)
            known |= {node.targets[0].id: value} if is_known else {}
    return known


def _code(text: str, path: Path) -> str:
    if path.suffix != ".ipynb":
        return text
    notebook = _json(text, path)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    found = cells if isinstance(cells, list) else []
    code = [cell for cell in found if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    lines = "\n".join(map(_source, code)).splitlines()
    return "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source")
    parts = source if isinstance(source, list) else [source]
    return "".join(part for part in parts if isinstance(part, str))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr, known: Mapping[str, Any]) -> tuple[Any, bool]:
    if isinstance(node, ast.Name):
        return known.get(node.id), node.id in known
    try:
        value = ast.literal_eval(node)
        json.dumps(value)  # bytes, sets and complex numbers are no settings
        return _plain(value), True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None, False


def _arguments(call: ast.Call, name: str, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A value that only running would tell is named as code."""
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in ("model", "tokenizer", "processing_class", "args", "train_dataset"):
            continue
        value, is_known = _literal(keyword.value, known)
        key = keyword.arg if _CALLS[name] != "dataset" else f"load_dataset.{keyword.arg}"
        yield key, value if is_known else f"<{ast.unparse(keyword.value)}>"
    if _CALLS[name] in ("dataset", "model") and call.args:
        value, is_known = _literal(call.args[0], known)
        yield ("dataset_name" if _CALLS[name] == "dataset" else "model_name"), value if is_known else None
    if _CALLS[name] == "answers":
        yield "train_on_responses_only", True
