"""What a spec points at, read and named by content. Equal digests are the same run, wherever its files lie."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.records import Inputs
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row, read_rows
from finefit.errors import DataError
from finefit.facts.files import read_file
from finefit.model.locate import Located, locate
from finefit.spec.load import spec_to_json
from finefit.spec.schema import FolderModel, HubModel, Source, Spec

MovePath = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A spec with everything that it names."""

    spec: Spec
    rows: dict[str, list[Row]]
    located: Located
    renderer: Renderer
    inputs: Inputs

    @property
    def digest(self) -> str:
        """Of what is asked and of the content it is asked of; where files lie does not matter."""
        document = json.loads(spec_to_json(relocate(self.spec, lambda _: "")))
        content = [self.inputs.model_fingerprint, self.inputs.template_sha256]
        content += [f"{split}:{file.sha256}" for split, files in self.inputs.data.items() for file in files]
        return hashlib.sha256(json.dumps([document, content], sort_keys=True).encode()).hexdigest()


def open_inputs(spec: Spec, base: Path, run: Path) -> Opened:
    """`base` is where the spec's relative paths start; facts are recorded relative to `run`."""
    rows = _read_all(spec, base)
    located = locate(spec.model, base)
    renderer = open_renderer(located.folder, spec.data.template)
    inputs = Inputs(
        data={split: tuple(read_file(base / s.path, run) for s in sources) for split, sources in splits(spec).items()},
        model=located.name,
        model_fingerprint=located.fingerprint,
        template_sha256=renderer.sha256(),
    )
    return Opened(spec=spec, rows=rows, located=located, renderer=renderer, inputs=inputs)


def splits(spec: Spec) -> dict[str, tuple[Source, ...]]:
    named = {"train": spec.data.train, "validation": _one(spec.data.validation), "test": _one(spec.data.test)}
    return {split: sources for split, sources in named.items() if sources}


def _one(source: Source | None) -> tuple[Source, ...]:
    return () if source is None else (source,)


def _read_all(spec: Spec, base: Path) -> dict[str, list[Row]]:
    """All files, so that all that is wrong with them is told at once."""
    rows: dict[str, list[Row]] = {}
    faults: list[DataError] = []
    for split, sources in splits(spec).items():
        for source in sources:
            try:
                rows.setdefault(split, []).extend(read_rows(base / source.path, source.path))
            except DataError as fault:
                faults.append(fault)
    if faults:
        raise DataError("\n".join(f.problem for f in faults), "\n".join(dict.fromkeys(f.remedy for f in faults)))
    return rows


def relocate(spec: Spec, move: MovePath) -> Spec:
    """The same spec with every path replaced."""
    data = spec.data
    moved = data.model_copy(
        update={
            "train": tuple(Source(path=move(s.path)) for s in data.train),
            "validation": data.validation and Source(path=move(data.validation.path)),
            "test": data.test and Source(path=move(data.test.path)),
        }
    )
    model = spec.model
    if isinstance(model, FolderModel):
        model = FolderModel(kind="folder", path=move(model.path))
    return spec.model_copy(update={"data": moved, "model": model})


def pinned(spec: Spec, located: Located) -> Spec:
    """A branch of the hub moves; the run keeps the commit that it began with, which names the snapshot's folder."""
    if not isinstance(spec.model, HubModel):
        return spec
    return spec.model_copy(update={"model": HubModel(kind="hub", id=spec.model.id, revision=located.folder.name)})


def between(old: Path, new: Path) -> MovePath:
    """Rewrites a path that is relative to `old` into one that is relative to `new`."""
    return lambda path: Path(os.path.relpath(old / path, new)).as_posix()
