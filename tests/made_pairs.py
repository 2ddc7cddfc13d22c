"""A stage that makes pairs, asked for and read back."""

import json
from pathlib import Path
from typing import Any

from finefit.artifacts.records import StageJob
from finefit.data.rows import BadRow, Row
from finefit.data.sources import open_source
from finefit.run.create import between
from finefit.spec.data import Source
from finefit.spec.stages import MakePairs, Sampled, moved
from finefit.stages import make_pairs, sampled_pairs
from tests.negatives.corpus import make_rows


def grounded(count: int, *, seed: int) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt[0].content, "answer": row.answer} for row in make_rows(count, seed=seed)]


def job_of(folder: Path, stage: dict[str, Any], *, seed: int = 1, **more: Any) -> StageJob:
    spec = MakePairs.model_validate_json(json.dumps({"kind": "make_pairs", **stage}))
    return StageJob(
        name="pairs", pipeline="p", seed=seed, device="cpu", precision="fp32", base=str(folder), stage=spec, **more
    )


def made(folder: Path, stage: dict[str, Any], *, out: str = "out", **more: Any) -> tuple[dict[str, Any], Path]:
    place = folder / out / "output"
    place.mkdir(parents=True)
    job = job_of(folder, stage, **more)
    assert isinstance(job.stage, MakePairs)
    kind = sampled_pairs if isinstance(job.stage.method, Sampled) else make_pairs
    return kind.make(job, place), place


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_back(path: Path) -> list[Row]:
    rows = list(open_source(Source(path=path.name), path.parent, split="train").rows())
    assert not any(isinstance(row, BadRow) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


def from_a_run(folder: Path, stage: dict[str, Any], *, out: str, **more: Any) -> Path:
    """As `finefit run --runs` asks for it: with paths that start in the run directory."""
    run = folder / "far/away/runs/p-1"
    spec = moved(job_of(folder, stage).stage, between(folder, run))
    return made(run, spec.model_dump(mode="json", exclude_unset=True, exclude={"kind"}), out=out, **more)[1]
