"""Translates a config of another tool into the settings of a spec, with a line for every key: nothing is dropped
silently."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from finefit.errors import SpecError
from finefit.importers.keys import Config, Fate, Outcome, Tool, dropped, equal

_SECRET: Final = re.compile(r"(^|\.)((\w*_)?(hub|hf|auth|access|api)_)?token$|api_?key$|secret|password")
"""In the name of a key; `pad_token` is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one key."""

    key: str
    value: Any
    """Without secrets, since it is shown."""
    outcome: Outcome
    is_default: bool = False
    """Whether the config lacks the key, and this is what the tool does then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    tool: Tool
    config: Config
    values: dict[str, Any]
    """The spec."""
    lines: tuple[Line, ...]

    def of(self, fate: Fate) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.outcome.fate == fate)


def grouped(lines: Iterable[Line]) -> list[list[Line]]:
    """Keys that together have one outcome, such as those whose product is the global batch."""
    found: list[list[Line]] = []
    for line in lines:
        alike = next((group for group in found if group[0].outcome == line.outcome), None)
        if alike is None or not line.outcome.settings:
            found.append([line])
        else:
            alike.append(line)
    return found


def translate(tool: Tool, config: Config, document: Mapping[str, Any]) -> Translation:
    flat = dict(_flat(document, tool))
    config = replace(config, values=flat, defaults=tool.defaults())
    tool.require(config)
    lines = tuple(_lines(tool, config, flat))
    settings: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: not line.is_default):  # what the config says wins
        settings |= line.outcome.settings
    kept = tool.finish(config, settings)
    shown = tuple(_without_effect(line, kept) for line in lines)
    return Translation(tool=tool, config=config, values=nested(kept), lines=shown)


def _without_effect(line: Line, kept: Mapping[str, Any]) -> Line:
    """Settings that belong to another kind of tuning are not part of the spec."""
    lost = line.outcome.settings.keys() - kept.keys()
    if not lost or line.outcome.fate == "not carried over":
        return line
    left = {place: value for place, value in line.outcome.settings.items() if place not in lost}
    outcome = replace(line.outcome, settings=left) if left else equal("no effect on what is tuned here, in both")
    return replace(line, outcome=outcome)


def _flat(values: Mapping[str, Any], tool: Tool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields values by dotted key. A section that has an entry of its own in the table stays whole."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in tool.keys:
            yield from _flat(value, tool, f"{key}.")
        else:
            yield key, value


def _lines(tool: Tool, config: Config, flat: Mapping[str, Any]) -> Iterator[Line]:
    for name, value in flat.items():
        key = tool.keys.get(name)
        if value is None and (key is None or key.default is None):
            yield Line(key=name, value=value, outcome=equal("not set"))
        elif value is None:
            continue  # the default is translated below
        elif key is not None:
            shown = _without_secrets(name, value)
            yield Line(key=name, value=shown, outcome=key.read(value, replace(config, reading=name)))
        else:
            yield Line(key=name, value=_without_secrets(name, value), outcome=_of_unknown(tool, name))
    for name, key in tool.keys.items():
        if key.default is not None and flat.get(name) is None:
            yield Line(
                key=name,
                value=key.default,
                outcome=key.read(key.default, replace(config, reading=name)),
                is_default=True,
            )


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, inner) for inner in value]
    return "(not shown)" if isinstance(value, str) and _SECRET.search(name) else value


def _of_unknown(tool: Tool, name: str) -> Outcome:
    if name.startswith(tool.ignored):
        return equal(f"concerns only how {tool.name} itself runs")
    return dropped(f"finefit does not know this key of {tool.name}: look up what it does")


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mappings for dotted keys."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise SpecError(f"{path} and a key above it are both given", "keep one")
        inner[name] = value
    return values
