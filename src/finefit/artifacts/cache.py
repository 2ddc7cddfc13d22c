"""The user's cache: records and folders keyed by everything that they were made from, and the measured errors of
earlier predictions. A cache that cannot be written costs only time, except for folders that the caller needs."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

from pydantic import Field, PositiveInt, ValidationError

import finefit
from finefit.artifacts.atomic import Journal, parse_line, publish, staged_folder
from finefit.artifacts.reading import adapter_of, read_bytes
from finefit.artifacts.records import Record, read_record, write_record
from finefit.errors import DiskFull, RunError
from finefit.facts.files import finefit_cache
from finefit.facts.machine import CPUINFO, count_cores, read_cpu_model

R = TypeVar("R", bound=Record)
M = TypeVar("M", "Measurement", "StepTime")
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

WORTH_A_WARNING = 0.03
_PACKAGES = ("finefit", "torch", "transformers", "peft")
_ABANDONED_SECONDS = 86400
_LATEST_RUNS = 10
"""Runs that correct predicted times; earlier ones may have had other settings of card and host."""


def content_key(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_digest(*packages: str) -> str:
    """Covers the source text of these packages of finefit, because results may change with it."""
    text = hashlib.sha256()
    for package in packages:
        for file in sorted((Path(finefit.__file__).parent / package).rglob("*.py")):
            text.update(file.read_bytes())
    return text.hexdigest()


def cached_record(
    name: str,
    content: object,
    kind: type[R],
    make: Callable[[], R],
    *,
    max_entries: int | None = None,
) -> R:
    """The record that was made from the same content before, or a new one. `name` is its folder in the cache."""
    path = finefit_cache() / name / f"{content_key(content)}.json"
    with suppress(RunError, OSError):  # absent, of another version, or unreadable
        return read_record(path, kind)
    record = make()
    with suppress(OSError, DiskFull):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record)
        forget_old(path.parent, max_entries=max_entries)
    return record


def cached_folder(
    folder: Path,
    fill: Callable[[Path], None],
    *,
    is_complete: Callable[[Path], bool] = Path.is_dir,
    max_entries: int | None = None,
    max_bytes: int | None = None,
) -> Path:
    """A folder that `fill` fills under a hidden name on first use. Several processes may do so at once, because its
    name contains its key."""
    if is_complete(folder):
        with suppress(OSError):
            folder.touch()  # used entries are forgotten last
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder.parent} cannot be written: {error.strerror}"
        raise RunError(problem, "set XDG_CACHE_HOME to a folder that can be") from None
    with staged_folder(folder.parent) as staging:
        fill(staging)
        if not is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            publish(staging, folder)
        except OSError:
            if not is_complete(folder):  # otherwise another process was faster
                raise
    forget_old(folder.parent, max_entries=max_entries, max_bytes=max_bytes)
    return folder


def forget_old(root: Path, *, max_entries: int | None = None, max_bytes: int | None = None) -> None:
    """Keeps the most recently used entries, at least one. Hidden ones, left by killed processes, are removed after a
    day."""
    if max_entries is None and max_bytes is None:
        return

    def last_use(path: Path) -> tuple[float, int, Path]:
        """The time of the last use, and the size in bytes. Another process may remove the entry meanwhile."""
        try:
            files = path.iterdir() if path.is_dir() else (path,)
            return path.stat().st_mtime, sum(file.stat().st_size for file in files), path
        except OSError:
            return 0.0, 0, path

    kept, kept_bytes = 0, 0
    for used, size_bytes, path in sorted(map(last_use, root.iterdir()), reverse=True):
        if path.name.startswith("."):
            is_old = used < time.time() - _ABANDONED_SECONDS
        else:
            kept, kept_bytes = kept + 1, kept_bytes + size_bytes
            is_old = kept > (max_entries or kept) or (kept > 1 and kept_bytes > (max_bytes or kept_bytes))
        if is_old and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif is_old:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    card: str
    predicted_bytes: PositiveInt
    measured_bytes: PositiveInt

    @property
    def error(self) -> float:
        """The relative error; positive if the prediction was too high."""
        return self.predicted_bytes / self.measured_bytes - 1


def keep_measurement(found: Measurement) -> None:
    _keep(found)


def uncertainty(card: str) -> float | None:
    """The largest relative error of this card's predictions with the installed versions; None without a measurement."""
    return max((abs(found.error) for found in _kept(Measurement) if found.card == card), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The median step of a run beside its prediction."""

    card: str
    host: str
    """`host_here` of the machine with the card."""
    predicted_seconds: _Seconds
    measured_seconds: _Seconds


def keep_step_time(found: StepTime) -> None:
    _keep(found)


def time_factor(card: str, host: str) -> float | None:
    """Measured by predicted time: the median of the latest runs on this card and host with the installed versions; None
    without a run."""
    runs = [found for found in _kept(StepTime) if (found.card, found.host) == (card, host)]
    factors = [run.measured_seconds / run.predicted_seconds for run in runs[-_LATEST_RUNS:]]
    return median(factors) if factors else None


def host_here() -> str:
    """The same for machines of one kind, such as the containers of one server."""
    return f"{read_cpu_model(CPUINFO)}, {count_cores()} cores"


def _keep(found: Measurement | StepTime) -> None:
    """What cannot be written is only not known later: the training that measured it goes on."""
    with suppress(OSError, DiskFull, RunError), Journal(_measurements()) as journal:
        journal.write(**asdict(found), versions=_versions())


def _kept(kind: type[M]) -> Iterator[M]:
    """Of the installed versions. What cannot be read, such as a damaged line, is passed over: plans need none of it."""
    try:
        lines, versions = read_bytes(_measurements()).splitlines(), _versions()
    except RunError:
        return
    for line in map(parse_line, lines):
        if line is not None and line.get("versions") == versions:
            with suppress(ValidationError):
                yield adapter_of(kind).validate_python(line)


def _measurements() -> Path:
    return finefit_cache() / "measurements.jsonl"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
