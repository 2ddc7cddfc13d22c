"""Checkpoints become visible only when complete: staged, listed with sha256 in a manifest, synced and renamed. Old ones
are removed after that, and every checkpoint is verified before it is read."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from finefit.artifacts.atomic import (
    disk_full,
    link,
    remove_folder,
    replace_folder,
    report_disk_full,
    staged_folder,
    sweep,
)
from finefit.errors import RunError
from finefit.facts.files import free_bytes, sha256_of

MANIFEST = "finefit_manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
_FEWER = "free some space or lower save.keep, then give the same command again: it goes on from the last checkpoint"


def step_of(checkpoint: Path) -> int:
    step = step_named(checkpoint.name)
    if step is None:
        raise RunError(f"{checkpoint.name} is not a checkpoint name", "checkpoints are called checkpoint-<step>")
    return step


def step_named(name: str) -> int | None:
    """None for other names, such as `base` or those of external answers."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Visible checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if step_named(p.name) is not None and p.is_dir()), key=step_of)


def write_checkpoint(
    folder: Path,
    step: int,
    fill: Callable[[Path], None],
    *,
    needed_bytes: int,
    free: Callable[[Path], int] = free_bytes,
) -> Path:
    """`fill` writes the files into the hidden folder. An existing checkpoint of this step, which then failed its
    verification, is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    final = folder / f"checkpoint-{step}"
    if (available := free(folder)) < needed_bytes:
        raise disk_full(final, needed_bytes, available, remedy=_FEWER)
    # The report is outside the clean-up: the free bytes that it names are those for the next attempt.
    with (
        report_disk_full(final, needed_bytes, remedy=_FEWER),
        staged_folder(folder, final.name, unique=False) as staging,
    ):
        fill(staging)
        _write_manifest(staging)
        replace_folder(staging, final)
    return final


def _write_manifest(staging: Path) -> None:
    files = sorted(p for p in staging.rglob("*") if p.is_file())
    path = staging / MANIFEST
    path.write_bytes(_manifest({p.relative_to(staging).as_posix(): (p.stat().st_size, sha256_of(p)) for p in files}))
    for file in files:
        file.chmod(path.stat().st_mode)  # safetensors makes its files private; these follow the user's umask


def _manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    entries = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"version": 1, "files": entries}, indent=1).encode()


def problems(checkpoint: Path) -> list[str]:
    """Differences from the manifest; empty if every byte is as it was written."""
    try:
        return _differences(checkpoint)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except OSError as error:
        return [f"{error.filename or checkpoint} cannot be read: {error.strerror}"]


def _differences(checkpoint: Path) -> list[str]:
    expected = _listed((checkpoint / MANIFEST).read_bytes())
    if expected is None:
        return [f"{MANIFEST} is damaged"]
    present = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if not p.is_dir()} - {MANIFEST}
    found = [f"{name} is not in the manifest" for name in sorted(present - expected.keys())]
    for name, (size, digest) in expected.items():
        path = checkpoint / name
        if name not in present:
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
        elif sha256_of(path) != digest:
            found.append(f"{name} has changed since it was written")
    return found


def _listed(text: bytes) -> dict[str, tuple[int, str]] | None:
    """None unless the bytes are exactly those that would be written: a flip without a change of meaning counts too."""
    try:
        listed = json.loads(text)["files"].items()
        files = {str(name): (int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in listed}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if _manifest(files) == text else None


def newest_verified(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer one that does not."""
    rejected: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        if not (found := problems(checkpoint)):
            return checkpoint, rejected
        rejected.append(f"{checkpoint.name} is passed over: {'; '.join(found)}")
    return None, rejected


def superfluous(steps: Collection[int], *, keep: int, protected: Collection[int]) -> list[int]:
    """Steps whose checkpoints may be deleted: not among the newest `keep`, and not protected (best, newest verified,
    resumed from)."""
    return sorted(set(steps) - set(sorted(steps)[-keep:]) - set(protected))


def rotate(folder: Path, *, keep: int, protected: Collection[int]) -> list[int]:
    gone = superfluous([step_of(p) for p in list_checkpoints(folder)], keep=keep, protected=protected)
    for step in gone:
        remove_folder(folder / f"checkpoint-{step}")
    return gone


def name_checkpoint(folder: Path, alias: str, checkpoint: Path) -> None:
    """`best` and `final` are stable names beside the numbered checkpoints."""
    if (folder / alias).is_dir() and not (folder / alias).is_symlink():  # a copy that followed the link
        remove_folder(folder / alias)
    link(folder / alias, checkpoint.name)
