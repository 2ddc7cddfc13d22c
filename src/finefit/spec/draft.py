"""Writes a spec with comments, for the user to go on from."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finefit.spec.load import inline

_ORDER = ("name", "model", "card", "data", "tuning", "objective", "optimizer", "schedule", "global_batch", "precision")
"""The keys that a reader looks for first; the others keep their order."""
_WIDTH = 110


def commented(values: Mapping[str, Any], comments: Mapping[str, str], head: Sequence[str] = ()) -> str:
    """`comments`: by dotted key, written above it; `head`: the lines at the top."""
    first = {key: values[key] for key in _ORDER if key in values}
    lines = [*_comment("\n".join(head), ""), *_lines({**first, **values}, comments, "", "")]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], path: str, indent: str) -> Iterator[str]:
    for key, value in sorted(values.items(), key=lambda item: item[0] != "kind"):
        here = f"{path}{key}"
        yield from _comment(comments.get(here, ""), indent)
        if isinstance(value, dict) and value and (not _is_short(value) or _has_comments(comments, here)):
            yield f"{indent}{inline(key)}:"
            yield from _lines(value, comments, f"{here}.", f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{inline(key)}:"
            for item in value:
                yield from _item(item, indent)
        elif isinstance(value, str) and _is_text(value):
            yield f"{indent}{inline(key)}: {'|' if value.endswith(chr(10)) else '|-'}"
            yield from (f"{indent}  {line}".rstrip() for line in value.removesuffix("\n").split("\n"))
        else:
            yield f"{indent}{inline(key)}: {inline(value)}"


def _item(item: Any, indent: str) -> Iterator[str]:
    """An item of a list in one line, unless that is long."""
    line = f"{indent}- {inline(item)}"
    if len(line) <= _WIDTH or not isinstance(item, dict):
        yield line
        return
    first, *others = _lines(item, {}, "", f"{indent}  ")
    yield f"{indent}- {first.removeprefix(f'{indent}  ')}"
    yield from others


def _is_text(value: str) -> bool:
    """Whether it is long and has lines that YAML keeps as they are."""
    lines = value.removesuffix("\n").split("\n")
    is_kept = all(line == line.strip() and line.isprintable() for line in lines) and lines[0] and lines[-1]
    return len(value) > _WIDTH and len(lines) > 1 and bool(is_kept)


def _is_short(value: Mapping[str, Any]) -> bool:
    """Short mappings without others in them are one line: `model: {kind: hub, id: ...}`."""
    return (
        not any(isinstance(inner, dict | list) for inner in value.values()) and len(inline(dict(value))) < _WIDTH // 2
    )


def _has_comments(comments: Mapping[str, str], path: str) -> bool:
    return any(key.startswith(f"{path}.") for key in comments)


def _comment(text: str, indent: str) -> Iterator[str]:
    """What YAML does not allow even in a comment, such as control characters in the name of a column, is written as an
    escape."""
    for paragraph in text.splitlines():
        paragraph = "".join(c if c.isprintable() or c == "\t" else f"\\u{ord(c):04x}" for c in paragraph)
        yield from textwrap.wrap(
            paragraph, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False
        )
