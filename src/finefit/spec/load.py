"""A spec file and `--set` overrides -> Spec; all that is wrong is told at once, each with its line, its value and what is accepted."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finefit.errors import SpecError
from finefit.spec.reader import Fault, KeyPath, Place, Reader
from finefit.spec.schema import Spec
from finefit.spec.wording import NAMED, listed, nearest, schema_faults, shown

_AFTER_THE_FILE = 1_000_000_000
_OVERRIDE = re.compile(r"([\w-]{1,64}(?:\.[\w-]{1,64})*)=(.*)", re.ASCII | re.DOTALL)


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
    reader = Reader(text, lambda line: (line, f"{where}:{line}"))
    values = reader.read()
    is_mapping = isinstance(values, dict)
    if not is_mapping and not reader.faults:
        problem = "the spec is empty" if values is None else f"{shown(values)} is {NAMED[type(values)]}"
        needed = listed(key for key, field in Spec.model_fields.items() if field.is_required())
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
    return nearest(path.name, names) or f"the folder holds {', '.join(names[:10]) or 'no .yaml file'}"


def _spec_error(faults: Iterable[Fault]) -> SpecError:
    return SpecError("\n".join(str(fault) for fault in sorted(faults, key=lambda fault: fault.place)))


@dataclass(slots=True)
class _Draft:
    """What a spec will be made of, while overrides come in; a later one wins."""

    values: Any
    places: dict[KeyPath, Place]
    faults: list[Fault]

    def set(self, override: str, place: Place) -> None:
        match = _OVERRIDE.fullmatch(override)
        if match is None or not match[2].strip():
            remedy = "write key.path=value, for instance schedule.epochs=2; `null` stands for no value"
            self.faults.append(Fault(place=place, problem="this is no override", remedy=remedy))
            return
        path = tuple(int(key) if key.isdigit() else key for key in match[1].split("."))
        reader = Reader(match[2], lambda _: place)
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


def _validated(document: str, places: Mapping[KeyPath, Place], faults: Sequence[Fault]) -> Spec:
    """Through JSON, because strict models take a list for a tuple only there."""
    try:
        spec = Spec.model_validate_json(document)
    except ValidationError as error:
        raise _spec_error([*faults, *schema_faults(error.errors(include_url=False), places)]) from error
    if faults:
        raise _spec_error(faults)
    return spec
