"""Checkpoints become visible only when complete: they are staged, listed with sha256 in a manifest, synced and renamed.
Old ones are removed after that, and every checkpoint is verified before it is read."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic_core import from_json

from finefit.artifacts import atomic
from finefit.artifacts.reading import RESTORE, read_bytes
from finefit.errors import RunError
from finefit.facts.files import free_bytes, sha256_of

MANIFEST = "finefit_manifest.json"
Free = Callable[[Path], int]
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
_FEWER = "free some space or lower save.keep, then give the same command again: it resumes from the last checkpoint"


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
    folder: Path, step: int, fill: Callable[[Path], None], *, needed_bytes: int, free: Free = free_bytes
) -> Path:
    """`fill` writes the files. An existing checkpoint of this step, which has failed its verification, is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.sweep(folder)
    final = folder / f"checkpoint-{step}"
    if (available := free(folder)) < needed_bytes:
        raise atomic.disk_full(final, needed_bytes, available, remedy=_FEWER)
    # The report is outside the clean-up: the free bytes that it names are those for the next attempt.
    with (
        atomic.report_disk_full(final, needed_bytes, remedy=_FEWER),
        atomic.staged_folder(folder, final.name, unique=False) as staging,
    ):
        fill(staging)
        files, manifest = sorted(p for p in staging.rglob("*") if p.is_file()), staging / MANIFEST
        listed = {p.relative_to(staging).as_posix(): (p.stat().st_size, sha256_of(p)) for p in files}
        manifest.write_bytes(_manifest(listed))
        for file in files:
            file.chmod(manifest.stat().st_mode)  # safetensors makes its files private; these follow the user's umask
        atomic.replace_folder(staging, final)
    return final


def _manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    entries = {name: {"size_bytes": size, "sha256": digest} for name, (size, digest) in files.items()}
    return json.dumps({"version": 1, "files": entries}, indent=1).encode()


def listed_files(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Sizes in bytes and digests by name, as the manifest lists them."""
    path, listed = checkpoint / MANIFEST, dict[str, tuple[int, str]]()
    text = read_bytes(path)
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        entries = from_json(text)["files"].items()
        listed = {str(name): (int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in entries}
    if _manifest(listed) != text:  # a flip without a change of meaning counts too
        raise RunError(f"{path} is damaged", RESTORE)
    return listed


def manifest_sha256(checkpoint: Path) -> str:
    """The digest of an intact manifest: a damaged one must not pass for that of another checkpoint."""
    listed_files(checkpoint)
    return hashlib.sha256(read_bytes(checkpoint / MANIFEST)).hexdigest()


def problems(checkpoint: Path, *, with_state: bool = True) -> list[str]:
    """Differences from the manifest; empty if every byte is as it was written. `with_state`: also of the files that
    only a resume needs."""

    def is_asked(name: str) -> bool:
        return with_state or not name.startswith("finefit_")

    try:
        expected = {name: facts for name, facts in listed_files(checkpoint).items() if is_asked(name)}
        names = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if not path.is_dir())
        present = {*filter(is_asked, names)} - {MANIFEST}
        found = [f"{name} is not in the manifest" for name in sorted(present - expected.keys())]
        for name, (size, digest) in expected.items():
            path = checkpoint / name
            if name not in present:
                found.append(f"{name} is missing")
            elif not path.is_file():
                found.append(f"{name} is not a regular file")
            elif path.stat().st_size != size:
                found.append(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
            elif sha256_of(path) != digest:
                found.append(f"{name} has changed since it was written")
        return found
    except RunError as error:
        return [error.problem.replace(str(checkpoint / MANIFEST), MANIFEST)]
    except OSError as error:
        return [f"{error.filename or checkpoint} cannot be read: {error.strerror}"]


def wrong_sizes(checkpoint: Path) -> list[str]:
    """What can be said without reading the files: those that are missing, or not as long as the manifest says."""
    try:
        sizes = {name: size for name, (size, _) in listed_files(checkpoint).items()}
        return [name for name, size in sizes.items() if (checkpoint / name).stat().st_size != size]
    except RunError as error:
        return [error.problem]
    except OSError as error:
        return [f"{error.filename or checkpoint} cannot be read: {error.strerror}"]


def newest_verified(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer one that does not."""
    rejected: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        if not (found := problems(checkpoint)):
            return checkpoint, rejected
        rejected.append(f"{checkpoint.name} is skipped: {'; '.join(found)}")
    return None, rejected


def rotate(folder: Path, *, keep: int, protected: Collection[int]) -> list[int]:
    """Deletes and returns the steps that are neither among the newest `keep` nor protected."""
    steps = [step_of(path) for path in list_checkpoints(folder)]
    gone = sorted(set(steps) - set(steps[-keep:]) - set(protected))
    for step in gone:
        atomic.remove_folder(folder / f"checkpoint-{step}")
    return gone


def name_checkpoint(folder: Path, alias: str, checkpoint: Path) -> None:
    """`best` and `final` are stable names beside the numbered checkpoints."""
    if (folder / alias).is_dir() and not (folder / alias).is_symlink():  # a copy that followed the link
        atomic.remove_folder(folder / alias)
    atomic.link(folder / alias, checkpoint.name)
