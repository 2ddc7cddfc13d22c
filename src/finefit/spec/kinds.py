"""Where `kind` chooses among sets of keys, as that of a tuning does, and where it is one key of a set, as that of a schedule is."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def class_of(part: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """Of a mapping under `key` of `part`; None where its `kind` chooses the class, or where no class knows its keys."""
    if part is None:
        return None
    annotation = next(
        (field.annotation for name, field in part.model_fields.items() if (field.alias or name) == key), None
    )
    found = _classes(annotation)
    return found[0] if len(found) == 1 else None


def _classes(annotation: Any) -> list[type[BaseModel]]:
    """Of mappings; a list of them is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _classes(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [found for member in get_args(annotation) for found in _classes(member)]
    return []
