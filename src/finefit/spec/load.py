"""Loads a spec file with its `base` and `--set` overrides as a Spec, or as a Pipeline if it has stages. All problems
are reported at once, with line, value and what is accepted. Also writes changes into the user's text, and values as
YAML."""

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from finefit import bounded
from finefit.errors import SpecError
from finefit.spec import foreign, reader
from finefit.spec.pipeline import Pipeline
from finefit.spec.reader import KeyPath, Place, Reader, SpecProblem
from finefit.spec.schema import Spec, Training, usual_lr
from finefit.spec.stages import TrainStage

_LINES_OF_A_FILE = 10_000_000
_AFTER_ALL_FILES = 1_000_000_000
MAX_SPEC_BYTES = 1 << 20
_DATA_ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_GZIP = b"\x1f\x8b"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
S = TypeVar("S", bound=BaseModel)
Values = dict[str, Any]
_OVERRIDE = re.compile(r"([\w-]{1,64}(?:\.[\w-]{1,64})*)=(.*)", re.ASCII | re.DOTALL)


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """Loads a spec of one training; a spec with stages is refused."""
    return parse_spec(spec_text(path), where=str(path), overrides=overrides)


def load_any(path: Path, overrides: Sequence[str] = ()) -> Spec | Pipeline:
    return parse_any(spec_text(path), where=str(path), overrides=overrides)


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Loads a spec with stages unchanged, and a flat one as a pipeline with one stage."""
    return Pipeline.of(load_any(path, overrides))


def parse_spec(text: str, *, where: str, overrides: Sequence[str] = ()) -> Spec:
    found = parse_any(text, where=where, overrides=overrides)
    if isinstance(found, Pipeline):
        problem = f"{where} has stages ({', '.join(found.stages)}), but a single training is expected here"
        raise SpecError(problem, "name a spec without `stages`")
    return found


def parse_any(text: str, *, where: str, overrides: Sequence[str] = ()) -> Spec | Pipeline:
    """`where` names the text in messages and is usually its path; a `base` is relative to it."""
    draft = _read(text, Path(where))
    for number, override in enumerate(overrides):
        draft.set(override, (_AFTER_ALL_FILES + number, f"--set {override}"))
    if not isinstance(draft.values, dict):
        raise _spec_error(draft.problems)
    if (tool := foreign.tool_named(draft.values)) is not None:
        raise SpecError(f"{where} is a config of {tool}, not a spec", foreign.remedy(where))
    filled: list[KeyPath] = [] if "name" in draft.values else [("name",)]
    draft.values.setdefault("name", _name_of(Path(where)))
    root: type[Spec] | type[Pipeline] = Spec
    if "stages" in draft.values:
        draft.spread_defaults()
        root = Pipeline
    values = _with_defaults(draft.values, root, filled)
    found: Spec | Pipeline = _validated(json.dumps(values), draft.places, draft.problems, root)
    for *section, key in filled:  # a default is not shown as if the user had written it
        part: Any = found
        for name in section:
            part = part[name] if isinstance(part, dict) else getattr(part, str(name))
        part.model_fields_set.discard(key)
    return found


def _with_defaults(values: Values, part: type[BaseModel], filled: list[KeyPath], path: KeyPath = ()) -> Values:
    """A section whose default has a `kind` may omit it, and the optimizer its learning rate: `tuning: {rank: 8}` is
    LoRA. So each change of one key that a plan suggests can be made to a spec without that section."""
    values = dict(values)
    if isinstance(stages := values.get("stages"), dict):
        trainings = {name for name, stage in stages.items() if isinstance(stage, dict) and stage.get("kind") == "train"}
        new = {name: _with_defaults(stages[name], TrainStage, filled, ("stages", name)) for name in trainings}
        values["stages"] = stages | new
    sections: dict[str, Values] = {}
    for name, field in part.model_fields.items():
        kind, written = getattr(field.default, "kind", None), values.get(field.alias or name)
        of_others = {key for found in reader.classes_of(field.annotation) for key in reader.fields_of(found)}
        of_others -= reader.fields_of(type(field.default)).keys()
        if kind is not None and isinstance(written, dict) and not written.keys() & of_others:
            sections[field.alias or name] = {"kind": kind}
    if issubclass(part, Training):
        tuning = values.get("tuning", {})
        named = tuning.get("kind", "lora") if isinstance(tuning, dict) else ""
        sections["optimizer"] = {"lr": usual_lr(str(named))}
    for name, section in sections.items():
        if isinstance(written := values.get(name), dict):
            values[name] = section | written
            filled += [(*path, name, key) for key in section.keys() - written.keys()]
    return values


def whole_text(path: Path) -> str:
    """Returns the spec file as written. With a `base`, the merged values follow it, so that the text is complete."""
    text = spec_text(path)
    draft = _read(text, path)
    if not draft.bases:
        return text
    names = ", ".join(str(base) for base in draft.bases)
    lines = "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
    return f"# This file merged with {names}. As it was written:\n#\n{lines}\n{dumped(draft.values)}"


def _name_of(path: Path) -> str:
    """Returns the default name of a run, derived from its spec file's name."""
    return _NOT_IN_NAMES.sub("-", path.stem).strip("-._")[:64] or "run"


def spec_text(path: Path) -> str:
    """Of a small YAML file, whatever is there: anything else is a SpecError."""
    try:
        if path.name.lower().removesuffix(".gz").endswith(_DATA_ENDINGS) and not path.exists():
            raise SpecError(f"{path}: there is no such file, but a spec is a YAML file", "give the path of a spec")
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise SpecError(f"{path} is {kind}, but a spec is a YAML file", "give the path of the file")
        with bounded.open_binary(path) as file:
            content = file.read(MAX_SPEC_BYTES + 1)
        if _holds_rows(path, content):
            raise _data_file(path)
        if len(content) > MAX_SPEC_BYTES:
            problem = f"{path} is larger than {MAX_SPEC_BYTES >> 20} MiB, but a spec is a short YAML file"
            raise SpecError(problem, "give the spec, and refer to large files by their paths")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise SpecError(f"{path}:{line}: byte 0x{byte:02x} is not UTF-8 text; save the file as UTF-8") from error
    except FileNotFoundError as error:
        try:
            names = sorted(found.name for found in path.parent.iterdir() if found.suffix in {".yaml", ".yml"})
        except OSError as reason:
            there = f"its folder cannot be listed either ({reason.strerror})"
        else:
            there = reader.nearest(path.name, names) or "`finefit recipes` lists specs to start from"
        raise SpecError(f"{path}: there is no such file; {there}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{path}: cannot be read ({error}); give a YAML file") from error


def _holds_rows(path: Path, content: bytes) -> bool:
    """Returns whether the file holds data instead of a spec. A spec may be written as JSON: it is then one short
    object."""
    name, start = path.name.lower().removesuffix(".gz"), content.lstrip()[:1]
    is_list = start == b"[" or (start == b"{" and b"\n{" in content) or len(content) > MAX_SPEC_BYTES
    return name.endswith(_DATA_ENDINGS) or content.startswith(_GZIP) or (name.endswith(".json") and is_list)


def _data_file(path: Path) -> SpecError:
    problem = f"{path} is a data file, not a spec; a spec names the data and the model"
    smallest = f"model: {{kind: embedded, name: smollm2-135m}}\ndata: {{train: [{{path: {inline(str(path))}}}]}}"
    ways = f"`finefit init {path}` writes one; or save this as spec.yaml, put your model in, and pass spec.yaml instead"
    return SpecError(problem, f"{ways}:\n{smallest}")


def _read(text: str, path: Path, above: tuple[Path, ...] = ()) -> "_MergedValues":
    """`above`: the resolved files that name this one as their base."""
    first = len(above) * _LINES_OF_A_FILE
    source = Reader(text, lambda line: (first + line, f"{path}:{line}"))
    values = source.read()
    if not isinstance(values, dict) and not source.problems:
        problem = "the spec is empty" if values is None else f"{reader.shown(values)} is {reader.NAMED[type(values)]}"
        needed = reader.listed(key for key, field in Spec.model_fields.items() if field.is_required() and key != "name")
        source.tell(1, problem, f"a spec is a mapping with at least the keys {needed}")
    draft = _MergedValues(values, {(): source.place(1)} | source.places, source.problems)
    return _with_base(draft, path, above) if isinstance(values, dict) and "base" in values else draft


def _with_base(draft: "_MergedValues", path: Path, above: tuple[Path, ...]) -> "_MergedValues":
    """Merges the values over those of `base`. A base that cannot be read is reported alone, since its values are
    missing."""
    named, place = draft.values["base"], draft.places["base",]

    def refused(problem: str, remedy: str) -> SpecError:
        return _spec_error([*draft.problems, SpecProblem(place=place, path=("base",), problem=problem, remedy=remedy)])

    if not isinstance(named, str) or not named:
        raise refused(f"{reader.shown(named)} is not a path", "give the path of a spec file, relative to this one")
    below, chain = path.parent / named, (*above, _resolved(path))
    if _resolved(below) in chain:
        circle = " -> ".join(found.name for found in (*chain[chain.index(_resolved(below)) :], below))
        raise refused(f"{circle}: these files name each other as base", "remove `base` from one of these files")
    try:
        text = spec_text(below)
    except SpecError as error:
        raise refused(error.problem, "the path of a base is relative to the file that names it") from error
    rest = {key: value for key, value in draft.values.items() if key != "base"}
    return _read(text, below, chain).under(_MergedValues(rest, draft.places, draft.problems), below)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError):  # not a valid path; reading it reports that
        return path


def spec_from_json(document: str) -> Spec:
    return _validated(document, {(): (1, "spec.json")}, [], Spec)


def pipeline_from_json(document: str) -> Pipeline:
    return _validated(document, {(): (1, "spec.json")}, [], Pipeline)


def spec_to_json(spec: Spec | Pipeline) -> str:
    """Keys have the order of the schema, with defaults: equal specs give equal text."""
    return spec.model_dump_json(by_alias=True, indent=2)


def _spec_error(problems: Iterable[SpecProblem]) -> SpecError:
    return SpecError("\n".join(str(problem) for problem in sorted(problems, key=lambda problem: problem.place)))


@dataclass(slots=True)
class _MergedValues:
    """The values of a spec while files and overrides are merged; later values win."""

    values: Any
    places: dict[KeyPath, Place]
    problems: list[SpecProblem]
    bases: tuple[Path, ...] = ()
    """Files whose values were merged below these."""

    def under(self, upper: "_MergedValues", name: Path) -> "_MergedValues":
        if not isinstance(self.values, dict):
            return _MergedValues(upper.values, upper.places, [*upper.problems, *self.problems], (name, *self.bases))
        places = dict(self.places)
        root = Pipeline if "stages" in upper.values or "stages" in self.values else Spec
        values = _merged(self.values, upper.values, (), places, root)
        return _MergedValues(values, places | upper.places, [*upper.problems, *self.problems], (name, *self.bases))

    def spread_defaults(self) -> None:
        """Merges `defaults` under every training stage, and removes the key."""
        below, stages = self.values.get("defaults"), self.values["stages"]
        if not isinstance(below, dict) or not isinstance(stages, dict):
            return
        for name, stage in stages.items():
            if isinstance(stage, dict) and stage.get("kind") == "train":
                here: KeyPath = ("stages", name)
                defaults = {path[1:]: at for path, at in self.places.items() if path[:1] == ("defaults",)}
                places = {(*here, *path): at for path, at in defaults.items() if path}
                self.values["stages"] = stages = stages | {name: _merged(below, stage, here, places, TrainStage)}
                self.places = places | self.places
        self.values = {key: value for key, value in self.values.items() if key != "defaults"}

    def set(self, override: str, place: Place) -> None:
        match = _OVERRIDE.fullmatch(override)
        if match is None or not match[2].strip():
            remedy = "write key.path=value, for instance schedule.epochs=2; `null` means no value"
            self.problems.append(SpecProblem(place=place, problem="this is not a valid override", remedy=remedy))
            return
        path = tuple(int(key) if key.isdigit() else key for key in match[1].split("."))
        source = Reader(match[2], lambda _: place)
        new = source.read()
        try:
            values = _replaced(self.values, path, new)
        except LookupError as error:
            source.tell(1, str(error), "override the whole list, or an existing item", path)
        if source.problems:
            self.problems += source.problems
            return
        self.values = values
        self.places = {known: at for known, at in self.places.items() if known[: len(path)] != path}
        for depth in range(1, len(path) + 1):
            self.places.setdefault(path[:depth], place)


def _merged(
    below: Values, above: Values, path: KeyPath, places: dict[KeyPath, Place], part: type[BaseModel] | None
) -> Values:
    """Mappings are merged by key; anything else, and a mapping whose kind has other keys, is replaced, including its
    places."""
    merged = dict(below)
    fields = reader.fields_of(part)
    for key, new in above.items():
        old: Any = below.get(key)
        here, classes = (*path, key), reader.classes_of(fields.get(key))
        # the class of the mapping under `key`; None if its `kind` chooses the class, or no class knows its keys
        inner = classes[0] if len(classes) == 1 else None
        is_mapping = isinstance(old, dict) and isinstance(new, dict)
        if is_mapping and (inner or old.get("kind", new.get("kind")) == new.get("kind", old.get("kind"))):
            merged[key] = _merged(old, new, here, places, inner)
            continue
        merged[key] = new
        for known in [known for known in places if known[: len(here)] == here]:
            del places[known]
    return merged


def _replaced(old: Any, path: KeyPath, new: Any) -> Any:
    """Returns a copy with `new` at `path`. A mapping replaces a scalar: `levers: auto` under `levers.micro_batch=4`."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(old, list):
        if not isinstance(key, int) or key >= len(old):
            raise LookupError(f"`{key}` is not an item of a list of {len(old)} (the first is 0)")
        return [*old[:key], _replaced(old[key], rest, new), *old[key + 1 :]]
    base = old if isinstance(old, dict) else {}
    return base | {str(key): _replaced(base.get(str(key)), rest, new)}


def _validated(document: str, places: Mapping[KeyPath, Place], problems: Sequence[SpecProblem], root: type[S]) -> S:
    """Validates JSON, because only there strict models accept a list for a tuple."""
    try:
        spec = root.model_validate_json(document)
    except ValidationError as error:
        found = reader.schema_problems(error.errors(include_url=False), places, root)
        raise _spec_error([*problems, *found]) from error
    if problems:
        raise _spec_error(problems)
    return spec


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_ODD = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def changed_text(text: str, changes: Sequence[str]) -> str:
    """Writes `changes`, in the form of `--set`, into the text; comments, order and quotes are kept. An item of a list
    that only the base has cannot be changed here, since a list is replaced as a whole."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    document = yaml.load(text)
    for change in changes:
        key, value = change.split("=", 1)
        if (elsewhere := _set_value(document, key.split("."), YAML(typ="rt").load(value))) is not None:
            there = document.get("base", "another file")
            raise SpecError(f"{elsewhere} is in {there}, so {change} cannot be written here", "change it in that file")
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


def dumped(values: dict[str, Any], indent: str = "") -> str:
    """Writes YAML that the reader parses to the same values, including odd characters, which ruamel does not; a list is
    one line."""
    lines = ""
    for key, value in values.items():
        lines += f"{indent}{inline(key)}:"
        is_block = isinstance(value, dict) and value
        lines += f"\n{dumped(value, indent + '  ')}" if is_block else f" {inline(value)}\n"
    return lines


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inline(key)}: {inline(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and reader.scalar(value) == value:
            return value
        # JSON, with those characters escaped that end a line only in YAML
        return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)


def _set_value(values: Any, path: Sequence[str], new: Any) -> str | None:
    """Replaces a value that is not a mapping: `levers: auto` under `levers.micro_batch=4`. If `path` leads into a list
    that `values` lack, returns the key of that list."""
    for depth, key in enumerate(path):
        if key.isdigit() and not isinstance(values, list):
            return ".".join(path[:depth])
        at = int(key) if isinstance(values, list) else key
        if depth == len(path) - 1:
            values[at] = new
        elif not isinstance(values, list) and not isinstance(values.get(key), dict | list):
            values[key] = {}
        values = values[at]
    return None
