"""The page of finefit's messages, each with what to do: python tools/make_message_index.py [FILE]

A message is the first argument of an error type, or of `error`, `warning` and `note` in the checks; its remedy is the
second. Where an argument is a name, the texts that the function (or the module) gives to that name count. Values are
shown as …."""

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "finefit"
FINDINGS = {"error", "warning", "note"}
PARTS = {
    "spec": "The spec and its words",
    "data": "Rows, files and templates",
    "model": "Models, weights and adapters",
    "plan": "Planning",
    "preflight": "Checks before a run",
    "train": "Training",
    "run": "Runs",
    "evaluate": "Evaluation",
    "export": "Export and chat",
}
OTHERS = "Everything else"
HEAD = """# Messages
What finefit says when it refuses something, and what to do about it; … stands for values. Written from the source when
this site is built. Search for yours with the box above, or with your browser. Messages of torch, transformers and
other tools, with their causes, are in [troubleshooting](troubleshooting.md).
"""
Message = tuple[str, str]


def error_types() -> set[str]:
    tree = ast.parse((SOURCE / "errors.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def messages(path: Path, kinds: set[str]) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = _assigned(tree.body)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names = module | _assigned(ast.walk(function))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args):
            if isinstance(call.func, ast.Name) and call.func.id in kinds:
                problems, remedies = (_texts(argument, names) for argument in (*call.args, ast.Constant(""))[:2])
                yield from _paired(problems, remedies)


def _paired(problems: list[str], remedies: list[str]) -> Iterator[Message]:
    """Where both have several texts, they were given together."""
    if len(problems) == len(remedies):
        yield from zip(problems, remedies, strict=True)
    else:
        yield from itertools.product(problems, remedies[:1] or [""])


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, list[str]]:
    """The texts that are given to each name."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=False)]
            for name, given in pairs:
                if isinstance(name, ast.Name) and (texts := _texts(given, found)):
                    found.setdefault(name.id, []).extend(texts)
    return found


def _texts(node: ast.AST, names: dict[str, list[str]]) -> list[str]:
    """All that an expression may say."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, names) for part in parts)]
        case ast.Name(id=name):
            return names.get(name, [])
        case ast.IfExp(body=first, orelse=second):
            return [*_texts(first, names), *_texts(second, names)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, names) or ["…"] for b in _texts(right, names) or ["…"]]
    return []


def _part(node: ast.AST, names: dict[str, list[str]]) -> str:
    """A name that stands for one text is that text."""
    if isinstance(node, ast.FormattedValue):
        texts = _texts(node.value, names) if isinstance(node.value, ast.Name) else []
        return texts[0] if len(texts) == 1 else "…"
    return "".join(_texts(node, names))


def index() -> str:
    kinds = error_types() | FINDINGS
    parts: dict[str, dict[str, str]] = {title: {} for title in (*PARTS.values(), OTHERS)}
    for path in sorted(SOURCE.rglob("*.py")):
        title = PARTS.get(path.relative_to(SOURCE).parts[0], OTHERS)
        for problem, remedy in messages(path, kinds):
            if len(re.sub(r"[…\W]", "", problem)) > 7:  # words to search for, not values alone
                parts[title].setdefault(_cell(problem), _cell(remedy))
    return HEAD + "".join(_table(title, found) for title, found in parts.items())


def _table(title: str, found: dict[str, str]) -> str:
    rows = "".join(f"| {problem} | {remedy} |\n" for problem, remedy in sorted(found.items(), key=_letters))
    return f"\n## {title}\n\n| message | what to do |\n|---|---|\n{rows}"


def _letters(message: Message) -> str:
    return re.sub(r"[^a-z ]", "", message[0].lower()).strip()


def _cell(text: str) -> str:
    """As it is printed, whatever it means to Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(index(), encoding="utf-8")
    else:
        sys.stdout.write(index())
