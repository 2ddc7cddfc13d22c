"""The data of a spec, prepared once and kept by content: plan, check and run share it, and a second call reads what the first has written.

Nothing heavy is imported before something has to be prepared.
"""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import finefit
from finefit.artifacts.atomic import full_disk_named
from finefit.artifacts.records import Efficiency, Levers, Preparation, read_record, write_record
from finefit.data.files import find_files
from finefit.errors import DataError, RunError
from finefit.facts.files import FileFact, finefit_cache, read_file
from finefit.spec.schema import Data, Source, Spec

Files = dict[str, tuple[tuple[FileFact, ...], ...]]
"""By split and source."""

RECORD = "preparation.json"
_PACKAGES = ("transformers", "tokenizers", "numpy")
_MOST_KEPT = 20
_MOST_BYTES = 20 << 30
_BYTES_PER_BYTE = 4
"""A token of four letters becomes five bytes; some languages need more tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    folder: Path
    record: Preparation
    sources: Files

    def path(self, name: str) -> Path:
        return self.folder / name

    def efficiency(self, spec: Spec, levers: Levers) -> Efficiency | None:
        """None where no training row can be used."""
        if self.record.lengths is None:
            return None
        from finefit.data.layout import efficiency
        from finefit.data.store import Examples

        examples = Examples(self.path("train.safetensors"))
        return efficiency(examples.lengths, examples.supervised_counts, levers, global_batch=spec.global_batch, seed=spec.seed)


def present(data: Data, base: Path) -> Data:
    """Without held-out rows whose files are not there: a plan need not wait for them."""
    absent = {name: None for name in ("validation", "test") if not all(_is_there(s, base) for s in data.sources()[name])}
    return data.model_copy(update=absent)


def missing(data: Data, base: Path) -> tuple[str, ...]:
    """Sources that cannot be found."""
    return tuple(source.path for sources in data.sources().values() for source in sources if not _is_there(source, base))


def _is_there(source: Source, base: Path) -> bool:
    return "://" in source.path or any(c in source.path for c in "*?[") or (base / source.path).exists()


def find_sources(data: Data, base: Path) -> dict[str, tuple[tuple[Path, ...], ...]]:
    """The files of every source, by split; all that is not there is told at once."""
    found: dict[str, tuple[tuple[Path, ...], ...]] = {}
    faults: list[DataError] = []
    for split, sources in data.sources().items():
        for source in sources:
            try:
                found[split] = (*found.get(split, ()), _files(source, base, split))
            except DataError as fault:
                faults.append(fault)
    if faults:
        raise DataError("\n".join(f.problem for f in faults), "\n".join(dict.fromkeys(f.remedy for f in faults if f.remedy)))
    return found


def _files(source: Source, base: Path, split: str) -> tuple[Path, ...]:
    names = (source.path, source.fields.join) if source.fields.join else (source.path,)
    return tuple(file.path for name in names for file in find_files(name, base, split=split))


def source_files(source: Source, base: Path, *, split: str) -> tuple[FileFact, ...]:
    """By content, with paths relative to `base`."""
    return _facts(_files(source, base, split), base)


def _facts(paths: tuple[Path, ...], base: Path) -> tuple[FileFact, ...]:
    try:
        return tuple(read_file(path, base) for path in paths)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}", "paths are relative to the spec file") from None


def prepare_data(spec: Spec, base: Path, tokenizer: Path) -> PreparedData:
    """`base` is where the spec's relative paths start."""
    sources = {split: tuple(_facts(files, base) for files in found) for split, found in find_sources(spec.data, base).items()}
    folder = finefit_cache() / "prepared" / _key(spec, sources, tokenizer)
    record = _kept(folder)
    if record is None:
        record = _prepared(spec, base, tokenizer, folder, sources)
    else:
        folder.touch()  # what is used is not forgotten
    return PreparedData(folder=folder, record=record, sources=sources)


def _key(spec: Spec, sources: Files, tokenizer: Path) -> str:
    """Of everything that the result depends on; names stand in what is told of the rows."""
    facts = {split: [[(fact.path, fact.sha256) for fact in files] for files in split_files] for split, split_files in sources.items()}
    files = [read_file(path, tokenizer).sha256 for path in sorted(tokenizer.iterdir()) if path.suffix in (".json", ".jinja", ".model", ".txt")]
    own = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((Path(finefit.__file__).parent / "data").glob("*.py")))).hexdigest()
    versions = [version(name) for name in _PACKAGES]
    content = [spec.data.model_dump(mode="json", exclude=set(_JUDGED)), spec.seed, facts, files, versions, own]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_JUDGED = ("bad_rows", "drop_at_most", "cut_at_most", "packing")
"""Keys that change no row, only what is made of the result."""


def _kept(folder: Path) -> Preparation | None:
    try:
        record = read_record(folder / RECORD, Preparation)
    except RunError:  # not there, or written by another version
        return None
    return record if all((folder / name).is_file() for name in record.files) else None


def _prepared(spec: Spec, base: Path, tokenizer: Path, folder: Path, sources: Files) -> Preparation:
    """Under a hidden name until it is whole; another process may prepare the same, and either result will do."""
    from finefit.data.prepared import prepare  # transformers comes with it

    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    needed_bytes = _BYTES_PER_BYTE * sum(fact.size_bytes for split in sources.values() for files in split for fact in files)
    try:
        with full_disk_named(folder, needed_bytes):
            record = prepare(spec.data, base=base, tokenizer=tokenizer, seed=spec.seed, folder=staging)
        write_record(staging / RECORD, record)
        _put(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _forget_old(folder.parent)
    return record


def _put(staging: Path, folder: Path) -> None:
    if _kept(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        staging.rename(folder)
    except OSError:
        if _kept(folder) is None:  # else another process was first
            raise


def _forget_old(root: Path) -> None:
    """The newest ones stay, as many as there is room for."""
    kept_bytes = 0
    folders = sorted((path for path in root.iterdir() if not path.name.startswith(".")), key=lambda path: path.stat().st_mtime, reverse=True)
    for number, folder in enumerate(folders):
        kept_bytes += sum(file.stat().st_size for file in folder.iterdir())
        if number and (number >= _MOST_KEPT or kept_bytes > _MOST_BYTES):
            shutil.rmtree(folder, ignore_errors=True)
