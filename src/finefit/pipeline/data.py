"""The data of a spec, prepared once and kept by content: plan, check and run share it, and a second call reads what the first has written.

Nothing heavy is imported before something has to be prepared.
"""

import glob
import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import finefit
from finefit.artifacts.atomic import full_disk_named
from finefit.artifacts.records import Levers, read_record, write_record
from finefit.artifacts.trainings import Efficiency, Preparation
from finefit.data.files import find_files
from finefit.data.sightings import are_unchanged
from finefit.errors import DataError, RunError, SpecError
from finefit.facts.files import FileFact, finefit_cache, read_file
from finefit.facts.model import TEMPLATES
from finefit.model.custom_files import Written, written
from finefit.spec.models import CustomModel
from finefit.spec.rows import Data, Source
from finefit.spec.schema import Dpo, Spec
from finefit.spec.tasks import OwnTask

Files = dict[str, tuple[tuple[FileFact, ...], ...]]
"""By split and source."""

RECORD = "preparation.json"
_PACKAGES = ("transformers", "tokenizers", "numpy", "pillow")
_MOST_KEPT = 20
_MOST_BYTES = 20 << 30
_ABANDONED_SECONDS = 86400
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")
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
        from finefit.data.store import open_examples

        examples = open_examples(self.path("train.safetensors"))
        return efficiency(
            examples.lengths, examples.supervised_counts, levers, global_batch=spec.global_batch, seed=spec.seed
        )


def present(data: Data, base: Path) -> Data:
    """Without held-out rows whose files or images are not there: a plan need not wait for them."""
    absent = {
        name: None
        for name in ("validation", "test")
        if not all(_is_there(place, base) for s in data.sources()[name] for place in places(s))
    }
    return data.model_copy(update=absent)


def missing(data: Data, base: Path) -> tuple[str, ...]:
    """Rows that cannot be found, and where their images should start."""
    named = [place for sources in data.sources().values() for source in sources for place in places(source)]
    return tuple(dict.fromkeys(place for place in named if not _is_there(place, base)))


def places(source: Source) -> tuple[str, ...]:
    """Where its rows lie and, where it says so, their images."""
    return (source.path,) if source.images_root is None else (source.path, source.images_root)


def _is_there(place: str, base: Path) -> bool:
    if "://" in place:
        return True
    try:
        return (base / place).exists() or next(glob.iglob(place, root_dir=base, recursive=True), None) is not None  # noqa: PTH207
    except OSError:  # no path at all
        return False


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
        raise DataError(
            "\n".join(f.problem for f in faults), "\n".join(dict.fromkeys(f.remedy for f in faults if f.remedy))
        )
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
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}", "paths are relative to the spec file"
        ) from None


def _by_content(data: Data, base: Path) -> Files:
    return {split: tuple(_facts(files, base) for files in found) for split, found in find_sources(data, base).items()}


def prepare_data(spec: Spec, base: Path, tokenizer: Path) -> PreparedData:
    """`base` is where the spec's relative paths start."""
    sources = _by_content(spec.data, base)
    folder = finefit_cache() / "prepared" / _key(spec, base, sources, tokenizer)
    record = _kept(folder)
    if record is None:
        record = _prepared(spec, base, tokenizer, folder, sources)
    else:
        folder.touch()  # what is used is not forgotten
    return PreparedData(folder=folder, record=record, sources=sources)


def _key(spec: Spec, base: Path, sources: Files, tokenizer: Path) -> str:
    """Of everything that the result depends on; names stand in what is told of the rows."""
    facts = {
        split: [[(fact.path, fact.sha256) for fact in files] for files in split_files]
        for split, split_files in sources.items()
    }
    templates = tokenizer / TEMPLATES
    paths = [*tokenizer.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    files = [
        read_file(path, tokenizer).sha256
        for path in sorted(paths)
        if path.suffix in _TOKENIZER_FILES and path.is_file()
    ]
    own = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted((Path(finefit.__file__).parent / "data").rglob("*.py")))
    ).hexdigest()
    versions = [version(name) for name in _PACKAGES]
    asked = [
        spec.data.model_dump(mode="json", exclude=set(_JUDGED)),
        _wants_pairs(spec),
        spec.max_prompt_tokens(),
        spec.seed,
    ]
    content = [
        *asked,
        facts,
        files,
        versions,
        own,
        _form_sha256(spec.data, base),
        *_images_start(spec, base, tokenizer),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _images_start(spec: Spec, base: Path, tokenizer: Path) -> list[str]:
    """Where images lie is told by whole paths, so rows of a model that may see belong to one place. Their contents are compared whenever
    prepared rows are used again."""
    config = tokenizer / "config.json"
    sees = isinstance(spec.model, CustomModel) or (
        config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8"))
    )
    code = (
        [json.dumps([found.sha256, found.entry, dict(found.config)], sort_keys=True)]
        if (found := _code(spec, base))
        else []
    )
    return [str(base.resolve()), *code] if sees else []


def _code(spec: Spec, base: Path) -> Written | None:
    """That says what stands in a prompt in the place of an image."""
    return written(spec.model, base) if isinstance(spec.model, CustomModel) else None


def _form_sha256(data: Data, base: Path) -> str | None:
    """Of the user's own file that rows are built with."""
    if not isinstance(data.task, OwnTask):
        return None
    try:
        return read_file(base / data.task.path, base).sha256
    except OSError as error:
        raise SpecError(
            f"data.task: {data.task.path} cannot be read: {error.strerror}", "its path is relative to the spec file"
        ) from None


def _wants_pairs(spec: Spec) -> bool:
    return isinstance(spec.objective, Dpo)


_JUDGED = ("bad_rows", "drop_at_most", "cut_at_most", "packing")
"""Keys that change no row, only what is made of the result."""


def _kept(folder: Path) -> Preparation | None:
    try:
        record = read_record(folder / RECORD, Preparation)
    except (RunError, OSError):  # not there, written by another version, or not to be read
        return None
    is_whole = all(_has(folder / name, sha256) for name, sha256 in record.files.items())
    return record if is_whole and are_unchanged(folder) else None


def _has(path: Path, sha256: str) -> bool:
    """A cache lies where anything may happen to it."""
    return path.is_file() and read_file(path, path.parent).sha256 == sha256


def _prepared(spec: Spec, base: Path, tokenizer: Path, folder: Path, sources: Files) -> Preparation:
    """Under a hidden name until it is whole; another process may prepare the same, and either result will do."""
    from finefit.data.prepared import prepare  # transformers comes with it
    from finefit.step.custom_eye import see_of

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
    except OSError as error:
        raise RunError(
            f"{folder.parent} cannot be written: {error.strerror}", "set XDG_CACHE_HOME to a folder that can be"
        ) from None
    needed_bytes = _BYTES_PER_BYTE * sum(
        fact.size_bytes for split in sources.values() for files in split for fact in files
    )
    try:
        with full_disk_named(folder, needed_bytes):
            record = prepare(
                spec.data,
                base=base,
                tokenizer=tokenizer,
                seed=spec.seed,
                folder=staging,
                max_prompt_tokens=spec.max_prompt_tokens(),
                pairs=_wants_pairs(spec),
                see=see_of(spec.model, base, tokenizer, spec.data.images),
            )
        if _by_content(spec.data, base) != sources:
            raise DataError(
                "a data file has changed while it was read", "give the command again when nothing writes to it"
            )
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
    """The last used ones stay, as many as there is room for; and what a killed process left a day ago is nobody's."""
    kept, kept_bytes = 0, 0
    for used, size_bytes, folder in sorted((_use(path) for path in root.iterdir()), reverse=True):
        if folder.name.startswith("."):
            is_old = used < time.time() - _ABANDONED_SECONDS
        else:
            kept, kept_bytes = kept + 1, kept_bytes + size_bytes
            is_old = kept > 1 and (kept > _MOST_KEPT or kept_bytes > _MOST_BYTES)
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)


def _use(folder: Path) -> tuple[float, int, Path]:
    """When it was used, and its bytes; another process may remove it meanwhile."""
    try:
        return folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder
    except OSError:
        return 0.0, 0, folder
