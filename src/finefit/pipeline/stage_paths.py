"""The paths that a spec names, wherever they stand in it: listed, or replaced."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from finefit.spec.models import CustomModel, EmbeddedModel, FolderModel, HubModel, ShapeModel
from finefit.spec.stage_kinds import PATHS, Input, StageModel

P = TypeVar("P", bound=BaseModel)
MovePath = Callable[[str], str]


def paths_of(part: object, key: str = "") -> Iterator[tuple[str, BaseModel, str]]:
    """(dotted key, what names it, the path)."""
    for here, value, holder in _children(part, key):
        if holder is not None:
            yield from ((found, holder, path) for found, path in _texts(value, here))
        else:
            yield from paths_of(value, here)


def models_of(part: object, key: str = "") -> Iterator[tuple[str, Input]]:
    """Models that a stage names, by where they stand: `base`, `experts.law`, `method.model`."""
    for here, value, _ in _children(part, key):
        if isinstance(value, HubModel | FolderModel | EmbeddedModel | ShapeModel | CustomModel | StageModel):
            yield here, value
        else:
            yield from models_of(value, here)


def moved(part: P, move: MovePath, *, addresses: bool = False) -> P:
    """The same with every path replaced. What names a scheme (`hf://`, `stage://`) stays, unless addresses are meant too."""

    def change(holder: object, name: str, value: Any) -> Any:
        match value:
            case BaseModel():
                return moved(value, move, addresses=addresses)
            case dict():
                return {key: change(holder, name, inner) for key, inner in value.items()}
            case tuple():
                return tuple(change(holder, name, inner) for inner in value)
            case str() if name in PATHS.get(type(holder), ()) and (addresses or "://" not in value):
                return move(value)
        return value

    return part.model_copy(update={name: change(part, name, getattr(part, name)) for name in part.model_fields_set})


def _children(part: object, key: str) -> Iterator[tuple[str, Any, BaseModel | None]]:
    """(dotted key, value, the part whose path it is)."""
    match part:
        case BaseModel():
            for name in type(part).model_fields:
                is_path = name in PATHS.get(type(part), ())
                yield _join(key, name), getattr(part, name), part if is_path else None
        case dict():
            yield from ((_join(key, str(name)), value, None) for name, value in part.items())
        case tuple():
            yield from ((_join(key, str(at)), value, None) for at, value in enumerate(part))


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield key, value
        case dict():
            yield from ((_join(key, name), text) for name, text in value.items())
        case tuple():
            yield from ((_join(key, str(at)), text) for at, text in enumerate(value))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
