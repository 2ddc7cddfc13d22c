"""Prepares the data of a spec once and caches it by content: plan, check and run share it, and a second call reads what
the first has written. Nothing heavy is imported unless something has to be prepared."""

import glob
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from finefit.artifacts.atomic import report_disk_full
from finefit.artifacts.cache import cached_folder, content_key, source_digest
from finefit.artifacts.records import Levers, read_record, write_record
from finefit.artifacts.stage_records import Efficiency, Preparation
from finefit.data.examples import open_examples
from finefit.data.files import find_files
from finefit.data.images import are_unchanged
from finefit.data.order import efficiency
from finefit.errors import DataError, RunError, SpecError
from finefit.facts.files import TEMPLATES, FileFact, finefit_cache, read_file, read_object, sha256_of
from finefit.model.resolve_model import custom_source
from finefit.spec.data import Data, Source
from finefit.spec.models import CustomModel
from finefit.spec.schema import Dpo, Spec
from finefit.spec.tasks import CustomTask
from finefit.tasks.custom import row_builder

Files = dict[str, tuple[tuple[FileFact, ...], ...]]
"""File facts by split and source."""

RECORD = "preparation.json"
_PACKAGES = ("transformers", "tokenizers", "numpy", "pillow")
_MAX_ENTRIES = 20
_MAX_BYTES = 20 << 30
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")
_JUDGED = ("bad_rows", "drop_at_most", "cut_at_most", "packing")
"""Keys that change no row, only how the result is judged."""
_BYTES_PER_BYTE = 4
"""Prepared bytes per byte of a file: a token of four letters becomes five bytes, and some languages need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    folder: Path
    record: Preparation
    sources: Files

    def path(self, name: str) -> Path:
        return self.folder / name

    def efficiency(self, spec: Spec, levers: Levers) -> Efficiency | None:
        """Returns None if no training row can be used."""
        if self.record.lengths is None:
            return None
        examples = open_examples(self.path("train.safetensors"))
        lengths, supervised = examples.lengths, examples.supervised_counts
        return efficiency(lengths, supervised, levers, global_batch=spec.global_batch, seed=spec.seed)


def present(data: Data, base: Path) -> Data:
    """Removes held-out rows whose files or images do not exist: a plan need not wait for them."""
    absent = {
        name: None
        for name in ("validation", "test")
        if not all(_exists(place, base) for s in data.sources()[name] for place in places(s))
    }
    return data.model_copy(update=absent)


def missing(data: Data, base: Path) -> tuple[str, ...]:
    """Returns the paths of rows and image folders that do not exist."""
    named = [place for sources in data.sources().values() for source in sources for place in places(source)]
    return tuple(dict.fromkeys(place for place in named if not _exists(place, base)))


def places(source: Source) -> tuple[str, ...]:
    """Returns the path of its rows and, if it is named, the folder of their images."""
    return (source.path,) if source.images_root is None else (source.path, source.images_root)


def _exists(place: str, base: Path) -> bool:
    if "://" in place:
        return True
    try:
        return (base / place).exists() or next(glob.iglob(place, root_dir=base, recursive=True), None) is not None  # noqa: PTH207
    except OSError:  # not a path
        return False


def find_sources(data: Data, base: Path) -> dict[str, tuple[tuple[Path, ...], ...]]:
    """Returns the files of every source, by split; all missing files are reported at once."""
    found: dict[str, tuple[tuple[Path, ...], ...]] = {}
    errors: list[DataError] = []
    for split, sources in data.sources().items():
        for source in sources:
            names = (source.path, source.fields.join) if source.fields.join else (source.path,)
            try:
                files = tuple(file.path for name in names for file in find_files(name, base, split=split))
                found[split] = (*found.get(split, ()), files)
            except DataError as error:
                errors.append(error)
    if errors:
        remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
        raise DataError("\n".join(error.problem for error in errors), "\n".join(remedies))
    return found


def _by_content(data: Data, base: Path) -> Files:
    try:
        return {
            split: tuple(tuple(read_file(path, base) for path in files) for files in found)
            for split, found in find_sources(data, base).items()
        }
    except OSError as error:
        problem = f"{error.filename} cannot be read: {error.strerror}"
        raise DataError(problem, "paths are relative to the spec file") from None


def prepare_data(spec: Spec, base: Path, tokenizer: Path) -> PreparedData:
    """`base`: the folder that the spec's relative paths start from."""
    sources = _by_content(spec.data, base)
    folder = finefit_cache() / "prepared" / _key(spec, base, sources, tokenizer)

    def is_complete(found: Path) -> bool:
        """Files in a cache may change in any way, so their contents are compared."""
        try:
            record = read_record(found / RECORD, Preparation)
            is_whole = all(sha256_of(found / name) == sha256 for name, sha256 in record.files.items())
        except (RunError, OSError):  # absent, of another version, or unreadable
            return False
        return is_whole and are_unchanged(found)

    cached_folder(
        folder,
        lambda staging: _prepare_into(staging, folder, spec, base, tokenizer, sources),
        is_complete=is_complete,
        max_entries=_MAX_ENTRIES,
        max_bytes=_MAX_BYTES,
    )
    return PreparedData(folder=folder, record=read_record(folder / RECORD, Preparation), sources=sources)


def _key(spec: Spec, base: Path, sources: Files, tokenizer: Path) -> str:
    """Hashes everything that the result depends on, including file names, which are reported with rows."""
    facts = {
        split: [[(fact.path, fact.sha256) for fact in files] for files in split_files]
        for split, split_files in sources.items()
    }
    paths = [*tokenizer.iterdir(), *(tokenizer / TEMPLATES).glob("*")]
    files = [sha256_of(path) for path in sorted(paths) if path.suffix in _TOKENIZER_FILES and path.is_file()]
    data = spec.data.model_dump(mode="json", exclude=set(_JUDGED))
    asked = [data, isinstance(spec.objective, Dpo), spec.max_prompt_tokens(), spec.seed]
    code = [source_digest("data", "tasks", "vision"), [version(name) for name in _PACKAGES]]
    task, place = None, []
    if isinstance(spec.data.task, CustomTask):
        try:
            task = sha256_of(base / spec.data.task.path)
        except OSError as error:
            problem = f"data.task: {spec.data.task.path} cannot be read: {error.strerror}"
            raise SpecError(problem, "its path is relative to the spec file") from None
    # images are recorded with absolute paths, so the rows of a vision-language model belong to one folder; their
    # contents are compared whenever prepared rows are reused
    config = tokenizer / "config.json"
    if isinstance(spec.model, CustomModel):  # its code decides what an image becomes in a prompt
        own = custom_source(spec.model, base)
        place = [str(base.resolve()), json.dumps([own.sha256, own.entry, dict(own.config)], sort_keys=True)]
    elif config.is_file() and "vision_config" in read_object(config):
        place = [str(base.resolve())]
    return content_key([*asked, facts, files, *code, task, *place])


def _prepare_into(staging: Path, folder: Path, spec: Spec, base: Path, tokenizer: Path, sources: Files) -> None:
    from finefit.custom.inputs import processor_opener
    from finefit.data.prepare import prepare  # imports transformers

    read_bytes = sum(fact.size_bytes for split in sources.values() for files in split for fact in files)
    with report_disk_full(folder, _BYTES_PER_BYTE * read_bytes):
        record = prepare(
            spec.data,
            base=base,
            tokenizer=tokenizer,
            seed=spec.seed,
            folder=staging,
            max_prompt_tokens=spec.max_prompt_tokens(),
            pairs=isinstance(spec.objective, Dpo),
            processor_factory=processor_opener(spec.model, base, tokenizer, spec.data.images),
            build=row_builder(spec.data.task, base=base),
        )
    if _by_content(spec.data, base) != sources:
        raise DataError("a data file has changed while it was read", "run the command again when nothing writes to it")
    write_record(staging / RECORD, record)
