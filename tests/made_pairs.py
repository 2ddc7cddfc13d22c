"""A stage that makes pairs, asked for and read back."""

import json
from pathlib import Path
from typing import Any

from finefit.artifacts.pipelines import Order
from finefit.data.read import open_source
from finefit.data.rows import BadRow, Row
from finefit.pipeline.inputs import between
from finefit.pipeline.making.make_pairs import make
from finefit.pipeline.stage_paths import moved
from finefit.spec.rows import Source
from finefit.spec.stages import MakePairs
from tests.data.falsify.corpus import make_rows


def grounded(count: int, *, seed: int) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt[0].content, "answer": row.answer} for row in make_rows(count, seed=seed)]


def order_of(folder: Path, stage: dict[str, Any], *, seed: int = 1, **more: Any) -> Order:
    spec = MakePairs.model_validate_json(json.dumps({"kind": "make_pairs", **stage}))
    return Order(
        name="pairs", pipeline="p", seed=seed, device="cpu", precision="fp32", base=str(folder), stage=spec, **more
    )


def made(folder: Path, stage: dict[str, Any], *, out: str = "out", **more: Any) -> tuple[dict[str, Any], Path]:
    place = folder / out / "output"
    place.mkdir(parents=True)
    return make(order_of(folder, stage, **more), place), place


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_back(path: Path) -> list[Row]:
    rows = list(open_source(Source(path=path.name), path.parent, split="train").rows())
    assert not any(isinstance(row, BadRow) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


def from_a_run(folder: Path, stage: dict[str, Any], *, out: str, **more: Any) -> Path:
    """As `finefit run --runs` asks for it: with paths that start in the run directory."""
    run = folder / "far/away/runs/p-1"
    spec = moved(order_of(folder, stage).stage, between(folder, run))
    return made(run, spec.model_dump(mode="json", exclude_unset=True, exclude={"kind"}), out=out, **more)[1]
