"""`finefit check` of a pipeline: every stage examined before any of them has run, as far as what it stands on is there."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, StageOutlook
from finefit.artifacts.records import Finding
from finefit.artifacts.trainings import Efficiency
from finefit.data.items import read_items
from finefit.errors import FindingError, UserError
from finefit.facts.files import free_bytes
from finefit.facts.machine import Machine, read_machine, read_version
from finefit.model.locate import outline
from finefit.pipeline.data import PreparedData, missing, places, prepare_data, present
from finefit.pipeline.examined_rows import read_ahead
from finefit.pipeline.foreseen import origins_of, spec_at
from finefit.pipeline.leaks import leaks
from finefit.pipeline.outlines import Done, Outlines, copies_in, nothing_done
from finefit.pipeline.outlooks import asking_spec, look_at, of_forecasts, prepared_questions
from finefit.pipeline.preparation import data_findings, unreadable_references
from finefit.preflight.data import (
    few_rows_are_lost,
    prompts_keep_most_of_their_text,
    rows_can_be_used,
    rows_fit_the_budget,
)
from finefit.preflight.findings import LEVELS
from finefit.preflight.run import OPTIONAL, Preparation, examine
from finefit.preflight.stages import Named, Whole, examine_stages, of_stage
from finefit.spec.rows import Data, Source
from finefit.spec.schema import Spec
from finefit.spec.stages import (
    STAGE_PATH,
    AnyStage,
    BuildMoe,
    CentroidRouter,
    EvaluateStage,
    Gate,
    MakePairs,
    Pipeline,
    PythonStage,
    Rules,
    TrainStage,
    Verdicts,
    needs,
)
from finefit.spec.tasks import Form, OwnTask
from finefit.step.engines.zero_config import own_config

_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedStage:
    """Of a training: what its rows have become, and what it will take."""

    kind: str
    spec: Spec | None = None
    prepared: PreparedData | None = None
    forecast: Forecast | None = None
    efficiency: Efficiency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    stages: dict[str, ExaminedStage]
    findings: tuple[Named, ...]
    """Errors first, else stage by stage."""
    disk_bytes: int
    free_disk_bytes: int


Forecasts = Mapping[str, tuple[Forecast, ...]]
"""Of trainings, by stage."""
_NONE: Forecasts = {}


def require_examined(
    pipeline: Pipeline,
    base: Path,
    forecasts: Forecasts,
    *,
    runs: Path,
    done: Done = nothing_done,
    names: Collection[str] | None = None,
) -> tuple[Named, ...]:
    """What a run is told of the stages that it will carry out (`names`; without them all): warnings and notes. All that speaks against it is raised
    at once, before anything is loaded. `forecasts` that were made already, on the device that a run gets here."""
    found = examine_pipeline(pipeline, base, runs, done=done, names=names, forecasts=forecasts).findings
    if errors := [one for one in found if one[1].level == "error"]:
        problems = (finding.problem if name is None else f"stage {name}: {finding.problem}" for name, finding in errors)
        raise FindingError(
            "\n".join(problems), "\n".join(dict.fromkeys(finding.remedy for _, finding in errors if finding.remedy))
        )
    return found


def examine_pipeline(
    pipeline: Pipeline,
    base: Path,
    runs: Path,
    *,
    done: Done = nothing_done,
    names: Collection[str] | None = None,
    forecasts: Forecasts = _NONE,
) -> Examined:
    """On the device that a run gets here. `runs`: where the run directory will lie; `names`: of these stages alone."""
    machine, free = read_machine(), free_bytes(runs)
    outlines = Outlines(pipeline=pipeline, base=base.resolve(), done=done)
    stages: dict[str, ExaminedStage] = {}
    outlooks: dict[str, StageOutlook] = {}
    findings: list[Named] = []
    absent = dict(_missing(outlines))
    for name, stage in ((name, pipeline.stages[name]) for name in pipeline.order() if names is None or name in names):
        stages[name] = ExaminedStage(kind=stage.kind)
        try:
            outlooks[name] = of_forecasts(forecasts[name]) if name in forecasts else look_at(outlines, name, None)
            if isinstance(stage, TrainStage):
                stages[name] = _training(outlines, name, outlooks[name].forecasts[0])
                findings += (
                    (name, of_stage(name, found)) for found in _of_training(outlines, stages[name], name, machine)
                )
            if isinstance(stage, EvaluateStage):
                findings += ((name, found) for found in _of_evaluation(outlines, stage, name))
            if name not in absent:
                read_ahead(outlines, name)
        except UserError as error:  # the user's, and those of the other stages are told too
            problem = error.problem.removeprefix(f"stage {name}: ")
            findings.append((name, Finding(level="error", problem=problem, remedy=error.remedy)))
    whole = Whole(
        pipeline=pipeline,
        outlooks=outlooks,
        free_disk_bytes=free,
        host_memory_bytes=machine.memory_bytes,
        missing=absent,
        to_come=dict(_to_come(outlines)),
        copies={name: copies_in(stage) for name, stage in pipeline.stages.items() if isinstance(stage, BuildMoe)},
    )
    findings += (one for one in examine_stages(whole) if one[0] is None or one[0] in stages)
    disk = sum(one.disk_bytes for one in outlooks.values())
    return Examined(stages=stages, findings=_in_order(findings, pipeline), disk_bytes=disk, free_disk_bytes=free)


def _in_order(findings: list[Named], pipeline: Pipeline) -> tuple[Named, ...]:
    places = {name: at for at, name in enumerate(pipeline.order())}
    return tuple(
        sorted(findings, key=lambda found: (LEVELS.index(found[1].level), -1 if found[0] is None else places[found[0]]))
    )


# Trainings


def _training(outlines: Outlines, name: str, foretold: Forecast) -> ExaminedStage:
    spec, base = spec_at(outlines, name), outlines.base
    tokenizer = outline(spec.model, base).tokenizer
    there = spec.model_copy(update={"data": present(spec.data, base)})
    has_rows = tokenizer is not None and not missing(there.data, base)
    prepared = prepare_data(there, base, tokenizer) if tokenizer is not None and has_rows else None
    efficiency = prepared.efficiency(there, foretold.levers) if prepared else None
    return ExaminedStage(kind="train", spec=there, prepared=prepared, forecast=foretold, efficiency=efficiency)


def _of_training(outlines: Outlines, found: ExaminedStage, name: str, machine: Machine) -> Iterator[Finding]:
    assert found.spec is not None
    assert found.forecast is not None
    stage = outlines.pipeline.stages[name]
    assert isinstance(stage, TrainStage)
    spec = spec_at(outlines, name)
    named_and_placed = zip(_places_in(stage.data), _places_in(spec.data), strict=True)
    expected = {there for asked, there in named_and_placed if not outlines.is_made(asked)}
    yield from examine(
        Preparation(
            spec=found.spec,
            forecast=found.forecast,
            total_steps=found.forecast.total_steps,
            free_disk_bytes=found.forecast.disk_bytes,  # the disk is judged for all stages together
            host_memory_bytes=machine.memory_bytes,
            missing_files=tuple(path for path in missing(spec.data, outlines.base) if path not in expected),
            absent=frozenset(name for name in OPTIONAL if read_version(name) is None),
            engine_config=own_config(spec.engine, outlines.base),
        )
    )
    if found.prepared is not None:
        there = (
            found.spec
            if found.spec.data.test is not None or not expected
            else found.spec.model_copy(update={"evaluate": ()})
        )
        yield from data_findings(there, outlines.base, found.prepared)


def _places_in(data: Data) -> list[str]:
    return [place for sources in data.sources().values() for source in sources for place in places(source)]


# Evaluations


def _of_evaluation(outlines: Outlines, stage: EvaluateStage, name: str) -> Iterator[Finding]:
    yield from dict.fromkeys(found for model in stage.models for found in _of_questions(outlines, stage, model))
    for trained in _trained_below(outlines.pipeline, name):
        yield from _overlap(outlines, stage, trained)


def _of_questions(outlines: Outlines, stage: EvaluateStage, model: str) -> Iterator[Finding]:
    """What is wrong with the rows as one model is asked them."""
    prepared = prepared_questions(outlines, stage, model)
    if prepared is not None:
        spec = asking_spec(outlines, stage, model)
        yield from (found for check in _OF_QUESTIONS for found in check(prepared.record, spec))
        rows = read_items(prepared.path("test.jsonl"))
        yield from unreadable_references(stage.evaluate, rows, form=stage.data.task, base=outlines.base)


_OF_QUESTIONS = (rows_can_be_used, rows_fit_the_budget, few_rows_are_lost, prompts_keep_most_of_their_text)


def _trained_below(pipeline: Pipeline, name: str) -> list[str]:
    """The trainings that a stage stands on, however far below, in their order."""
    below: set[str] = set()
    waiting = [name]
    while waiting:
        for needed in needs(pipeline.stages[waiting.pop()]):
            if needed not in below:
                below.add(needed)
                waiting.append(needed)
    return [one for one in pipeline.order() if one in below and isinstance(pipeline.stages[one], TrainStage)]


def _overlap(outlines: Outlines, stage: EvaluateStage, trained: str) -> Iterator[Finding]:
    """Rows that a model was trained on cannot show what it has learnt. Pairs are looked at by the rows that they are made from."""
    training = outlines.pipeline.stages[trained]
    assert isinstance(training, TrainStage)
    sources = tuple(found for source in training.data.train for found in _as_written(outlines, source))
    questions = _as_written(outlines, stage.data.test)
    if (
        not sources
        or len(questions) != 1
        or missing(Data(train=sources, test=questions[0]), outlines.base)
        or _are_dropped(training, stage)
    ):
        return
    form = _form_of_both(outlines, training, stage)
    found = leaks(
        sources, questions[0], base=outlines.base, seed=outlines.pipeline.seed, turns=training.data.turns, form=form
    )
    if found:
        lines = "\n".join(f"  {one.row} ({trained}) is {one.other}: {one.how}" for one in found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        problem = f"{len(found):,} of its rows stand in the training rows of stage {trained} too:\n{lines}{more}"
        remedy = f"take them out of one of the two files; --set stages.{trained}.data.overlap=warn goes on as it is"
        yield Finding(level="warning" if training.data.overlap == "warn" else "error", problem=problem, remedy=remedy)


def _are_dropped(training: TrainStage, stage: EvaluateStage) -> bool:
    """A training that takes the rows of its own test out of what it sees does so for whoever asks the same rows later."""
    return training.data.overlap == "drop" and training.data.test == stage.data.test


def _form_of_both(outlines: Outlines, training: TrainStage, stage: EvaluateStage) -> Form | None:
    """Rows that are built alike are compared as they are built; others, and those that pairs will be made from, as they stand in their files."""
    are_there = all(outlines.is_made(source.path) for source in (*training.data.train, stage.data.test))
    return training.data.task if are_there and training.data.task == stage.data.task else None


def _as_written(outlines: Outlines, source: Source) -> tuple[Source, ...]:
    """Itself where it lies in a file that is there, or what it will be made from; nothing where that is not known."""
    found = STAGE_PATH.fullmatch(source.path)
    if found is None:
        return (source,)
    if outlines.is_made(source.path):
        return (source.model_copy(update={"path": str(outlines.at(found[1]) / (found[2] or ""))}),)
    return tuple(one for one in origins_of(outlines.pipeline, source) if STAGE_PATH.fullmatch(one.path) is None)


# Files


def _missing(outlines: Outlines) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, stage in outlines.pipeline.stages.items():
        absent = missing(Data.model_construct(train=_sources(stage)), outlines.base)
        others = tuple(
            path
            for path in _other_files(stage)
            if STAGE_PATH.fullmatch(path) is None and not (outlines.base / path).exists()
        )
        if absent or others:
            yield name, (*absent, *others)


def _to_come(outlines: Outlines) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, stage in outlines.pipeline.stages.items():
        trained = (
            [source for sources in stage.data.sources().values() for source in sources]
            if isinstance(stage, TrainStage)
            else []
        )
        paths = tuple(
            place for source in (*trained, *_sources(stage)) for place in places(source) if not outlines.is_made(place)
        )
        if paths:
            yield name, tuple(dict.fromkeys(paths))


def _sources(stage: AnyStage) -> tuple[Source, ...]:
    """Rows that a stage reads which trains nothing."""
    match stage:
        case EvaluateStage():
            return (stage.data.test,)
        case MakePairs():
            return (*stage.train, *(source for source in (stage.validation, stage.test) if source is not None))
        case Gate():
            return tuple(stage.data.values())
        case BuildMoe(router=CentroidRouter() as router):
            return tuple(router.data.values())
    return ()


def _other_files(stage: AnyStage) -> tuple[str, ...]:
    match stage:
        case PythonStage():
            return (stage.script, *stage.inputs.values())
        case MakePairs(method=Rules(words=str() as words)):
            return (words,)
        case MakePairs(method=Verdicts() as method):
            return method.of
        case Gate(task=OwnTask(path=path)) | BuildMoe(router=CentroidRouter(task=OwnTask(path=path))):
            return (path,)
    return ()
