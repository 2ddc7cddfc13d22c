"""Which stages of a pipeline have to run, and why. A stage is done where its folder says so with the key that its inputs give now: in this run, or in
another one of the same name."""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from finefit.artifacts.pipelines import Begun, Done
from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, StageDir, is_pipeline, is_run, runs_named
from finefit.errors import RunError
from finefit.pipeline.stage_keys import differences, grounds, is_same_work, key_of, sizes_in
from finefit.pipeline.wiring import output_of
from finefit.spec.stages import AnyStage, EvaluateStage, Pipeline, TrainStage, needs

_MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What becomes of a stage."""

    name: str
    kind: str
    action: Literal["done", "reused", "run"]
    reason: str
    place: Path | None = None
    """Of what is there already."""
    grounds: Begun | None = None
    """None where a stage that it stands on has yet to run."""
    is_forced: bool = False


@dataclass(slots=True, kw_only=True)
class Stages:
    """The stages of a pipeline, with those that are settled: made, and standing on what they stand on now."""

    pipeline: Pipeline
    base: Path
    """Where relative paths start."""
    runs: Path
    run: RunDir | None
    """None where there is none yet."""
    asked: str = ""
    """Which command asks for stages anew."""
    settled: dict[str, tuple[Path, Done]] = field(default_factory=dict)

    def own(self, name: str) -> StageDir | None:
        """Its folder in this run, made or not."""
        return None if self.run is None else self.run.stage(self.number(name), name)

    def number(self, name: str) -> int:
        return self.pipeline.order().index(name) + 1

    def at(self, name: str) -> Path:
        return output_of(self.settled[name][0].resolve(), self.pipeline.stages[name])

    def output(self, name: str) -> Path | None:
        """None for what has yet to be made."""
        return self.at(name) if name in self.settled else None

    def digest_of(self, name: str) -> str:
        return self.settled[name][1].output_digest

    def settle(self, name: str, place: Path) -> Done:
        done = read_record(StageDir(place).done, Done)
        self.settled[name] = place, done
        return done

    def others(self, name: str) -> Iterator[StageDir]:
        """Folders of a stage of this name in other runs, newest first."""
        for run in reversed(runs_named(self.runs, self.pipeline.name)):
            if (self.run is None or run.path.resolve() != self.run.path.resolve()) and is_pipeline(run.path):
                yield from (where for where in run.stages() if re.fullmatch(rf"\d+-{re.escape(name)}", where.path.name))


def choose(stages: Stages, name: str, *, forced: Collection[str] = ()) -> Choice:
    stage = stages.pipeline.stages[name]
    if pending := [needed for needed in needs(stage) if needed not in stages.settled]:
        verb = "runs" if len(pending) == 1 else "run"
        return Choice(name=name, kind=stage.kind, action="run", reason=f"because {', '.join(pending)} {verb}")
    now = grounds(stages.pipeline, name, stages.base, stages.at, stages.digest_of)
    own, key = stages.own(name), key_of(now)
    if name in forced:
        anew = replace(now, asked=stages.asked)
        if own is None or not stages.asked or not (_is_made(own, stage, key) and is_whole(own, anew)):
            return Choice(name=name, kind=stage.kind, action="run", reason="asked for", grounds=anew, is_forced=True)
    if own is not None and _is_made(own, stage, key):
        return Choice(
            name=name, kind=stage.kind, action="done", reason="nothing has changed", place=own.path, grounds=now
        )
    for other in stages.others(name):
        if _is_made(other, stage, key):
            return Choice(
                name=name,
                kind=stage.kind,
                action="reused",
                reason=f"{other.run.name} has made it",
                place=other.path,
                grounds=now,
            )
    return Choice(name=name, kind=stage.kind, action="run", reason=_why(stages, name, now), grounds=now)


def foretell(stages: Stages, *, forced: Collection[str] = (), only: str | None = None) -> list[Choice]:
    """Of all stages, or of one and those that it stands on, as far as it can be known before any has run."""
    names = stages.pipeline.order() if only is None else [*below(stages.pipeline, only), only]
    found = []
    for name in names:
        choice = choose(stages, name, forced=forced)
        if choice.place is not None:
            stages.settle(name, choice.place)
        else:
            stages.settled.pop(name, None)
        found.append(choice)
    return found


def above(pipeline: Pipeline, name: str) -> set[str]:
    """A stage and all that stand on it."""
    found = {name}
    for other in pipeline.order():
        if found & set(needs(pipeline.stages[other])):
            found.add(other)
    return found


def below(pipeline: Pipeline, name: str) -> list[str]:
    """What a stage stands on, in order."""
    wanted = {name}
    for other in reversed(pipeline.order()):
        if other in wanted:
            wanted |= set(needs(pipeline.stages[other]))
    return [other for other in pipeline.order() if other in wanted and other != name]


def require_stages(pipeline: Pipeline, names: Collection[str]) -> None:
    if unknown := [name for name in names if name not in pipeline.stages]:
        raise RunError(
            f"{pipeline.name} has no stage {', '.join(unknown)}", f"its stages are {', '.join(pipeline.order())}"
        )


def require_below(stages: Stages, name: str) -> None:
    """That one stage can be carried out alone; what it stands on is settled then."""
    *under, _ = foretell(stages, only=name)
    if waiting := [choice.name for choice in under if choice.action == "run"]:
        raise RunError(
            f"stage {name} stands on {', '.join(waiting)}, and what the spec asks of it now is not there",
            f"run {', '.join(waiting)} first, or leave --only out",
        )


def begun_in(where: StageDir) -> Begun | None:
    """None also where another version of finefit has written it: that is other work then."""
    try:
        return read_record(where.begun, Begun) if where.begun.exists() else None
    except RunError:
        return None


def is_half_done(where: StageDir, now: Begun) -> bool:
    before = begun_in(where)
    return before is not None and not where.done.exists() and is_same_work(before, now) and _is_for(before, now)


def is_whole(where: StageDir, now: Begun) -> bool:
    """Made to its end, for the command that asks for it now where that asks for it anew; its files may have gone since."""
    before, done = begun_in(where), _done_in(where)
    return before is not None and done is not None and done.key == key_of(now) and _is_for(before, now)


def _is_for(before: Begun, now: Begun) -> bool:
    return not now.asked or before.asked == now.asked


def can_go_on(where: StageDir, stage: AnyStage, now: Begun) -> bool:
    """Half done, or an evaluation that lost some of its answers: it asks for these alone."""
    return is_half_done(where, now) or (isinstance(stage, EvaluateStage) and is_whole(where, now))


def is_worth_keeping(where: StageDir, stage: AnyStage) -> bool:
    """What people have judged, or a training that came to its end."""
    if any(path.is_file() for path in where.path.rglob("reviews/*.jsonl")):
        return True
    return isinstance(stage, TrainStage) and _is_trained(where, stage, {})


def _done_in(where: StageDir) -> Done | None:
    """None also where another version of finefit has written it."""
    try:
        return read_record(where.done, Done) if where.done.exists() else None
    except RunError:
        return None


def _is_made(where: StageDir, stage: AnyStage, key: str) -> bool:
    done = _done_in(where)
    return done is not None and done.key == key and _is_there(where, stage, done)


def _is_there(where: StageDir, stage: AnyStage, done: Done) -> bool:
    """What was made can be taken away by hand, whole or in part."""
    match stage:
        case TrainStage():
            return _is_trained(where, stage, done.files)
        case EvaluateStage():
            return all(_is_scored(where.path / model, stage) for model in stage.models)
    return _holds(where.output, done.files)


def _is_trained(where: StageDir, stage: AnyStage, files: dict[str, int]) -> bool:
    return is_run(where.path) and _holds(output_of(where.path, stage), files)


def _holds(folder: Path, files: dict[str, int]) -> bool:
    return folder.is_dir() and files.items() <= sizes_in(folder).items()


def _is_scored(run: Path, stage: EvaluateStage) -> bool:
    answers = RunDir(run).stages() if is_run(run) else []
    return any(
        all(where.evaluation(one.label, run.name, one.limit).result.exists() for one in stage.evaluate)
        for where in answers
    )


def _why(stages: Stages, name: str, now: Begun) -> str:
    own = stages.own(name)
    if own is not None and is_half_done(own, now):
        return "begun and not finished: it goes on"
    making = None if own is None or stages.run is None else stages.run.making(stages.number(name), name)
    if making is not None and making.path.exists():
        goes_on = is_whole(making, now) or (making.answers.exists() and is_half_done(making, now))
        return f"begun and not finished: it {'goes on' if goes_on else 'is made anew'}"
    for where in (*([] if own is None else [own]), *stages.others(name)):
        before = begun_in(where)
        if before is not None:
            return _changes(differences(before, now), os.path.relpath(where.path, stages.runs))
    return "not made yet"


def _changes(found: list[str], place: str) -> str:
    if not found:
        return f"what {place} held is gone, or some of it"
    more = f" and {len(found) - _MOST_REASONS} more" if len(found) > _MOST_REASONS else ""
    return "; ".join(found[:_MOST_REASONS]) + more
