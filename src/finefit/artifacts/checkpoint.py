"""A checkpoint is visible only when it is whole: staged in a hidden folder, fsynced, listed with sha256 in a manifest, renamed, and only
then are old ones removed. What is read back is verified first."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from finefit.artifacts.atomic import disk_full, full_disk_named, link, sync_file, sync_folder
from finefit.errors import RunError
from finefit.facts.files import free_bytes

MANIFEST = "finefit_manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
_STAGING = ".staging-"
_DOOMED = ".removing-"
_BLOCK = 1 << 20
_FEWER = "free some space or lower save.keep, then give the same command again: it goes on from the last checkpoint"


def step_of(checkpoint: Path) -> int:
    step = step_named(checkpoint.name)
    if step is None:
        raise RunError(f"{checkpoint.name} is no checkpoint name", "checkpoints are called checkpoint-<step>")
    return step


def step_named(name: str) -> int | None:
    """None for what no checkpoint is called: the base, and answers made elsewhere, whatever their file is called."""
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
    """`fill` writes the files into a folder that nobody else sees."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    final = folder / f"checkpoint-{step}"
    if (available := free(folder)) < needed_bytes:
        raise disk_full(final, needed_bytes, available, remedy=_FEWER)
    staging = folder / f"{_STAGING}{final.name}"
    with full_disk_named(
        final, needed_bytes, remedy=_FEWER
    ):  # around the clean-up: the bytes it names as free are those for the next attempt
        staging.mkdir()
        try:
            fill(staging)
            _seal(staging)
        except BaseException:
            shutil.rmtree(staging)
            raise
    if final.exists():  # a checkpoint that failed verification and is being written again
        _remove(final)
    staging.rename(final)
    sync_folder(folder)
    return final


def _seal(staging: Path) -> None:
    files = sorted(p for p in staging.rglob("*") if p.is_file())
    path = staging / MANIFEST
    path.write_bytes(_manifest({p.relative_to(staging).as_posix(): (p.stat().st_size, _sha256(p)) for p in files}))
    for file in (*files, path):
        file.chmod(path.stat().st_mode)  # safetensors makes its files private; these follow the user's umask
        sync_file(file)
    for inner in (*(p for p in staging.rglob("*") if p.is_dir()), staging):
        sync_folder(inner)


def _manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    entries = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"version": 1, "files": entries}, indent=1).encode()


def problems(checkpoint: Path) -> list[str]:
    """What differs from the manifest; empty when every byte is as it was written."""
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
        elif _sha256(path) != digest:
            found.append(f"{name} has changed since it was written")
    return found


def _listed(text: bytes) -> dict[str, tuple[int, str]] | None:
    """None unless the bytes are those that would be written for what they say: a flip that leaves the meaning alone is a flip too."""
    try:
        files = {
            str(name): (int(entry["size_bytes"]), str(entry["sha256"]))
            for name, entry in json.loads(text)["files"].items()
        }
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
    """The steps whose checkpoints may go: not among the newest `keep`, and not protected (best, newest verified, resumed from)."""
    kept = set(sorted(steps)[-keep:]) | set(protected)
    return sorted(set(steps) - kept)


def rotate(folder: Path, *, keep: int, protected: Collection[int]) -> list[int]:
    gone = superfluous([step_of(p) for p in list_checkpoints(folder)], keep=keep, protected=protected)
    for step in gone:
        _remove(folder / f"checkpoint-{step}")
    return gone


def name_checkpoint(folder: Path, alias: str, checkpoint: Path) -> None:
    """`best` and `final` are stable names beside the numbered checkpoints."""
    if (folder / alias).is_dir() and not (folder / alias).is_symlink():  # a copy that followed the link
        _remove(folder / alias)
    link(folder / alias, checkpoint.name)


def sweep(folder: Path) -> None:
    """Removes what a kill left half written or half removed."""
    for path in folder.glob(".*"):
        if path.name.startswith((_STAGING, _DOOMED)):
            shutil.rmtree(path)
        elif path.name.endswith(".tmp"):
            path.unlink()


def _remove(checkpoint: Path) -> None:
    """Renamed out of sight first, so that no half-removed checkpoint is ever visible."""
    doomed = checkpoint.with_name(f"{_DOOMED}{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
