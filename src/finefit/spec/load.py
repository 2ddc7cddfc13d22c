"""A spec file, its `base` and `--set` overrides -> Spec, or Pipeline where it has stages; all that is wrong is told at once, with its line, its
value and what is accepted."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from finefit.errors import SpecError
from finefit.spec.edit import dumped
from finefit.spec.kinds import class_of
from finefit.spec.reader import Fault, KeyPath, Place, Reader
from finefit.spec.schema import Spec
from finefit.spec.stages import Pipeline, TrainStage
from finefit.spec.wording import NAMED, listed, nearest, schema_faults, shown

_LINES_OF_A_FILE = 10_000_000
_AFTER_ALL_FILES = 1_000_000_000
S = TypeVar("S", bound=BaseModel)
_OVERRIDE = re.compile(r"([\w-]{1,64}(?:\.[\w-]{1,64})*)=(.*)", re.ASCII | re.DOTALL)


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """Of one training; several are refused with a word."""
    return parse_spec(_text(path), where=str(path), overrides=overrides)


def load_any(path: Path, overrides: Sequence[str] = ()) -> Spec | Pipeline:
    return parse_any(_text(path), where=str(path), overrides=overrides)


def parse_spec(text: str, *, where: str, overrides: Sequence[str] = ()) -> Spec:
    found = parse_any(text, where=where, overrides=overrides)
    if isinstance(found, Pipeline):
        raise SpecError(
            f"{where} has stages ({', '.join(found.stages)}), and one training is meant here",
            "name a spec without `stages`",
        )
    return found


def parse_any(text: str, *, where: str, overrides: Sequence[str] = ()) -> Spec | Pipeline:
    """`where` names the text in messages, usually its path; a `base` is looked for beside it."""
    draft = _read(text, Path(where))
    for number, override in enumerate(overrides):
        draft.set(override, (_AFTER_ALL_FILES + number, f"--set {override}"))
    if not isinstance(draft.values, dict):
        raise _spec_error(draft.faults)
    if "stages" not in draft.values:
        return _validated(json.dumps(draft.values), draft.places, draft.faults, Spec)
    draft.spread_defaults()
    return _validated(json.dumps(draft.values), draft.places, draft.faults, Pipeline)


def whole_text(path: Path) -> str:
    """The spec file as it is written; with a `base`, what it amounts to, so that the text stands alone, below what is written."""
    text = _text(path)
    draft = _read(text, path)
    if not draft.bases:
        return text
    names = ", ".join(str(base) for base in draft.bases)
    lines = "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
    return f"# This file and {names} together. As it was written:\n#\n{lines}\n{dumped(draft.values)}"


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SpecError(
            f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text; save the file as UTF-8"
        ) from error
    except FileNotFoundError as error:
        raise SpecError(f"{path}: there is no such file; {_names_beside(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{path}: cannot be read ({error}); give a YAML file") from error


def _read(text: str, path: Path, above: tuple[Path, ...] = ()) -> "_Draft":
    """`above`: the files that name this one as their base, resolved."""
    first = len(above) * _LINES_OF_A_FILE
    reader = Reader(text, lambda line: (first + line, f"{path}:{line}"))
    values = reader.read()
    if not isinstance(values, dict) and not reader.faults:
        problem = "the spec is empty" if values is None else f"{shown(values)} is {NAMED[type(values)]}"
        needed = listed(key for key, field in Spec.model_fields.items() if field.is_required())
        reader.tell(1, problem, f"a spec is a mapping with at least the keys {needed}")
    draft = _Draft(values, {(): reader.place(1)} | reader.places, reader.faults)
    return _with_base(draft, path, above) if isinstance(values, dict) and "base" in values else draft


def _with_base(draft: "_Draft", path: Path, above: tuple[Path, ...]) -> "_Draft":
    """Without its key `base`, above what that file says. One that cannot be read is told alone: all that it would have said is missing."""
    named, place = draft.values["base"], draft.places["base",]

    def refused(problem: str, remedy: str) -> SpecError:
        return _spec_error([*draft.faults, Fault(place=place, path=("base",), problem=problem, remedy=remedy)])

    if not isinstance(named, str) or not named:
        raise refused(f"{shown(named)} is no path", "give the path of a spec file, relative to this one")
    below, chain = path.parent / named, (*above, _resolved(path))
    if _resolved(below) in chain:
        circle = " -> ".join(found.name for found in (*chain[chain.index(_resolved(below)) :], below))
        raise refused(f"{circle} is a circle", "let one of these files stand alone")
    try:
        text = _text(below)
    except SpecError as error:
        raise refused(error.problem, "a base is named relative to the file that names it") from error
    rest = {key: value for key, value in draft.values.items() if key != "base"}
    return _read(text, below, chain).under(_Draft(rest, draft.places, draft.faults), below)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError):  # no path at all; reading it says so
        return path


def spec_from_json(document: str) -> Spec:
    """Reads what `spec_to_json` wrote."""
    return _validated(document, {(): (1, "spec.json")}, [], Spec)


def pipeline_from_json(document: str) -> Pipeline:
    return _validated(document, {(): (1, "spec.json")}, [], Pipeline)


def spec_to_json(spec: Spec | Pipeline) -> str:
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
    bases: tuple[Path, ...] = ()
    """Files whose values stand below."""

    def under(self, upper: "_Draft", name: Path) -> "_Draft":
        """What `upper` says stands above what this one says, mapping by mapping."""
        if not isinstance(self.values, dict):
            return _Draft(upper.values, upper.places, [*upper.faults, *self.faults], (name, *self.bases))
        places = dict(self.places)
        values = _merged(
            self.values,
            upper.values,
            (),
            places,
            Pipeline if "stages" in upper.values or "stages" in self.values else Spec,
        )
        return _Draft(values, places | upper.places, [*upper.faults, *self.faults], (name, *self.bases))

    def spread_defaults(self) -> None:
        """Under every stage that trains, and then gone."""
        below, stages = self.values.get("defaults"), self.values["stages"]
        if not isinstance(below, dict) or not isinstance(stages, dict):
            return
        for name, stage in stages.items():
            if isinstance(stage, dict) and stage.get("kind") == "train":
                here: KeyPath = ("stages", name)
                places = {
                    (*here, *path[1:]): at
                    for path, at in self.places.items()
                    if path[:1] == ("defaults",) and len(path) > 1
                }
                self.values["stages"] = stages = stages | {name: _merged(below, stage, here, places, TrainStage)}
                self.places = places | self.places
        self.values = {key: value for key, value in self.values.items() if key != "defaults"}

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


def _merged(
    below: dict[str, Any],
    above: dict[str, Any],
    path: KeyPath,
    places: dict[KeyPath, Place],
    part: type[BaseModel] | None,
) -> dict[str, Any]:
    """Mappings are merged key by key, one whose kind has other keys and everything else is replaced; its places go with it."""
    merged = dict(below)
    for key, new in above.items():
        old, here, inner = below.get(key), (*path, key), class_of(part, key)
        if isinstance(old, dict) and isinstance(new, dict) and (inner is not None or _are_of_a_kind(old, new)):
            merged[key] = _merged(old, new, here, places, inner)
        else:
            merged[key] = new
            for known in [known for known in places if known[: len(here)] == here]:
                del places[known]
    return merged


def _are_of_a_kind(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return old.get("kind", new.get("kind")) == new.get("kind", old.get("kind"))


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


def _validated(document: str, places: Mapping[KeyPath, Place], faults: Sequence[Fault], root: type[S]) -> S:
    """Through JSON, because strict models take a list for a tuple only there."""
    try:
        spec = root.model_validate_json(document)
    except ValidationError as error:
        raise _spec_error([*faults, *schema_faults(error.errors(include_url=False), places, root)]) from error
    if faults:
        raise _spec_error(faults)
    return spec
