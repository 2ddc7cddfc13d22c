"""Files and the room for more of them."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    path: str
    """Relative to a stated folder, with POSIX separators, so that a copied tree has equal facts."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    use: str
    """What is written there, in the user's words."""
    path: str
    free_bytes: int


def read_file(path: Path, relative_to: Path) -> FileFact:
    """An absent or unreadable file raises OSError: only the caller knows what it was wanted for."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes = file.tell()
    return FileFact(path=Path(os.path.relpath(path, relative_to)).as_posix(), size_bytes=size_bytes, sha256=sha256)


def free_bytes(path: Path) -> int:
    """What this user may still write at `path`, which need not exist yet."""
    disk = os.statvfs(nearest_existing(path))
    return disk.f_bavail * disk.f_frsize  # not f_bfree: that counts blocks reserved for root


def nearest_existing(path: Path) -> Path:
    absolute = path.resolve()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def finefit_cache() -> Path:
    return _user_cache() / "finefit"


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads: the same variables in the same order as it reads them."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    return Path(os.environ.get("HF_HOME") or _user_cache() / "huggingface").expanduser() / "hub"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
