"""Writes docs/spec.md from the schema, so that the reference cannot lag behind it.

python tools/make_spec_reference.py docs/spec.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from finefit.spec import Period
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Common, Spec, Training
from finefit.spec.stages import TrainStage

HEAD = """# The spec
Written from the schema by `python tools/make_spec_reference.py docs/spec.md`; a test holds the two together. Paths are relative
to the spec file. Any value can be overridden on the command line: `--set optimizer.lr=1e-4`. An unknown key, a wrong type or a
number such as `262,144` is an error with its line; all errors are reported at once.

A spec may build on another: `base: base.yaml` at its top takes over what that file says, as if it were written here. Mappings are merged
key by key; a mapping of another `kind` with keys of its own (`tuning`, `model`), a list and any other value replace the value of the base;
`null` takes a value away. `kind` of `optimizer` and `schedule` chooses no other keys: there it is one value among others.

| key | value | default | |
|---|---|---|---|
"""  # noqa: E501
STAGES = """
## Stages
A spec with the key `stages` holds several stages, each with a name; these keys are given once for all stages: {common}.
Where a stage names the model of another one, or a path is `stage://NAME/file`, it depends on that stage and waits for it. A circle, a stage that
is not there, a file or a score that it will not have and two stages with one folder are refused when the spec is read.

| key | value | default | |
|---|---|---|---|
"""  # noqa: E501
WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict[str, Any]: "mapping",
    dict[str, str]: "mapping",
}


def reference() -> str:
    told: dict[type[BaseModel], str] = {}
    common = ", ".join(f"`{name}`" for name in Common.model_fields)
    return (
        HEAD
        + _table(Spec, told)
        + STAGES.format(common=common)
        + _table(Pipeline, told, left_out=frozenset(Common.model_fields))
    )


def _table(model: type[BaseModel], told: dict[type[BaseModel], str], *, left_out: frozenset[str] = frozenset()) -> str:
    """`told` is added to: what one table has said, the next one leaves out."""
    lines = (line for line in rows(model, told=told) if line[0] not in left_out)
    return "".join(f"| `{key}` | {kind} | {default} | {text} |\n" for key, kind, default, text in lines)


def rows(
    model: type[BaseModel], prefix: str = "", *, told: dict[type[BaseModel], str]
) -> Iterator[tuple[str, str, str, str]]:
    """`told`: where the keys of a model stand already; they are not repeated."""
    for name, field in model.model_fields.items():
        is_said = name == "kind" and _tag(model)  # beside the key of the whole
        if is_said or (model is TrainStage and name in Training.model_fields):  # as the first table has it
            continue
        key = f"{prefix}{field.alias or name}"
        models = [(inner, f"{key}{label}") for inner, label in _models(field.annotation)]
        words = [
            _text(field),
            _described([inner for inner, _ in models if inner.__doc__ and inner not in told]),
            *_same([inner for inner, _ in models], told),
        ]
        default = _default(field) if key != "name" else "that of the file"
        yield key, _kind(field.annotation, field), default, _joined(words)
        for inner, place in models:
            if inner not in told:
                told[inner] = place
                yield from rows(inner, f"{place}.", told=told)


def _described(models: list[type[BaseModel]]) -> str:
    """What the docstrings say; one of several kinds is named, and begins a line of its own."""
    said = [(_tag(model), " ".join((model.__doc__ or "").split())) for model in models]
    if not any(tag for tag, _ in said):
        return " ".join(text for _, text in said)
    return "".join(f"<br>{text}" if text.startswith(f"`{tag}`") else f"<br>`{tag}`: {text}" for tag, text in said)


def _same(models: list[type[BaseModel]], told: dict[type[BaseModel], str]) -> Iterator[str]:
    """Where keys stand already. Of several kinds of which others are described here, each place begins a line."""
    places: dict[str, list[str]] = {}
    for model in models:
        if model in told:
            places.setdefault(_whole(told[model]), []).append(_tag(model))
    is_mixed = any(_tag(model) and model.__doc__ and model not in told for model in models) or len(places) > 1
    for place, tags in places.items():
        kinds = ", ".join(f"`{tag}`" for tag in tags if tag)
        yield (
            f"<br>{kinds}: The keys are those of `{place}`."
            if is_mixed and kinds
            else f"The keys are those of `{place}`."
        )


def _joined(words: list[str]) -> str:
    return " ".join(filter(None, words)).replace(" <br>", "<br>").removeprefix("<br>").replace("|", "\\|")


def _whole(place: str) -> str:
    """The key that a model is one kind of: `tuning` of `tuning (lora)`."""
    return place.rpartition(" (")[0] if place.endswith(")") else place


def _models(annotation: Any) -> list[tuple[type[BaseModel], str]]:
    """The models behind an annotation, with what the key says about them: (lora), [n]."""
    bare = _bare(annotation)
    if isinstance(bare, type) and issubclass(bare, BaseModel) and bare is not Period:
        return [(bare, "")]
    if get_origin(bare) is tuple:
        return [(model, f"[n]{label}") for model, label in _models(get_args(bare)[0])]
    if get_origin(bare) is dict:
        return [(model, f".NAME{label}") for model, label in _models(get_args(bare)[1])]
    members = [_bare(member) for member in _members(bare)]
    return [
        (m, f" ({_tag(m)})" if _tag(m) else "")
        for m in members
        if isinstance(m, type) and issubclass(m, BaseModel) and m is not Period
    ]


def _tag(model: type[BaseModel]) -> str:
    """The one kind that a model is; empty where `kind` is a choice of its own or absent."""
    choices = get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()
    return str(choices[0]) if len(choices) == 1 else ""


def _kind(annotation: Any, field: FieldInfo | None = None) -> str:
    bare = _bare(annotation)
    if get_origin(bare) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(bare))
    if bare is Period:
        return "`200 steps`, `epoch` or `15 minutes`"
    if get_origin(bare) is tuple:
        return (
            f"list of {_kind(get_args(bare)[0])}"
            if get_args(bare)[-1] is Ellipsis
            else f"list of {len(get_args(bare))} numbers"
        )
    if get_origin(bare) is dict and bare not in WORDS:
        return f"mapping of {_kind(get_args(bare)[1])}"
    if members := _members(bare):
        return " or ".join(_kind(member) for member in members)
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return f"`{{kind: {_tag(bare)}}}`" if _tag(bare) else "mapping"
    return WORDS[bare] + _bounds(field)


def _bounds(field: FieldInfo | None) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{words} {getattr(m, sign):g}"
        for m in (field.metadata if field else ())
        for sign, words in signs.items()
        if hasattr(m, sign)
    ]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "none" if _is_empty(field) else "see right"
    value = field.default
    if isinstance(value, BaseModel):
        return (
            f"`{value}`"
            if isinstance(value, Period)
            else (f"`{{kind: {_tag(type(value))}}}`" if _tag(type(value)) else "see below")
        )
    return "none" if value in (None, ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _is_empty(field: FieldInfo) -> bool:
    return field.default_factory in (dict, list)


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    members = _members(annotation)
    return _bare(members[0]) if len(members) == 1 else annotation


def _members(annotation: Any) -> list[Any]:
    return (
        [m for m in get_args(annotation) if m is not NoneType] if get_origin(annotation) in (Union, UnionType) else []
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
