"""YAML 1.2 text -> plain values, with the line of every key and all that is wrong with the YAML itself.

ruamel's events are read directly: they carry the line of every key, and scalars stay under the plain rules of YAML 1.2 (`1_000` and `no` are text).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
)

KeyPath = tuple[str | int, ...]
Place = tuple[int, str]  # its rank in the message, and the label that the user sees

_DEEPEST = 20
_INT = re.compile(r"[-+]?[0-9]{1,100}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".inf": math.inf,
    "-.inf": -math.inf,
    ".nan": math.nan,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    place: Place
    path: KeyPath = ()
    problem: str
    remedy: str

    def __str__(self) -> str:
        key = " " + ".".join(map(str, self.path)) if self.path else ""
        line = f"{self.place[1]}{key}: {'; '.join(filter(None, [self.problem, self.remedy]))}"
        return " ".join(line.encode("utf-8", "backslashreplace").decode().splitlines())


class Reader:
    """One YAML text to plain values, with the place of every key and the faults of the YAML itself."""

    def __init__(self, text: str, place: Callable[[int], Place]) -> None:
        self.place = place
        self.places: dict[KeyPath, Place] = {}
        self.faults: list[Fault] = []
        self._text = text

    def tell(self, line: int, problem: str, remedy: str, path: KeyPath = ()) -> None:
        self.faults.append(Fault(place=self.place(line), path=path, problem=problem, remedy=remedy))

    def read(self) -> Any:
        values: list[Any] = []
        try:
            self._events = iter(YAML(typ="safe", pure=True).parse(self._text))
            for event in self._events:
                if isinstance(event, DocumentStartEvent):
                    if values:
                        raise _refused(event, "a second document begins here", "keep one")
                    values.append(self._value(next(self._events), ()))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            is_tab = self._text[mark.index : mark.index + 1] == "\t"
            remedy = "use blanks" if is_tab else error.note or "check indentation, brackets and quotes"
            self.tell(
                mark.line + 1, f"column {mark.column + 1}: {'a tab stands here' if is_tab else error.problem}", remedy
            )
        except (
            YAMLError,
            AssertionError,
            ArithmeticError,
            ValueError,
        ) as error:  # ruamel on a NUL, `%YAML 1.3`, "\UFFFFFFFF"
            line = self._text.count("\n", 0, getattr(error, "position", 0)) + 1
            problem = f"this is no YAML 1.2 ({str(error).partition(chr(10))[0]})"
            self.tell(line, problem, "remove directives, control characters and odd escapes")
        else:
            return values[0] if values else None
        return None

    def _value(self, event: Any, path: KeyPath) -> Any:
        if len(path) > _DEEPEST:
            raise _refused(event, f"nested deeper than {_DEEPEST} levels")
        if isinstance(event, AliasEvent):
            raise _refused(event, f"`*{event.anchor}` is an alias", "write the value out")
        if event.ctag is not None:
            raise _refused(event, f"`{event.ctag}` is a tag", "write the value without it")
        if isinstance(event, ScalarEvent):
            return scalar(event.value) if event.style is None else _checked_text(event)
        return self._mapping(path) if isinstance(event, MappingStartEvent) else self._sequence(path)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key, line = _checked_text(event), event.start_mark.line + 1
            here = (*path, key)
            if key in values:
                self.tell(line, f"given twice, first at {self.places[here][1]}", "keep one", here)
            self.places.setdefault(here, self.place(line))
            values[key] = self._value(next(self._events), here)
        return values

    def _sequence(self, path: KeyPath) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            here = (*path, len(values))
            self.places[here] = self.place(event.start_mark.line + 1)
            values.append(self._value(event, here))
        return values


def _refused(event: Any, problem: str, remedy: str | None = None) -> MarkedYAMLError:
    """Told like ruamel's own complaints, with line and column."""
    return MarkedYAMLError(problem=problem, problem_mark=event.start_mark, note=remedy)


def _checked_text(event: Any) -> str:
    if not isinstance(event, ScalarEvent):
        raise _refused(event, "a key is a word")
    if any("\ud800" <= char <= "\udfff" for char in event.value):
        raise _refused(event, "half a surrogate pair is no text")
    return str(event.value)


def scalar(text: str) -> str | int | float | None:
    """An unquoted scalar by the core schema of YAML 1.2."""
    if text.lower() in _WORDS and text in {text.lower(), text.upper(), text.capitalize()}:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text) if _FLOAT.fullmatch(text) else text
