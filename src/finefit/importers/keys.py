"""What a key of another tool becomes: settings of a spec, nothing because both tools do the same, or a line in the list
of what is not carried over. A tool is a table of such keys."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finefit.errors import SpecError

Fate = Literal["translated", "equal", "not carried over"]
Settings = Mapping[str, Any]
"""Values by the dotted key of the spec."""
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*)?\.?[0-9]*([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None}
OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one key with one value."""

    fate: Fate
    settings: Settings = field(default_factory=dict)
    note: str = ""
    matters: bool = False
    """Whether another model is trained because of it."""


class NotTrainedHere(SpecError):
    """The config asks for a training, or something else, that finefit does not offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A config of another tool, and what is known about where it would run."""

    where: str
    values: Settings
    """By dotted key; a key whose table entry reads a whole section has that section."""
    defaults: Settings
    """Of the tool, by dotted key."""
    folder: Path
    """The folder of the config."""
    target: Path
    """The folder of the spec, which its paths start from."""
    reading: str = ""
    """The key that is being read."""
    devices: int = 1
    """Processes of the training, which are given to the launcher and not to the config."""
    dataset_info: Path | None = None
    """LLaMA-Factory's list of datasets, if the user names it."""
    packed: "ToolPacks | None" = None
    """Measured, where the tool packs rows and the data is here."""
    count_rows: Callable[[Mapping[str, Any]], int | None] = lambda source: None
    """Counts the rows of a source; None if they are not here."""

    def get(self, key: str) -> Any:
        """Returns the value, or the tool's default for it."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def is_on(self, key: str) -> bool:
        return self.get(key) not in OFF

    def number(self, key: str, otherwise: float = 0) -> float:
        value = self.get(key)
        return otherwise if value is None else as_number(value, key, self.where)

    def whole(self, key: str, otherwise: int = 0) -> int:
        return round(self.number(key, otherwise))

    def find(self, path: str) -> Path | None:
        """Looks for a file or folder from the config's folder, then from those above it and the current one."""
        if "://" in path:
            return None
        for base in (self.folder, Path(), *list(self.folder.resolve().parents)[:3]):
            place = base / Path(path).expanduser()
            try:
                if place.exists():
                    return place
            except OSError:  # not a path
                return None
        return None

    def written(self, place: Path) -> str:
        """Returns a path as the spec has it: relative to the spec if it lies below it."""
        found, base = place.resolve(), self.target.resolve()
        return found.relative_to(base).as_posix() if found.is_relative_to(base) else found.as_posix()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPacks:
    """The rows of a training in packs."""

    rows_per_pack: float
    num_rows: int
    """Without those that are held out."""

    def rows_of(self, packs: int) -> float:
        """Returns the mean; a step has no more rows than there are."""
        return min(packs * self.rows_per_pack, self.num_rows)


Read = Callable[[Any, Config], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    read: Read
    place: str = ""
    """The key of the spec; empty if there is none."""
    fate: Fate = "translated"
    """What usually becomes of it, for the table of keys."""
    note: str = ""
    """What differs in meaning or unit, or why the key is not carried over."""
    default: Any = None
    """What the tool does without the key, if it has to be written into a spec."""


Keys = Mapping[str, Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRow:
    """A row as finefit would write it without a limit of length, in tokens."""

    length: int
    supervised: int
    is_conversation: bool
    """Whether its column holds messages, not a prompt and an answer."""
    turns: tuple[tuple[int, int], ...]
    """Tokens before every answer that is trained on, and of the answer with its end."""


Seen = Callable[[SeenRow, Config], tuple[int, int]]
"""Returns the tokens of a row that the tool trains with, and those it trains on; nothing of a dropped row."""


def cut_at_the_end(row: SeenRow, limit: int, *, answers_only: bool) -> tuple[int, int]:
    """The answer is the end of the row."""
    kept = min(row.length, limit)
    return kept, max(0, kept - (row.length - row.supervised)) if answers_only else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    slug: str
    """Its name in paths."""
    keys: Keys
    marks: frozenset[str]
    """Keys that identify its configs."""
    seen: Seen
    """What the tool trains on."""
    per_step: Callable[[Config], int]
    """Rows of an optimizer step on all devices, or packs if rows are packed."""
    packs: Callable[[Config], int | None]
    """The tokens of a pack; None if a step has rows."""
    wording: Callable[[Config], Callable[[Mapping[str, Any]], Mapping[str, str]] | None] = lambda config: None
    """Returns how the tool writes a record as prompt and answer; None if the spec says the same."""
    differences: Sequence[str] = ()
    """What the tool does differently in every training, whatever its config says."""
    require: Callable[[Config], None] = lambda config: None
    """Raises `NotTrainedHere` for configs that train nothing here."""
    finish: Callable[[Config, Settings], Settings] = lambda config, settings: settings
    """Changes settings that depend on several keys at once."""
    ignored: tuple[str, ...] = ()
    """Beginnings of keys that concern only the tool's own way of working."""

    def defaults(self) -> dict[str, Any]:
        return {name: key.default for name, key in self.keys.items() if key.default is not None}


def translated(settings: Settings, note: str = "") -> Outcome:
    return Outcome(fate="translated", settings=settings, note=note)


def equal(note: str = "") -> Outcome:
    return Outcome(fate="equal", note=note)


def dropped(note: str, *, matters: bool = True, settings: Settings | None = None) -> Outcome:
    """`settings`: the nearest that finefit has."""
    return Outcome(fate="not carried over", note=note, matters=matters, settings=settings or {})


def as_number(value: Any, key: str, where: str) -> float:
    """Reads a number as YAML 1.1 tools do: `2e-5` without a dot is text there, and the tool makes it a number."""
    if isinstance(value, str) and value.strip() and _NUMBER.fullmatch(value.strip()):
        value = float(value.replace("_", ""))
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise SpecError(f"{where}: {key} is {value!r}, not a number", "correct it in the config")
    return value


def as_flag(value: Any) -> Any:
    """Reads `"true"` as true; any other value is returned unchanged."""
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


def as_list(value: Any) -> list[Any]:
    """Reads `a,b` and `[a, b]` alike."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _shortest(value: float) -> int | float:
    return int(value) if float(value).is_integer() and abs(value) >= 1 else value


def number(place: str, note: str = "", *, default: float | None = None) -> Key:
    def read(value: Any, config: Config) -> Outcome:
        return translated({place: _shortest(as_number(value, config.reading, config.where))})

    return Key(read=read, place=place, note=note, default=default)


def whole(place: str, note: str = "", *, default: int | None = None) -> Key:
    def read(value: Any, config: Config) -> Outcome:
        return translated({place: round(as_number(value, config.reading, config.where))})

    return Key(read=read, place=place, note=note, default=default)


def switch(place: str, on: Any, note: str = "", *, off: Any = None) -> Key:
    """`on`: the value at `place` if the key is true; `off`: that if it is false, by default none."""

    def read(value: Any, config: Config) -> Outcome:
        if as_flag(value) not in OFF:
            return translated({place: on})
        return equal("off in both") if off is None else translated({place: off})

    return Key(read=read, place=place, note=note)


def same(note: str) -> Key:
    """Both tools do the same, or the key changes nothing that is trained."""
    return Key(read=lambda value, config: equal(note), fate="equal", note=note)


def left(note: str, *, matters: bool = True, place: str = "") -> Key:
    """The key is listed as not carried over, unless it is off."""

    def read(value: Any, config: Config) -> Outcome:
        return equal("off in both") if as_flag(value) in OFF else dropped(note, matters=matters)

    return Key(read=read, place=place, fate="not carried over", note=note)


def refused(what: str, remedy: str) -> Key:
    """The config is refused, unless the key is off."""

    def read(value: Any, config: Config) -> Outcome:
        if as_flag(value) in OFF:
            return equal("off in both")
        raise NotTrainedHere(f"{config.where} asks for {what}, which finefit does not offer", remedy)

    return Key(read=read, fate="not carried over", note=f"refused: finefit does not offer {what}")


def choice(
    place: str, words: Mapping[str, Any], *, otherwise: Any, note: str = "", default: str | None = None, what: str = ""
) -> Key:
    """Translates by a table; any other word is listed as not carried over, and `otherwise` takes its place."""

    def read(value: Any, config: Config) -> Outcome:
        word = str(value).lower()
        if word in words:
            return translated({place: words[word]})
        return dropped(
            f"finefit has no {what or place} {value}; {otherwise} takes its place", settings={place: otherwise}
        )

    return Key(read=read, place=place, note=note, default=default)


def by(place: str, read: Read, note: str, *, default: Any = None) -> Key:
    """`read` decides."""
    return Key(read=read, place=place, note=note, default=default)
