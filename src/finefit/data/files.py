"""What a source's `path` names -> data files: a file, a folder, a glob, or a data set of the hub."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import quote, unquote

from finefit.errors import DataError

Format = Literal["json", "jsonl", "csv", "parquet", "arrow", "text"]

_FORMATS: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".amr": "text",
}
_FORMATS |= {f"{ending}.gz": form for ending, form in _FORMATS.items()} | {".parquet": "parquet", ".arrow": "arrow"}

# What stands beside data and is none, in lower case. The first two are asked of files without a known extension, the third only of a folder's.
_NO_DATA = (
    *(
        "*.md",
        "*.rst",
        "*.pdf",
        "*.html",
        "*.bib",
        "*.png",
        "*.jpg",
        "*.jpeg",
        "*.gif",
        "*.webp",
        "*.bmp",
        "*.tif",
        "*.tiff",
        "*.svg",
    ),
    *("*.yaml", "*.yml", "*.toml", "*.ini", "*.cfg", "*.py", "*.ipynb", "*.sh", "*.log", "*.lock", "*.md5", "*.sha256"),
)
_ABOUT_DATA = re.compile(r"(readme|licen[cs]e|notice|citation|changelog)[^.]*(\.\d+)*(\.cff)?")
_NO_ROWS = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)([\W_].*)?\.txt|dataset_(info|infos|dict)\.json|cache-.*\.arrow"
)
"""`notices.txt` may well be rows; the rest is what `datasets` writes."""

_SPLITS = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "test": "test",
}
_WORD = re.compile(r"[^\W\d_]+")
_SHARD = re.compile(r"(?P<stem>.*)-\d+-of-(?P<total>\d+)(?P<ending>\D*)")
_HUB = "hf://"
_HUB_PATH = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/convert/[^/]+|refs/pr/\d+|[^/]+))?(/(?P<inside>.*))?"
)
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DataFile:
    path: Path
    name: str
    """As the user will see it: the user's own path of a single file, else relative to the spec file."""
    format: Format


@dataclass(frozen=True, slots=True)
class _HubPath:
    repo: str
    revision: str | None
    inside: str
    """A file, a folder or a glob; empty for the whole repository."""

    @property
    def root(self) -> str:
        return f"hf://datasets/{self.repo}" + (f"@{quote(self.revision, safe='')}" if self.revision else "")

    def __str__(self) -> str:
        return f"{self.root}/{self.inside}" if self.inside else self.root


def find_files(path: str, base: Path, *, split: str) -> tuple[DataFile, ...]:
    """The files of the split that is asked for, in the order of their names; `base` is the folder that relative paths start from."""
    try:
        if path.startswith(_HUB):
            hub = _parse(path)
            return _find(hub.inside or ".", _snapshot(hub), split, shown=str(hub), prefix=f"{hub.root}/")
        return _find(path, base, split, shown=path)
    except OSError as error:
        raise DataError(f"{path} cannot be looked up: {error}", "check the path and its permissions") from None


def pin_hub_path(path: str) -> str:
    """A hub path with the commit that was downloaded; any other path as it is."""
    if not path.startswith(_HUB):
        return path
    hub = _parse(path)
    return str(replace(hub, revision=_snapshot(hub, local_files_only=True).name))


def _find(path: str, base: Path, split: str, *, shown: str, prefix: str = "") -> tuple[DataFile, ...]:
    place = base / path
    if place.is_file():
        return (DataFile(place, prefix + path, _format(path, shown)),)
    found = sorted(set(_in_folder(path, base) if place.is_dir() else _matching(path, base)))
    names = _with_rows(found) if place.is_dir() else [name for name in found if not _is_no_data(name)]
    if not names:
        raise _nothing_found(place, shown, found)
    files = [DataFile(base / name, prefix + name, _format(name, f"{shown} holds {name}, which")) for name in names]
    if place.is_dir():
        files = _of_split(files, place, split, shown)
        _require_all_shards(files, shown)
    _require_one_format(files, shown)
    return tuple(files)


def _matching(pattern: str, base: Path) -> Iterator[str]:
    names = glob.iglob(pattern, root_dir=base, recursive=True)  # noqa: PTH207 Path.glob takes no absolute pattern
    return (PurePosixPath(name).as_posix() for name in names if (base / name).is_file())


def _in_folder(path: str, base: Path) -> Iterator[str]:
    """Files below a folder, hidden ones left out. Links are followed, each folder is entered once."""
    entered: set[Path] = set()
    for current, folders, files in os.walk(base / path, followlinks=True, onerror=_raise):
        real = Path(current).resolve()
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        inside = PurePosixPath(path) / Path(current).relative_to(base / path).as_posix()
        yield from ((inside / name).as_posix() for name in files if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _is_no_data(name: str) -> bool:
    last = PurePosixPath(name).name.lower()
    return _known_format(name) is None and (
        any(fnmatch(last, pattern) for pattern in _NO_DATA) or _ABOUT_DATA.fullmatch(last) is not None
    )


def _with_rows(names: list[str]) -> list[str]:
    """Of a folder. `datasets` writes a state beside its info; anywhere else a file of that name is data."""
    states = {
        str(PurePosixPath(name).with_name("state.json"))
        for name in names
        if PurePosixPath(name).name == "dataset_info.json"
    }
    return [
        name
        for name in names
        if not (_is_no_data(name) or name in states or _NO_ROWS.fullmatch(PurePosixPath(name).name.lower()))
    ]


def _known_format(name: str) -> Format | None:
    return next((form for ending, form in _FORMATS.items() if name.lower().endswith(ending)), None)


def _format(name: str, shown: str) -> Format:
    if form := _known_format(name):
        return form
    raise DataError(
        f"{shown} has no known extension",
        f"known are {', '.join(_FORMATS)}; of a folder, name the files that are meant by a glob",
    )


def _nothing_found(place: Path, shown: str, others: list[str]) -> DataError:
    hint = "paths are relative to the spec file; a data set of the hub is written hf://datasets/owner/name"
    if others:
        return DataError(
            f"{shown} holds no data, only {len(others)} files such as {others[0]}", f"known are {', '.join(_FORMATS)}"
        )
    if place.is_dir():
        return DataError(f"{shown} is a folder without files (looked in {place})", hint)
    if glob.has_magic(shown):
        return DataError(f"no file matches {shown} (looked for {place})", hint)
    return DataError(f"{shown} does not exist (looked for {place})", hint)


def _of_split(files: list[DataFile], folder: Path, split: str, shown: str) -> list[DataFile]:
    """Where names below the folder tell of splits, the files of this one."""
    told = [(file, _split_of(file.path.relative_to(folder))) for file in files]
    named = [file for file, its in told if its is not None]
    if not named:
        return files
    if len(named) < len(files):
        others = _listed(file for file in files if file not in named)
        raise DataError(
            f"{shown} holds files of a split and others whose names tell of none or of several: {others}",
            f"name the files for {split} by a glob, such as {_example(named)}",
        )
    chosen = [file for file, its in told if its == split]
    if not chosen:
        raise DataError(
            f"{shown} holds no files for {split}; there is {_listed(files)}",
            f"name the files for {split} by a glob, such as {_example(files)}",
        )
    return chosen


def _split_of(name: Path) -> str | None:
    """Told by a word of the file's name, else of the nearest folder's."""
    for part in reversed(name.parts):
        if found := {_SPLITS[word] for word in _WORD.findall(part.lower()) if word in _SPLITS}:
            return found.pop() if len(found) == 1 else None
    return None


def _require_all_shards(files: list[DataFile], shown: str) -> None:
    shards = Counter(match.group("stem", "total", "ending") for file in files if (match := _SHARD.fullmatch(file.name)))
    for (stem, total, ending), count in shards.items():
        if count != int(total):
            raise DataError(
                f"{shown} holds {count} of the {int(total)} files {stem}-*-of-{total}{ending}",
                "bring the rest, or name the files that are meant by a glob",
            )


def _require_one_format(files: list[DataFile], shown: str) -> None:
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        listed = "; ".join(f"{form}: {_listed(file for file in files if file.format == form)}" for form in formats)
        raise DataError(
            f"{shown} holds files of several formats: {listed}",
            f"name those that are meant by a glob, such as {_example(files)}",
        )


def _example(files: list[DataFile]) -> str:
    folder, slash, name = files[0].name.rpartition("/")
    return f"{folder}{slash}*{PurePosixPath(name).suffix}"


def _listed(files: Iterable[DataFile]) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _parse(path: str) -> _HubPath:
    match = _HUB_PATH.fullmatch(path)
    if match is None:
        raise DataError(
            f"{path} names no data set of the hub",
            "write hf://datasets/owner/name, then @revision and /files where they are needed",
        )
    return _HubPath(
        match["repo"], unquote(match["revision"]) if match["revision"] else None, (match["inside"] or "").strip("/")
    )


def _wanted(inside: str) -> list[str]:
    """Patterns of the hub, where a star reaches across folders: never less than what is looked for afterwards."""
    if inside:
        return [inside, inside.replace("**/", ""), f"{inside}/*"]
    return [f"*{ending}" for known in _FORMATS for ending in (known, known.upper())]


def _snapshot(hub: _HubPath, *, local_files_only: bool = False) -> Path:
    """The folder that holds the commit, and is named by it."""
    import httpx
    from huggingface_hub import errors, snapshot_download

    wanted = _wanted(hub.inside)
    try:
        return Path(
            snapshot_download(
                hub.repo,
                repo_type="dataset",
                revision=hub.revision,
                allow_patterns=wanted,
                local_files_only=local_files_only,
            )
        )
    except errors.GatedRepoError:
        raise DataError(
            f"{hub} is gated", "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"the hub has no such data set: {hub}: {_first_line(error)}",
            "check owner, name and revision; log in if it is private",
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise DataError(
            f"{hub} is not whole in the local cache and the hub cannot be reached: {_first_line(error)}",
            "connect, or name local files",
        ) from None
    except (errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        if local_files_only:
            raise DataError(
                f"{hub} cannot be downloaded: {_first_line(error)}", "connect, or name local files"
            ) from None
        return _snapshot(
            hub, local_files_only=True
        )  # the hub lists the files of a commit even where the cache has them all


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
