"""Reads YAML 1.2 text to plain values, with the line of every key and all problems of the YAML itself, and words
pydantic's errors for the user.

It reads ruamel's events directly: they carry the line of every key, and scalars follow the plain rules of YAML 1.2
(`1_000` and `no` are text)."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from finefit.spec import foreign

KeyPath = tuple[str | int, ...]
Place = tuple[int, str]  # its rank in the message, and the label that the user sees

_DEEPEST = 20
_INT = re.compile(r"[-+]?[0-9]{1,100}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False, ".inf": inf, "-.inf": -inf, ".nan": nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecProblem:
    place: Place
    path: KeyPath = ()
    problem: str
    remedy: str

    def __str__(self) -> str:
        key = " " + ".".join(map(str, self.path)) if self.path else ""
        line = f"{self.place[1]}{key}: {'; '.join(filter(None, [self.problem, self.remedy]))}"
        return " ".join(line.encode("utf-8", "backslashreplace").decode().splitlines())


class Reader:
    """Reads one YAML text to plain values, with the place of every key and the problems of the YAML itself."""

    def __init__(self, text: str, place: Callable[[int], Place]) -> None:
        self.place, self._text = place, text
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[SpecProblem] = []

    def tell(self, line: int, problem: str, remedy: str, path: KeyPath = ()) -> None:
        self.problems.append(SpecProblem(place=self.place(line), path=path, problem=problem, remedy=remedy))

    def read(self) -> Any:
        values: list[Any] = []
        try:
            self._events = iter(YAML(typ="safe", pure=True).parse(self._text))
            for event in self._events:
                if isinstance(event, events.DocumentStartEvent):
                    if values:
                        raise _refused(event, "a second document begins here", "keep one")
                    values.append(self._value(next(self._events), ()))
            return values[0] if values else None
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            is_tab = self._text[mark.index : mark.index + 1] == "\t"
            remedy = "use spaces" if is_tab else error.note or "check indentation, brackets and quotes"
            problem = "there is a tab here" if is_tab else error.problem
            self.tell(mark.line + 1, f"column {mark.column + 1}: {problem}", remedy)
        # ruamel raises these on a NUL, `%YAML 1.3` and "\UFFFFFFFF"
        except (YAMLError, AssertionError, ArithmeticError, ValueError) as error:
            line = self._text.count("\n", 0, getattr(error, "position", 0)) + 1
            problem = f"this is not YAML 1.2 ({str(error).partition(chr(10))[0]})"
            self.tell(line, problem, "remove directives, control characters and odd escapes")
        return None

    def _value(self, event: Any, path: KeyPath) -> Any:
        if len(path) > _DEEPEST:
            raise _refused(event, f"nested deeper than {_DEEPEST} levels")
        if isinstance(event, events.AliasEvent):
            raise _refused(event, f"`*{event.anchor}` is an alias", "write the value out")
        if event.ctag is not None:
            raise _refused(event, f"`{event.ctag}` is a tag", "write the value without it")
        if isinstance(event, events.ScalarEvent):
            return scalar(event.value) if event.style is None else _checked_text(event)
        if isinstance(event, events.MappingStartEvent):
            values: dict[str, Any] = {}
            while not isinstance(event := next(self._events), events.MappingEndEvent):
                key, line = _checked_text(event), event.start_mark.line + 1
                here = (*path, key)
                if key in values:
                    self.tell(line, f"given twice, first at {self.places[here][1]}", "keep one", here)
                self.places.setdefault(here, self.place(line))
                values[key] = self._value(next(self._events), here)
            return values
        items: list[Any] = []
        while not isinstance(event := next(self._events), events.SequenceEndEvent):
            self.places[*path, len(items)] = self.place(event.start_mark.line + 1)
            items.append(self._value(event, (*path, len(items))))
        return items


def _refused(event: Any, problem: str, remedy: str | None = None) -> MarkedYAMLError:
    """Returns an error that is reported like ruamel's own, with line and column."""
    return MarkedYAMLError(problem=problem, problem_mark=event.start_mark, note=remedy)


def _checked_text(event: Any) -> str:
    if not isinstance(event, events.ScalarEvent):
        raise _refused(event, "a key must be plain text")
    if any("\ud800" <= char <= "\udfff" for char in event.value):
        raise _refused(event, "an unpaired surrogate is not valid text")
    return str(event.value)


def scalar(text: str) -> str | int | float | None:
    """Reads an unquoted scalar by the core schema of YAML 1.2."""
    if text.lower() in _WORDS and text in {text.lower(), text.upper(), text.capitalize()}:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text) if _FLOAT.fullmatch(text) else text


_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}([,' ][0-9]{3})+|[-+]?[0-9]+(_[0-9]+)+")
_TYPES: Mapping[type, str] = {int: "a number", float: "a number", str: "text", dict: "a mapping"}
NAMED = {**_TYPES, bool: "a truth value", list: "a list", NoneType: "no value"}
_WANTED = {**_TYPES, int: "a whole number", bool: "`true` or `false`", tuple: "a list"}
_BOUNDS = {"greater_than": "more than", "less_than": "less than"}
_BOUNDS |= {"greater_than_equal": "at least", "less_than_equal": "at most"}
_KEY = "[key]"
"""pydantic adds this to the name of an entry if the name itself is wrong."""
_GIVES_WAY = {"literal_error", "too_short"}
"""Error types that others replace: a union reports an error for every member, and a list of bad items also its
length."""


def schema_problems(
    errors: Iterable[ErrorDetails], places: Mapping[KeyPath, Place], root: type[BaseModel]
) -> Iterable[SpecProblem]:
    """Returns one problem for each key of `root`, so a union with no matching member is reported once."""
    found: dict[KeyPath, SpecProblem] = {}
    for error in sorted(errors, key=lambda error: error["type"] in _GIVES_WAY):
        if error["type"] == "default_factory_not_called":  # the key that the default depends on is reported
            continue
        path, problem, remedy = _worded(error, root)
        is_subsumed = error["type"] in _GIVES_WAY and any(known[: len(path)] == path for known in found)
        if path not in found and not is_subsumed:
            known = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in places)
            found[path] = SpecProblem(place=places[known], path=path, problem=problem, remedy=remedy)
    return found.values()


def _worded(error: ErrorDetails, root: type[BaseModel]) -> tuple[KeyPath, str, str]:
    """Returns the key, what is wrong, and what is accepted."""
    path, declared = _declared(error["loc"], root)
    value, context = error["input"], error.get("ctx", {})
    said, wanted = shown(value), _wanted(declared)
    match error["type"]:
        case "missing":
            return path, "missing", f"give {wanted}"
        case "extra_forbidden":
            keys = list(fields_of(_declared(error["loc"][:-1], root, chosen=True)[1]))
            if str(path[-1]).isdigit():  # YAML reads `{max_tokens: 262,144}` as two entries
                return path, "there is no such key", "was a number cut by its comma? write it without, as in 262144"
            if near := nearest(str(path[-1]), keys if path[1:] else [*keys, "stages", "base"]):
                return path, "there is no such key", near
            if (place := foreign.place_of(path)) is not None:
                return path, "there is no such key", f"finefit has this setting as `{place}`"
            return path, "there is no such key", f"the keys here are {listed(keys)}"
        case "union_tag_not_found":
            return (*path, "kind"), "missing", f"give {listed(_choices(declared))}"
        case "union_tag_invalid":
            problem = f"{shown(value['kind'])} is not accepted"
            return (*path, "kind"), problem, _one_of(value["kind"], _choices(declared))
        case "literal_error":
            return path, f"{said} is not accepted", _one_of(value, _choices(declared))
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" as bound:
            return path, f"{said} is out of range", f"give {_BOUNDS[bound]} {next(iter(context.values())):g}"
        case "too_short" | "too_long":
            is_short = "min_length" in context
            needed = f"at least {context['min_length']}" if is_short else f"at most {context['max_length']}"
            return path, f"{said} has {len(value)} items", f"give {needed}"
        case "string_pattern_mismatch":  # only names have patterns
            marks = "`.`, `_` and `-`" if "." in context["pattern"] else "`_` and `-`"
            return (
                path,
                f"{said} is not a name",
                f"use letters, digits, {marks}, at most 64 characters, starting with a letter or digit",
            )
        case "value_error":
            problem, _, remedy = str(context["error"]).partition("; ")
            return path, problem, remedy
        case "json_invalid":
            return path, f"this is not JSON ({context['error']})", "start again from the YAML spec"
        case "finite_number":
            return path, f"{said} is not finite", f"{wanted} is needed"
        case kind if kind.endswith("_type"):
            if written := _in_full(value, declared):
                return path, f"{said} is {NAMED[type(value)]}", f"write {written}"
            return path, f"{said} is {NAMED[type(value)]}", f"{wanted} is needed{_mended(value, kind)}"
        case _:
            return path, f"{said} is not accepted", error["msg"]


def _mended(value: Any, kind: str) -> str:
    """Suggests a correction: `262,144` was meant as a number, `name: 3` as text."""
    if kind == "string_type" and type(value) in {int, float}:
        return f': write "{value}"'
    if kind not in {"int_type", "float_type"}:
        return ""
    if isinstance(value, str):
        value = scalar(re.sub("[,_' ]", "", value) if _GROUPED.fullmatch(value) else value)
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = type(value) is int or (kind == "float_type" and type(value) is float)
    return f": write {value}" if fits else ""


def _in_full(value: Any, annotation: Any) -> str | None:
    """Suggests the full form: `train: chat.jsonl` was meant as a list of sources with this path, `model: owner/name` as
    a model of the hub."""
    for member in (_members(annotation) or [annotation]) if isinstance(value, str) else ():
        fields = fields_of(_bare(member))
        if "kind" in fields and "id" in fields:
            is_path = value.startswith((".", "/", "~")) or value.count("/") != 1
            return f"{{kind: folder, path: {value}}}" if is_path else f"{{kind: hub, id: {value}}}"
        if "path" in fields and "kind" not in fields:
            return f"{{path: {value}}}"
        if "train" in fields and (rows := _in_full(value, fields["train"])):
            return f"{{train: {rows}}}"
        if get_origin(_bare(member)) is tuple and (item := _in_full(value, get_args(_bare(member))[0])):
            return f"[{item}]"
    return None


def _declared(loc: Sequence[str | int], root: type[BaseModel], *, chosen: bool = False) -> tuple[KeyPath, Any]:
    """Returns the key path of pydantic's `loc`, which also names members of unions, and the type (or `chosen` member)
    there."""
    path: KeyPath = ()
    declared: Any = root
    at: Any = root
    above: Any = None
    for part in loc:
        if part == _KEY and get_origin(above) is dict:
            declared = at = get_args(above)[0]
        elif members := _members(at):
            is_literal = str(part).startswith("literal[")
            by_kind = [member for member in members if part in _choices(member)]
            of_one_form = [member for member in members if (get_origin(member) is Literal) == is_literal]
            several = [member for member in of_one_form if get_origin(member) is tuple and part == "several"]
            above, at = None, next(iter(by_kind or several or of_one_form), None)
        else:
            above, path, arguments = at, (*path, part), get_args(at)
            if fields_of(at):
                declared = fields_of(at).get(str(part))
            else:  # the items of a list, or a mapping under any name
                declared = arguments[-1 if get_origin(at) is dict else 0] if arguments else None
            at = _bare(declared)
    return path, at if chosen else declared


def _bare(annotation: Any) -> Any:
    """Removes `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    members = _members(annotation)
    return members[0] if len(members) == 1 else annotation


def _members(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in {Union, UnionType}
    return [_bare(member) for member in get_args(annotation) if member is not NoneType] if is_union else []


def classes_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the classes of a mapping; empty for a list of mappings."""
    bare = _bare(annotation)
    if members := _members(bare):
        return [found for member in members for found in classes_of(member)]
    return [bare] if isinstance(bare, type) and issubclass(bare, BaseModel) else []


def fields_of(annotation: Any) -> dict[str, Any]:
    """Returns declared types by the key that users write."""
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
        return {}
    return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}


def _choices(annotation: Any) -> list[str]:
    """Returns the words of a literal, the kinds of a model, or all of those in a union."""
    annotation = annotation if get_origin(annotation) is Literal else _bare(annotation)
    if members := _members(annotation):
        return [choice for member in members for choice in _choices(member)]
    literal = fields_of(annotation).get("kind", annotation if get_origin(annotation) is Literal else None)
    return [str(choice) for choice in get_args(literal)]


def _wanted(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _wanted(get_args(annotation)[0])
    if (members := _members(annotation)) and all("kind" in fields_of(member) for member in members):
        return f"a mapping with {listed(f'kind: {choice}' for choice in _choices(annotation))}"
    if members:
        kinds = [member for member in get_args(annotation) if not (member is int and float in members)]
        return " or ".join(_wanted(_bare(member)) for member in kinds)
    if keys := fields_of(_bare(annotation)):
        return f"a mapping with the keys {listed(keys)}"
    return listed(_choices(annotation)) or _WANTED.get(get_origin(annotation) or annotation, "`null`")


def _one_of(value: Any, choices: Sequence[str]) -> str:
    return "; ".join(filter(None, [f"accepted: {listed(choices)}", nearest(str(value), choices)]))


def nearest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7)  # at 0.6 `gpu` would become `cpu`
    return f"did you mean `{close[0]}`?" if close else ""


def listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
