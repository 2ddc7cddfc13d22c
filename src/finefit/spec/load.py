"""YAML 1.2 and `--set` overrides to a Spec; all that is wrong is told at once, each with its line, its value and what is accepted.

ruamel's events are read directly: they carry the line of every key, and scalars stay under YAML 1.2 (`1_000` and `no` are text).
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, DocumentStartEvent, MappingEndEvent, MappingStartEvent, ScalarEvent, SequenceEndEvent

from finefit.errors import SpecError
from finefit.spec.schema import Spec

KeyPath = tuple[str | int, ...]
Place = tuple[int, str]  # its rank in the message, and the label that the user sees

_DEEPEST = 20
_AFTER_THE_FILE = 1_000_000_000
_INT = re.compile(r"[-+]?[0-9]{1,100}|0o[0-7]{1,100}|0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}([,' ][0-9]{3})+|[-+]?[0-9]+(_[0-9]+)+")
_OVERRIDE = re.compile(r"([\w-]{1,64}(?:\.[\w-]{1,64})*)=(.*)", re.ASCII | re.DOTALL)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False, ".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_WANTED = {int: "a whole number", float: "a number", str: "text", bool: "`true` or `false`", tuple: "a list"}
_NAMED = {
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    NoneType: "no value",
}
_BOUNDS = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than", "less_than_equal": "at most"}
_GIVES_WAY = {"literal_error", "too_short"}  # a union complains for every member, a list of bad items about its length too


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    place: Place
    path: KeyPath = ()
    problem: str
    remedy: str

    def __str__(self) -> str:
        key = " " + ".".join(map(str, self.path)) if self.path else ""
        line = f"{self.place[1]}{key}: {'; '.join(filter(None, [self.problem, self.remedy]))}"
        return " ".join(line.encode("utf-8", "backslashreplace").decode().splitlines())


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text; save the file as UTF-8") from error
    except FileNotFoundError as error:
        raise SpecError(f"{path}: there is no such file; {_names_beside(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{path}: cannot be read ({error}); give a YAML file") from error
    return parse_spec(text, where=str(path), overrides=overrides)


def parse_spec(text: str, *, where: str, overrides: Sequence[str] = ()) -> Spec:
    """`where` names the text in messages, usually its path."""
    reader = _Reader(text, lambda line: (line, f"{where}:{line}"))
    values = reader.read()
    is_mapping = isinstance(values, dict)
    if not is_mapping and not reader.faults:
        problem = "the spec is empty" if values is None else f"{_shown(values)} is {_NAMED[type(values)]}"
        needed = _listed(key for key, field in Spec.model_fields.items() if field.is_required())
        reader.tell(1, problem, f"a spec is a mapping with at least the keys {needed}")
    draft = _Draft(values if is_mapping else {}, {(): reader.place(1)} | reader.places, reader.faults)
    for number, override in enumerate(overrides):
        draft.set(override, (_AFTER_THE_FILE + number, f"--set {override}"))
    if not is_mapping:
        raise _spec_error(draft.faults)
    return _validated(json.dumps(draft.values), draft.places, draft.faults)


def spec_from_json(document: str) -> Spec:
    """Reads what `spec_to_json` wrote."""
    return _validated(document, {(): (1, "spec.json")}, [])


def spec_to_json(spec: Spec) -> str:
    """Keys stand in the order of the schema and defaults are written out: equal specs give equal text."""
    return spec.model_dump_json(by_alias=True, indent=2)


def _names_beside(path: Path) -> str:
    try:
        names = sorted(found.name for found in path.parent.iterdir() if found.suffix in {".yaml", ".yml"})
    except OSError as error:
        return f"its folder cannot be listed either ({error.strerror})"
    return _nearest(path.name, names) or f"the folder holds {', '.join(names[:10]) or 'no .yaml file'}"


def _spec_error(faults: Iterable[_Fault]) -> SpecError:
    return SpecError("\n".join(str(fault) for fault in sorted(faults, key=lambda fault: fault.place)))


class _Reader:
    """One YAML text to plain values, with the place of every key and the faults of the YAML itself."""

    def __init__(self, text: str, place: Callable[[int], Place]) -> None:
        self.place = place
        self.places: dict[KeyPath, Place] = {}
        self.faults: list[_Fault] = []
        self._text = text

    def tell(self, line: int, problem: str, remedy: str, path: KeyPath = ()) -> None:
        self.faults.append(_Fault(place=self.place(line), path=path, problem=problem, remedy=remedy))

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
            self.tell(mark.line + 1, f"column {mark.column + 1}: {'a tab stands here' if is_tab else error.problem}", remedy)
        except (YAMLError, AssertionError, ArithmeticError, ValueError) as error:  # ruamel on a NUL, `%YAML 1.3`, "\UFFFFFFFF"
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
            return _scalar(event.value) if event.style is None else _checked_text(event)
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


def _scalar(text: str) -> str | int | float | None:
    """An unquoted scalar by the core schema of YAML 1.2."""
    if text.lower() in _WORDS and text in {text.lower(), text.upper(), text.capitalize()}:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text) if _FLOAT.fullmatch(text) else text


@dataclass(slots=True)
class _Draft:
    """What a spec will be made of, while overrides come in; a later one wins."""

    values: Any
    places: dict[KeyPath, Place]
    faults: list[_Fault]

    def set(self, override: str, place: Place) -> None:
        match = _OVERRIDE.fullmatch(override)
        if match is None or not match[2].strip():
            remedy = "write key.path=value, for instance schedule.epochs=2; `null` stands for no value"
            self.faults.append(_Fault(place=place, problem="this is no override", remedy=remedy))
            return
        path = tuple(int(key) if key.isdigit() else key for key in match[1].split("."))
        reader = _Reader(match[2], lambda _: place)
        new = reader.read()
        try:
            values = _replaced(self.values, path, new)
        except LookupError as error:
            reader.tell(1, str(error), "override the whole list, or an item that it has", path)
        if reader.faults:
            self.faults += reader.faults
            return
        self.values = values
        self.places = {known: at for known, at in self.places.items() if known[: len(path)] != path}
        for depth in range(1, len(path) + 1):
            self.places.setdefault(path[:depth], place)


def _replaced(old: Any, path: KeyPath, new: Any) -> Any:
    """A copy with `new` at `path`. What is neither mapping nor list gives way: `levers: auto` under `levers.micro_batch=4`."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(old, list):
        if not isinstance(key, int) or key >= len(old):
            raise LookupError(f"`{key}` is no item of a list of {len(old)} (the first is 0)")
        return [*old[:key], _replaced(old[key], rest, new), *old[key + 1 :]]
    base = old if isinstance(old, dict) else {}
    return base | {str(key): _replaced(base.get(str(key)), rest, new)}


def _validated(document: str, places: Mapping[KeyPath, Place], faults: Sequence[_Fault]) -> Spec:
    """Through JSON, because strict models take a list for a tuple only there."""
    try:
        spec = Spec.model_validate_json(document)
    except ValidationError as error:
        raise _spec_error([*faults, *_schema_faults(error.errors(include_url=False), places)]) from error
    if faults:
        raise _spec_error(faults)
    return spec


def _schema_faults(errors: Iterable[ErrorDetails], places: Mapping[KeyPath, Place]) -> Iterable[_Fault]:
    """One fault for each key, so a union that was missed by all its members is told once."""
    found: dict[KeyPath, _Fault] = {}
    for error in sorted(errors, key=lambda error: error["type"] in _GIVES_WAY):
        path, problem, remedy = _worded(error)
        is_told = path in found or (error["type"] in _GIVES_WAY and any(known[: len(path)] == path for known in found))
        if not is_told:
            known = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in places)
            found[path] = _Fault(place=places[known], path=path, problem=problem, remedy=remedy)
    return found.values()


def _worded(error: ErrorDetails) -> tuple[KeyPath, str, str]:
    """Where, what is wrong, what is accepted."""
    path, declared = _declared(error["loc"])
    value, context = error["input"], error.get("ctx", {})
    shown, wanted = _shown(value), _wanted(declared)
    match error["type"]:
        case "missing":
            return path, "missing", f"give {wanted}"
        case "extra_forbidden":
            keys = list(_fields(_declared(error["loc"][:-1], chosen=True)[1]))
            return path, "there is no such key", _nearest(str(path[-1]), keys) or f"the keys here are {_listed(keys)}"
        case "union_tag_not_found":
            return (*path, "kind"), "missing", f"give {_listed(_choices(declared))}"
        case "union_tag_invalid":
            return (*path, "kind"), f"{_shown(value['kind'])} is not accepted", _one_of(value["kind"], _choices(declared))
        case "literal_error":
            return path, f"{shown} is not accepted", _one_of(value, _choices(declared))
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" as bound:
            return path, f"{shown} is out of range", f"give {_BOUNDS[bound]} {next(iter(context.values())):g}"
        case "too_short" | "too_long":
            needed = f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
            return path, f"{shown} has {len(value)} items", f"give {needed}"
        case "string_pattern_mismatch":  # names are the only ones
            return path, f"{shown} is no name", "use letters, digits, `.`, `_` and `-`, 64 at most, a letter or digit first"
        case "value_error":
            problem, _, remedy = str(context["error"]).partition("; ")
            return path, problem, remedy
        case "json_invalid":
            return path, f"this is no JSON ({context['error']})", "start again from the YAML spec"
        case "finite_number":
            return path, f"{shown} is not finite", f"{wanted} is needed"
        case kind if kind.endswith("_type"):
            return path, f"{shown} is {_NAMED[type(value)]}", f"{wanted} is needed{_mended(value, kind)}"
        case _:
            return path, f"{shown} is not accepted", error["msg"]


def _mended(value: Any, kind: str) -> str:
    """`262,144` was meant as a number, `name: 3` as text."""
    if kind == "string_type" and type(value) in {int, float}:
        return f': write "{value}"'
    if kind not in {"int_type", "float_type"}:
        return ""
    if isinstance(value, str):
        value = _scalar(re.sub("[,_' ]", "", value) if _GROUPED.fullmatch(value) else value)
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = type(value) is int or (kind == "float_type" and type(value) is float)
    return f": write {value}" if fits else ""


def _declared(loc: Sequence[str | int], *, chosen: bool = False) -> tuple[KeyPath, Any]:
    """The key path of pydantic's `loc`, which names members of unions too, and the type declared there (or its member `chosen`)."""
    path: KeyPath = ()
    declared: Any = Spec
    at: Any = Spec
    for part in loc:
        if members := _members(at):
            is_literal = str(part).startswith("literal[")
            by_kind = [member for member in members if part in _choices(member)]
            at = next(iter(by_kind or [member for member in members if (get_origin(member) is Literal) == is_literal]), None)
        else:
            path = (*path, part)
            declared = _fields(at).get(str(part)) if _fields(at) else next(iter(get_args(at)), None)
            at = _bare(declared)
    return path, at if chosen else declared


def _bare(annotation: Any) -> Any:
    """Without `Annotated` and without `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    members = _members(annotation)
    return members[0] if len(members) == 1 else annotation


def _members(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in {Union, UnionType}
    return [_bare(member) for member in get_args(annotation) if member is not NoneType] if is_union else []


def _fields(annotation: Any) -> dict[str, Any]:
    """Declared types by the key that users write."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()} if is_model else {}


def _choices(annotation: Any) -> list[str]:
    """The words of a literal, the kinds of a model, all of those in a union."""
    if members := _members(annotation):
        return [choice for member in members for choice in _choices(member)]
    return list(get_args(_fields(annotation).get("kind", annotation if get_origin(annotation) is Literal else None)))


def _wanted(annotation: Any) -> str:
    if (members := _members(annotation)) and all("kind" in _fields(member) for member in members):
        return f"a mapping with {_listed(f'kind: {choice}' for choice in _choices(annotation))}"
    if members:
        return " or ".join(_wanted(_bare(member)) for member in get_args(annotation))
    if keys := _fields(_bare(annotation)):
        return f"a mapping with the keys {_listed(keys)}"
    return _listed(_choices(annotation)) or _WANTED.get(get_origin(annotation) or annotation, "`null`")


def _one_of(value: Any, choices: Sequence[str]) -> str:
    return "; ".join(filter(None, [f"accepted: {_listed(choices)}", _nearest(str(value), choices)]))


def _nearest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7)  # at 0.6 `gpu` would become `cpu`
    return f"did you mean `{close[0]}`?" if close else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
