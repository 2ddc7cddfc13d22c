"""pydantic's complaints in the user's words: which key, what is wrong with its value, what is accepted."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from finefit.spec.reader import Fault, KeyPath, Place, scalar

_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}([,' ][0-9]{3})+|[-+]?[0-9]+(_[0-9]+)+")
_WANTED = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "`true` or `false`",
    tuple: "a list",
    dict: "a mapping",
}
NAMED = {
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    NoneType: "no value",
}
_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_KEY = "[key]"
"""What pydantic adds to the name of an entry where that itself is wrong."""
_GIVES_WAY = {
    "literal_error",
    "too_short",
}  # a union complains for every member, a list of bad items about its length too


def schema_faults(
    errors: Iterable[ErrorDetails], places: Mapping[KeyPath, Place], root: type[BaseModel]
) -> Iterable[Fault]:
    """One fault for each key of `root`, so a union that was missed by all its members is told once."""
    found: dict[KeyPath, Fault] = {}
    for error in sorted(errors, key=lambda error: error["type"] in _GIVES_WAY):
        path, problem, remedy = _worded(error, root)
        is_told = path in found or (error["type"] in _GIVES_WAY and any(known[: len(path)] == path for known in found))
        if not is_told:
            known = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in places)
            found[path] = Fault(place=places[known], path=path, problem=problem, remedy=remedy)
    return found.values()


def _worded(error: ErrorDetails, root: type[BaseModel]) -> tuple[KeyPath, str, str]:
    """Where, what is wrong, what is accepted."""
    path, declared = _declared(error["loc"], root)
    value, context = error["input"], error.get("ctx", {})
    said, wanted = shown(value), _wanted(declared)
    match error["type"]:
        case "missing":
            return path, "missing", f"give {wanted}"
        case "extra_forbidden":
            keys = list(_fields(_declared(error["loc"][:-1], root, chosen=True)[1]))
            if str(path[-1]).isdigit():  # `{max_tokens: 262,144}` is two entries to YAML
                return path, "there is no such key", "was a number cut by its comma? write it without, as in 262144"
            return path, "there is no such key", nearest(str(path[-1]), keys) or f"the keys here are {listed(keys)}"
        case "union_tag_not_found":
            return (*path, "kind"), "missing", f"give {listed(_choices(declared))}"
        case "union_tag_invalid":
            return (
                (*path, "kind"),
                f"{shown(value['kind'])} is not accepted",
                _one_of(value["kind"], _choices(declared)),
            )
        case "literal_error":
            return path, f"{said} is not accepted", _one_of(value, _choices(declared))
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" as bound:
            return path, f"{said} is out of range", f"give {_BOUNDS[bound]} {next(iter(context.values())):g}"
        case "too_short" | "too_long":
            needed = (
                f"at least {context['min_length']}" if "min_length" in context else f"at most {context['max_length']}"
            )
            return path, f"{said} has {len(value)} items", f"give {needed}"
        case "string_pattern_mismatch":  # names are the only ones
            marks = "`.`, `_` and `-`" if "." in context["pattern"] else "`_` and `-`"
            return path, f"{said} is no name", f"use letters, digits, {marks}, 64 at most, a letter or digit first"
        case "value_error":
            problem, _, remedy = str(context["error"]).partition("; ")
            return path, problem, remedy
        case "json_invalid":
            return path, f"this is no JSON ({context['error']})", "start again from the YAML spec"
        case "finite_number":
            return path, f"{said} is not finite", f"{wanted} is needed"
        case kind if kind.endswith("_type"):
            return path, f"{said} is {NAMED[type(value)]}", f"{wanted} is needed{_mended(value, kind)}"
        case _:
            return path, f"{said} is not accepted", error["msg"]


def _mended(value: Any, kind: str) -> str:
    """`262,144` was meant as a number, `name: 3` as text."""
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


def _declared(loc: Sequence[str | int], root: type[BaseModel], *, chosen: bool = False) -> tuple[KeyPath, Any]:
    """The key path of pydantic's `loc`, which names members of unions too, and the type declared there (or its member `chosen`)."""
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
            above, path = at, (*path, part)
            declared = _fields(at).get(str(part)) if _fields(at) else _inner(at)
            at = _bare(declared)
    return path, at if chosen else declared


def _inner(annotation: Any) -> Any:
    """What a list holds, or a mapping under any name."""
    arguments = get_args(annotation)
    return (arguments[-1] if get_origin(annotation) is dict else arguments[0]) if arguments else None


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
    return (
        {field.alias or name: field.annotation for name, field in annotation.model_fields.items()} if is_model else {}
    )


def _choices(annotation: Any) -> list[str]:
    """The words of a literal, the kinds of a model, all of those in a union."""
    annotation = annotation if get_origin(annotation) is Literal else _bare(annotation)
    if members := _members(annotation):
        return [choice for member in members for choice in _choices(member)]
    return [
        str(choice)
        for choice in get_args(
            _fields(annotation).get("kind", annotation if get_origin(annotation) is Literal else None)
        )
    ]


def _wanted(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _wanted(get_args(annotation)[0])
    if (members := _members(annotation)) and all("kind" in _fields(member) for member in members):
        return f"a mapping with {listed(f'kind: {choice}' for choice in _choices(annotation))}"
    if members:
        return " or ".join(_wanted(_bare(member)) for member in get_args(annotation))
    if keys := _fields(_bare(annotation)):
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
