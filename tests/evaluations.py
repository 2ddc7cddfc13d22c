"""Directories of pipelines that tests write by hand: records alone, nothing trained, nothing asked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finefit.artifacts.records import FinishedStage, PipelineState, Run, StageState, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from tests.runs import make_bare


def make_pipeline(folder: Path, kinds: Mapping[str, str], *, elsewhere: Mapping[str, str] | None = None) -> RunDir:
    """`kinds`: of the stages by name, in their order. `elsewhere`: where those lie that another run has made."""
    run = RunDir(folder)
    states = []
    for number, (name, kind) in enumerate(kinds.items(), 1):
        place = (elsewhere or {}).get(name, f"stages/{number}-{name}")
        (folder / place).mkdir(parents=True, exist_ok=True)
        states.append(StageState(name=name, kind=kind, place=place, status="done"))
    write_record(run.state, PipelineState(stages=tuple(states)))
    write_record(
        run.run,
        Run(name=folder.name, digest="3" * 64, finefit="0.7", created="2026-01-01", kind="pipeline", status="finished"),
    )
    return run


def make_evaluation(
    place: Path, models: Mapping[str, Sequence[float]], *, is_done: bool = True, **evaluation: Any
) -> Path:
    """`models`: the hits of items 0, 1, ... by name."""
    for name, scores in models.items():
        make_bare(place / name, scores, name=name, model_fingerprint=name[0] * 64, **evaluation)
    if is_done:
        summary = {"models": list(models)}
        done = FinishedStage(
            name="scores",
            kind="evaluate",
            key="k",
            inputs={},
            output_digest="o",
            finefit="0.7",
            seconds=1.0,
            memory=None,
            summary=summary,
        )
        write_record(StageDir(place).done, done)
    return place
