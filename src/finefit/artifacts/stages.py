"""What lies below a pipeline's directory, as commands name it and tables show it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from finefit.artifacts.rundir import StageDir, is_pipeline, is_run

_NUMBERED = re.compile(r"\d+-(.+)")


def models_of(place: Path) -> list[Path]:
    """The runs of an evaluation's models, in the order of its spec once it is done; none where this is no folder of an evaluation."""
    if is_run(place) or not place.is_dir():
        return []
    found = {path.name: path for path in sorted(place.iterdir()) if is_run(path) and not path.name.startswith(".")}
    return [found[name] for name in dict.fromkeys((*_order(place), *found)) if name in found]


def _order(place: Path) -> list[str]:
    """As its record has it. One that is not there yet, or of another version, orders nothing."""
    try:
        return [str(name) for name in json.loads(StageDir(place).done.read_bytes())["summary"]["models"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def evaluation_of(run: Path) -> Path | None:
    """The folder of the evaluation whose model this run is of."""
    stage = run.resolve().parent
    return stage if stage.parent.name == "stages" and is_pipeline(stage.parent.parent) else None


def stage_holding(path: Path) -> str | None:
    """The name of the stage of a pipeline that a path lies in."""
    for place in (path.resolve(), *path.resolve().parents):
        named = _NUMBERED.fullmatch(place.name)
        if named and place.parent.name == "stages" and is_pipeline(place.parent.parent):
            return named[1]
    return None


def shown_parts(path: Path) -> tuple[str, ...]:
    """Of a path, for a name: a stage is called as it is in its spec, so `runs/medical-1/stages/3-dpo` ends in `medical-1`, `dpo`."""
    parts = path.resolve().parts
    found: list[str] = []
    for at, part in enumerate(parts):
        if part == "stages" and at + 1 < len(parts) and is_pipeline(Path(*parts[:at])):
            continue
        named = (
            _NUMBERED.fullmatch(part)
            if at and parts[at - 1] == "stages" and is_pipeline(Path(*parts[: at - 1]))
            else None
        )
        found.append(named[1] if named else part)
    return tuple(found)


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """As short as they can be and still differ."""
    parts = {path: shown_parts(path) for path in dict.fromkeys(paths)}
    depth = 1
    while len({found[-depth:] for found in parts.values()}) < len({path.resolve() for path in parts}):
        depth += 1
    return {path: "/".join(found[-depth:]) for path, found in parts.items()}
