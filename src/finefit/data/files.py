"""Finds the files that a source's `path` names, opens them, and explains why one cannot be read."""

import codecs
import difflib
import glob
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, AnyStr, Final, Literal, TextIO
from urllib.parse import quote, unquote

from finefit import bounded
from finefit.data.columns import Value, listed, printable
from finefit.errors import DataError

Format = Literal["json", "jsonl", "csv", "parquet", "arrow", "text"]

_FORMATS: dict[str, Format] = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv"}
_FORMATS |= {".txt": "text", ".text": "text", ".amr": "text"}
_FORMATS |= {f"{ending}.gz": form for ending, form in _FORMATS.items()} | {".parquet": "parquet", ".arrow": "arrow"}
_KNOWN = ", ".join(_FORMATS)

# Files beside the data that are not data: the first two patterns apply without a known extension, the third in folders.
_NOT_DATA = re.compile(
    r".*\.(md|rst|pdf|html|bib|png|jpe?g|gif|webp|bmp|tiff?|svg|ya?ml|toml|ini|cfg|py|ipynb|sh|log|lock|md5|sha256)"
)
_ABOUT_DATA = re.compile(r"(readme|licen[cs]e|notice|citation|changelog)[^.]*(\.\d+)*(\.cff)?")
_NOT_ROWS = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog)([\W_].*)?\.txt|dataset_(info|infos|dict)\.json|cache-.*\.arrow"
)
"""`notices.txt` may hold rows; the other names are what `datasets` writes."""

_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "val", "valid", "dev"), "validation")
_WORD = re.compile(r"[^\W\d_]+")
_SHARD = re.compile(r"(?P<stem>.*)-\d+-of-(?P<total>\d+)(?P<ending>\D*)")
_HUB = "hf://"
_HUB_PATH = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/convert/[^/]+|refs/pr/\d+|[^/]+))?(/(?P<inside>.*))?"
)


@dataclass(frozen=True, slots=True)
class DataFile:
    path: Path
    name: str
    """The name shown to the user: the user's own path for a single file, else the path relative to the spec file."""
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
    """Returns the files of this split, sorted by name. Relative paths start in the folder `base`."""
    try:
        if path.startswith(_HUB):
            hub = _parse_hub_path(path)
            return _find(hub.inside or ".", _snapshot(hub), split, shown=str(hub), prefix=f"{hub.root}/")
        return _find(path, base, split, shown=path)
    except OSError as error:
        raise DataError(f"{path} cannot be looked up: {error}", "check the path and its permissions") from None


def pin_hub_path(path: str) -> str:
    """Adds the downloaded commit to a hub path; any other path is unchanged."""
    if not path.startswith(_HUB):
        return path
    hub = _parse_hub_path(path)
    return str(replace(hub, revision=_snapshot(hub, local_files_only=True).name))


def _find(path: str, base: Path, split: str, *, shown: str, prefix: str = "") -> tuple[DataFile, ...]:
    place = base / path
    if place.is_file():
        return (DataFile(place, prefix + path, _format(path, shown)),)
    if place.exists() and not place.is_dir():
        kind = bounded.kind_of(place.stat().st_mode)
        raise DataError(
            f"{shown} is {kind}, and rows are read from files", "write what it gives to a file, and name it"
        )
    if place.is_dir():
        found = sorted(set(_in_folder(path, base)))
        paths = [PurePosixPath(name) for name in found]
        others = {str(path) for path in paths if _NOT_ROWS.fullmatch(path.name.lower())}
        # `datasets` writes state.json beside its info; elsewhere a file of that name is data
        others |= {str(path.with_name("state.json")) for path in paths if path.name == "dataset_info.json"}
    else:
        matching = glob.iglob(path, root_dir=base, recursive=True)  # noqa: PTH207 Path.glob takes no absolute pattern
        found = sorted({PurePosixPath(name).as_posix() for name in matching if (base / name).is_file()})
        others = set()
    names = [name for name in found if not _is_not_data(name) and name not in others]
    if not names:
        raise _nothing_found(place, shown, found)
    files = [DataFile(base / name, prefix + name, _format(name, f"{shown} holds {name}, which")) for name in names]
    if place.is_dir():
        files = _of_split(files, place, split, shown)
        _require_all_shards(files, shown)
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        by_format = {form: [file.name for file in files if file.format == form] for form in formats}
        several = "; ".join(f"{form}: {listed(found, 10)}" for form, found in by_format.items())
        remedy = f"name the files with a glob, such as {_example(files)}"
        raise DataError(f"{shown} holds files of several formats: {several}", remedy)
    return tuple(files)


def _in_folder(path: str, base: Path) -> Iterator[str]:
    """Regular files below a folder, except hidden ones. Links are followed; each folder is entered once."""

    def stop(error: OSError) -> None:
        raise error

    entered: set[Path] = set()
    for current, folders, files in os.walk(base / path, followlinks=True, onerror=stop):
        real = Path(current).resolve()
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        inside = PurePosixPath(path) / Path(current).relative_to(base / path).as_posix()
        shown = (name for name in files if not name.startswith("."))
        yield from ((inside / name).as_posix() for name in shown if (Path(current) / name).is_file())


def _is_not_data(name: str) -> bool:
    last = PurePosixPath(name).name.lower()
    return not last.endswith(tuple(_FORMATS)) and bool(_NOT_DATA.fullmatch(last) or _ABOUT_DATA.fullmatch(last))


def _format(name: str, shown: str) -> Format:
    for ending, form in _FORMATS.items():
        if name.lower().endswith(ending):
            return form
    remedy = f"known are {_KNOWN}; for a folder, name the files with a glob"
    raise DataError(f"{shown} has no known extension", remedy)


def near_names(place: Path) -> str:
    """Returns names beside a missing file that its name may misspell."""
    try:
        names = [found.name for found in place.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return " or ".join(difflib.get_close_matches(place.name, sorted(names), n=2, cutoff=0.7))


def _nothing_found(place: Path, shown: str, others: list[str]) -> DataError:
    if others:
        problem = f"{shown} has no data files, only {len(others)} files such as {others[0]}"
        return DataError(problem, f"known are {_KNOWN}")
    problem = f"{shown} does not exist (looked for {place})"
    if place.is_dir():
        problem = f"{shown} is a folder without files (looked in {place})"
    elif glob.has_magic(shown):
        problem = f"no file matches {shown} (looked for {place})"
    near = "" if place.is_dir() else near_names(place)
    hint = f"did you mean {near}? " if near else ""
    hint += "paths are relative to the spec file; a dataset of the hub is written hf://datasets/owner/name"
    return DataError(problem, hint)


def _of_split(files: list[DataFile], folder: Path, split: str, shown: str) -> list[DataFile]:
    """Selects the files of this split if names below the folder contain a split."""
    splits = [(file, _split_of(file.path.relative_to(folder))) for file in files]
    named = [file for file, its in splits if its is not None]
    if not named:
        return files
    if others := [file.name for file, its in splits if its is None]:
        what = f"files of a split and others whose names contain no split or several: {listed(others, 10)}"
    elif chosen := [file for file, its in splits if its == split]:
        return chosen
    else:
        what = f"no files for {split}; there is {listed([file.name for file in files], 10)}"
    remedy = f"name the files for {split} with a glob, such as {_example(named)}"
    raise DataError(f"{shown} holds {what}", remedy)


def _split_of(name: Path) -> str | None:
    """A word in the file's name decides, else one in the nearest folder's name."""
    for part in reversed(name.parts):
        if found := {_SPLITS[word] for word in _WORD.findall(part.lower()) if word in _SPLITS}:
            return found.pop() if len(found) == 1 else None
    return None


def _require_all_shards(files: list[DataFile], shown: str) -> None:
    shards = Counter(match.group("stem", "total", "ending") for file in files if (match := _SHARD.fullmatch(file.name)))
    for (stem, total, ending), count in shards.items():
        if count != int(total):
            problem = f"{shown} holds {count} of the {int(total)} files {stem}-*-of-{total}{ending}"
            raise DataError(problem, "add the others, or name the files with a glob")


def _example(files: list[DataFile]) -> str:
    folder, slash, name = files[0].name.rpartition("/")
    return f"{folder}{slash}*{PurePosixPath(name).suffix}"


def _parse_hub_path(path: str) -> _HubPath:
    match = _HUB_PATH.fullmatch(path)
    if match is None:
        remedy = "write hf://datasets/owner/name, then @revision and /files if they are needed"
        raise DataError(f"{path} is not a dataset of the hub", remedy)
    revision = unquote(match["revision"]) if match["revision"] else None
    return _HubPath(match["repo"], revision, (match["inside"] or "").strip("/"))


def _snapshot(hub: _HubPath, *, local_files_only: bool = False) -> Path:
    """Returns the folder that holds the commit and has its name."""
    import httpx  # this and the hub's client take longer to import than local files take to find
    from huggingface_hub import errors, snapshot_download

    # In the hub's patterns a star matches across folders, so this matches at least what is looked for afterwards.
    wanted = [hub.inside, hub.inside.replace("**/", ""), f"{hub.inside}/*"]
    if not hub.inside:
        wanted = [f"*{ending}" for known in _FORMATS for ending in (known, known.upper())]
    try:
        download = partial(snapshot_download, hub.repo, repo_type="dataset", revision=hub.revision)
        folder = download(allow_patterns=wanted, local_files_only=local_files_only)
    except errors.GatedRepoError:
        remedy = "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        raise DataError(f"{hub} is gated", remedy) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        remedy = "check owner, name and revision; log in if it is private"
        raise DataError(f"the hub has no such dataset: {hub}: {_first_line(error)}", remedy) from None
    except errors.LocalEntryNotFoundError as error:
        problem = f"{hub} is not complete in the local cache and the hub cannot be reached: {_first_line(error)}"
        raise DataError(problem, "connect, or name local files") from None
    except (errors.OfflineModeIsEnabled, httpx.HTTPError) as error:
        if local_files_only:
            problem = f"{hub} cannot be downloaded: {_first_line(error)}"
            raise DataError(problem, "connect, or name local files") from None
        # the hub lists the files of a commit even where the cache has them all
        return _snapshot(hub, local_files_only=True)
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


Numbered = Iterator[tuple[int, Value | str]]
"""Yields each record's number with its value, or with the reason why it has none."""
HEAD = 1 << 18
"""Characters read at the start of a file to detect its content."""
_CHUNK = 1 << 20
"""Bytes that are searched at a time for one that is not UTF-8."""
MAX_RECORD: Final = 32 << 20
"""Characters of a line, of a value in a JSON file or of a row of CSV: it is in memory as a whole, several times."""
MAX_DOCUMENT: Final = 64 << 20
"""Characters of a text that is one record."""
MAX_EXPANSION: Final = 100
"""A compressed file may unpack to at most this many times its size; text reaches 30."""
FREE_EXPANSION: Final = 64 << 20
"""Bytes that any compressed file may unpack to, whatever its size."""


class UnreadableFile(Exception):
    """An error after which the rest of the file cannot be read; its arguments are reason and remedy."""


READ_ERRORS = (UnreadableFile, UnicodeDecodeError, EOFError, zlib.error, OSError)
"""Errors that reading may raise; `unreadable` explains them to the user."""


def open_bytes(file: DataFile) -> IO[bytes]:
    if not file.path.name.lower().endswith(".gz"):
        return bounded.open_binary(file.path)
    return io.BufferedReader(_Unpacked(file.path), _CHUNK)


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, read as long as its expansion ratio is plausible for data."""

    def __init__(self, path: Path) -> None:
        self._file = bounded.open_binary(path)
        self._gzip, self._num_packed, self._num_read = gzip.GzipFile(fileobj=self._file), path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        num_bytes = self._gzip.readinto1(buffer)  # never loses data that precedes a fault
        self._num_read += num_bytes
        require_expansion(self._num_read, self._num_packed, "unpack it with gunzip")
        return num_bytes

    def close(self) -> None:
        self._gzip.close()
        self._file.close()
        super().close()


def require_expansion(num_bytes: int, num_packed: int, how: str) -> None:
    """`how`: how to store the same rows less compressed, for the remedy."""
    if num_bytes > max(FREE_EXPANSION, MAX_EXPANSION * num_packed):
        size = f"its {num_packed:,} bytes unpack to {num_bytes:,} or more"
        reason = f"{size}, and at most {MAX_EXPANSION} times the size is read: it may be made to fill the memory"
        raise UnreadableFile(reason, f"if these are real rows, {how} and name the result")


def lines_of(handle: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yields the lines of a file, each at most `MAX_RECORD` long."""
    while line := handle.readline(MAX_RECORD + 1):
        require_length(len(line), "a line")
        yield line


def require_length(length: int, what: str, at_most: int = MAX_RECORD) -> None:
    if length > at_most:
        reason = f"{what} is longer than {at_most:,} characters, and would be in memory as a whole"
        raise UnreadableFile(reason, _SPLIT)


def require_room(text: str | bytes, what: str) -> None:
    """`text` is JSON that is about to be parsed."""
    try:
        bounded.require_room(text)
    except bounded.TooManyValues as error:
        raise UnreadableFile(f"{what} is too large: {error}", _SPLIT) from None


_SPLIT = "split it into shorter records, and keep images in files or in Parquet"


def open_text(file: DataFile, newline: str = "\n") -> TextIO:
    """Only line feeds end a line: strings may contain U+2028 and similar characters."""
    return io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline=newline)


def unreadable(file: DataFile, error: Exception, number: int) -> DataError:
    """`number`: the last record before the fault, 0 if there is none."""
    place = f"{file.name} cannot be read" + (f" on after row {number}" if number else "")
    match error:
        case UnicodeDecodeError():
            try:
                return DataError(f"{file.name} is not UTF-8: {_first_bad_byte(file)}", "save the file as UTF-8")
            except READ_ERRORS as deeper:  # the file is damaged, so its bytes are not those that were saved
                return unreadable(file, deeper, number)
        case UnreadableFile():
            reason, remedy = error.args
            return DataError(f"{place}: {reason}", remedy)
        case EOFError() | zlib.error() | gzip.BadGzipFile():
            problem = f"{place}: it is not a whole gzip file: {error}"
            return DataError(problem, "fetch the file again; `gzip -t` checks it")
        case _:
            return DataError(f"{place}: {error}", "check the file and its permissions")


def _first_bad_byte(file: DataFile) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    passed = 0
    with open_bytes(file) as handle:
        for chunk in chain(iter(lambda: handle.read(_CHUNK), b""), [b""]):
            start = passed - len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return f"byte {start + error.start} is {error.object[error.start]:#04x}"
            passed += len(chunk)
    return "it changed while it was read"


def require_distinct(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise repeated(next(name for name, count in Counter(names).items() if count > 1))


def repeated(name: str) -> UnreadableFile:
    problem = f"it has {printable(name)} twice, and one value would be lost"
    return UnreadableFile(problem, "rename or remove one of them")


def holds_no_rows(file: DataFile) -> DataError:
    return DataError(f"{file.name} holds no rows", "fetch the file again, or take it out of the spec")
