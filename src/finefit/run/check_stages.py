"""`finefit check`: every stage of a run is checked before the first one begins, as far as its inputs exist. A flat spec
is a run with one stage."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, StageForecast
from finefit.artifacts.records import Finding
from finefit.artifacts.stage_records import Efficiency
from finefit.artifacts.wiring import file_at, with_files
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import read_items
from finefit.errors import FindingError, UserError
from finefit.facts.files import free_bytes
from finefit.facts.machine import read_machine
from finefit.model.resolve_model import adapter_fingerprint, model_outline
from finefit.plan.client import shared_planner
from finefit.plan.model_stubs import FinishedOutput, ModelStubs, expert_copies, no_output
from finefit.plan.prepared_data import PreparedData, missing, places, prepare_data, present
from finefit.plan.stage_costs import cards_here, eval_rows_spec, forecast_stage, prepared_eval_rows, training_costs
from finefit.plan.stage_forecasts import pair_sources, training_spec
from finefit.preflight import StageFinding, require_no_errors
from finefit.preflight.data import QUESTION_CHECKS, data_findings, find_leaks, unreadable_references
from finefit.preflight.pipeline import PipelineFacts, check_facts, sorted_findings, with_stage_keys
from finefit.preflight.training import TrainingFacts, forecaster_here
from finefit.spec.data import Data, Source
from finefit.spec.pipeline import Pipeline, needs
from finefit.spec.schema import Spec
from finefit.spec.stages import (
    STAGE_PATH,
    AnyStage,
    BuildMoe,
    CentroidRouter,
    EvaluateStage,
    Gate,
    Input,
    MakePairs,
    MergeAdapter,
    PythonStage,
    Rules,
    Sampled,
    TrainStage,
    Verdicts,
    paths_of,
)
from finefit.spec.tasks import CustomTask, Form
from finefit.stages.build_moe import router_rows
from finefit.stages.gate import split_prompts
from finefit.stages.make_pairs import judged_pairs, require_pairs, rows_of_splits, rule_pairs
from finefit.stages.sampled_pairs import askable_rows

_MAX_SHOWN = 10
_FEW_ROWS = 64
"""Usually enough to show that rules make pairs of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStage:
    """Everything but `kind` is of a training."""

    kind: str
    spec: Spec | None = None
    """Without held-out rows that do not exist."""
    prepared: PreparedData | None = None
    forecast: Forecast | None = None
    efficiency: Efficiency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPipeline:
    is_flat: bool
    stages: dict[str, CheckedStage]
    findings: tuple[StageFinding, ...]
    """Errors first, then stage by stage."""
    disk_bytes: int
    free_disk_bytes: int

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for _, finding in self.findings)


Forecasts = Mapping[str, tuple[Forecast, ...]]
"""Of trainings on this machine, by stage."""
_NONE: Forecasts = {}


def require_sound_stages(
    pipeline: Pipeline,
    base: Path,
    forecasts: Forecasts,
    *,
    runs: Path,
    done: FinishedOutput = no_output,
    names: Collection[str] | None = None,
) -> tuple[StageFinding, ...]:
    """Warnings and notes of the stages that will run (`names`, or all); errors are raised together, before anything is
    loaded."""
    found = check_pipeline(pipeline, base, runs, done=done, names=names, forecasts=forecasts).findings
    require_no_errors(found, FindingError)
    return found


def check_pipeline(
    pipeline: Pipeline,
    base: Path,
    runs: Path,
    *,
    done: FinishedOutput = no_output,
    names: Collection[str] | None = None,
    forecasts: Forecasts = _NONE,
) -> CheckedPipeline:
    """On the device that a run gets on this machine. `runs`: where the run directory will be; `names`: only these
    stages; `forecasts`: those that exist already."""
    checking = _Checking(
        pipeline=pipeline,
        stubs=ModelStubs(pipeline=pipeline, base=base.resolve(), done=done),
        forecasts=forecasts,
        stages={},
        costs={},
        trainings={},
        missing={},
        findings=[],
    )
    machine, free = read_machine(), free_bytes(runs)
    with shared_planner():
        for name in pipeline.order():
            if names is None or name in names:
                checking.check(name)
    facts = PipelineFacts(
        pipeline=pipeline,
        costs=checking.costs,
        free_disk_bytes=free,
        host_memory_bytes=machine.memory_bytes,
        trainings=checking.trainings,
        missing=checking.missing,
        not_made_yet={name: paths for name in checking.stages if (paths := _not_made_yet(checking.stubs, name))},
    )
    whole = [one for one in check_facts(facts) if one[0] is None or one[0] in checking.stages]
    return CheckedPipeline(
        is_flat=pipeline.is_flat,
        stages=checking.stages,
        findings=sorted_findings([*checking.findings, *whole], pipeline),
        disk_bytes=sum(one.disk_bytes for one in checking.costs.values()),
        free_disk_bytes=free,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checking:
    """What is known of the stages so far."""

    pipeline: Pipeline
    stubs: ModelStubs
    forecasts: Forecasts
    stages: dict[str, CheckedStage]
    costs: dict[str, StageForecast]
    trainings: dict[str, TrainingFacts]
    missing: dict[str, tuple[str, ...]]
    findings: list[StageFinding]

    def check(self, name: str) -> None:
        """An error of the user's in one of several stages becomes a finding, so that the others are checked too."""
        stage = self.pipeline.stages[name]
        self.stages[name] = CheckedStage(kind=stage.kind)
        try:
            self.costs[name] = self._costs(name)
            if isinstance(stage, TrainStage):
                self._training(name, stage)
            else:
                self.missing[name] = _missing_files(self.stubs, stage)
                if isinstance(stage, EvaluateStage):
                    self.findings.extend((name, found) for found in _evaluation_findings(self.stubs, stage, name))
                if not self.missing[name]:
                    read_stage_inputs(self.stubs, name)
        except UserError as error:
            if self.pipeline.is_flat:
                raise
            problem = error.problem.removeprefix(f"stage {name}: ")
            self.findings.append((name, Finding(level="error", problem=problem, remedy=error.remedy)))

    def _costs(self, name: str) -> StageForecast:
        if name in self.forecasts:
            return training_costs(self.forecasts[name])
        return forecast_stage(self.stubs, name, cards_here(self.pipeline), forecaster_here)

    def _training(self, name: str, stage: TrainStage) -> None:
        spec, base, forecast = training_spec(self.stubs, name), self.stubs.base, self.costs[name].forecasts[0]
        there = spec.model_copy(update={"data": present(spec.data, base)})
        tokenizer = model_outline(spec.model, base).tokenizer
        has_rows = tokenizer is not None and not missing(there.data, base)
        prepared = prepare_data(there, base, tokenizer) if tokenizer is not None and has_rows else None
        self.stages[name] = CheckedStage(
            kind="train",
            spec=there,
            prepared=prepared,
            forecast=forecast,
            efficiency=prepared.efficiency(there, forecast.levers) if prepared else None,
        )
        self.trainings[name] = TrainingFacts.read(there, forecast, base)
        not_made = {
            path
            for asked, path in zip(_places_in(stage.data), _places_in(spec.data), strict=True)
            if not self.stubs.is_made(asked)
        }
        self.missing[name] = tuple(path for path in missing(spec.data, base) if path not in not_made)
        if prepared is not None:
            if spec.data.test is not None and there.data.test is None:  # its absence is a finding of its own
                there = there.model_copy(update={"evaluate": ()})
            found = data_findings(there, base, prepared)
            self.findings.extend((name, with_stage_keys(self.pipeline, name, finding)) for finding in found)


def _places_in(data: Data) -> list[str]:
    return [place for sources in data.sources().values() for source in sources for place in places(source)]


# Evaluations


def _evaluation_findings(stubs: ModelStubs, stage: EvaluateStage, name: str) -> Iterator[Finding]:
    yield from dict.fromkeys(found for model in stage.models for found in _row_findings(stubs, stage, model))
    for trained in _trainings_below(stubs.pipeline, name):
        yield from _overlap(stubs, stage, trained)


def _row_findings(stubs: ModelStubs, stage: EvaluateStage, model: str) -> Iterator[Finding]:
    """Of the rows as one model is asked them."""
    prepared = prepared_eval_rows(stubs, stage, model)
    if prepared is not None:
        spec = eval_rows_spec(stubs, stage, model)
        yield from (found for check in QUESTION_CHECKS for found in check(prepared.record, spec))
        rows = read_items(prepared.path("test.jsonl"))
        yield from unreadable_references(stage.evaluate, rows, form=stage.data.task, base=stubs.base)


def _trainings_below(pipeline: Pipeline, name: str) -> list[str]:
    """The trainings that a stage depends on, directly or not, in their order."""
    below: set[str] = set()
    waiting = [name]
    while waiting:
        new = set(needs(pipeline.stages[waiting.pop()])) - below
        below |= new
        waiting += new
    return [one for one in pipeline.order() if one in below and isinstance(pipeline.stages[one], TrainStage)]


def _overlap(stubs: ModelStubs, stage: EvaluateStage, trained: str) -> Iterator[Finding]:
    """Rows that a model was trained on cannot show what it has learnt. Pairs are compared by the rows that they are
    made from. A training that drops its test rows from training drops them for later evaluations of them, too."""
    training = stubs.pipeline.stages[trained]
    assert isinstance(training, TrainStage)
    sources = tuple(found for source in training.data.train for found in _existing(stubs, source))
    asked = _existing(stubs, stage.data.test)
    are_dropped = training.data.overlap == "drop" and training.data.test == stage.data.test
    if not sources or len(asked) != 1 or are_dropped or missing(Data(train=sources, test=asked[0]), stubs.base):
        return
    form, seed = _shared_form(stubs, training, stage), stubs.pipeline.seed
    found = find_leaks(sources, asked[0], base=stubs.base, seed=seed, turns=training.data.turns, form=form)
    if found:
        lines = "\n".join(f"  {one.row} ({trained}) is {one.other}: {one.how}" for one in found[:_MAX_SHOWN])
        more = f"\n  and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        problem = f"{len(found):,} of its rows are also training rows of stage {trained}:\n{lines}{more}"
        remedy = f"take them out of one of the two files, or --set stages.{trained}.data.overlap=warn to ignore it"
        yield Finding(level="warning" if training.data.overlap == "warn" else "error", problem=problem, remedy=remedy)


def _shared_form(stubs: ModelStubs, training: TrainStage, stage: EvaluateStage) -> Form | None:
    """Rows that are built alike are compared as built; others, and the sources of pairs, as they are in their files."""
    exist = all(stubs.is_made(source.path) for source in (*training.data.train, stage.data.test))
    return training.data.task if exist and training.data.task == stage.data.task else None


def _existing(stubs: ModelStubs, source: Source) -> tuple[Source, ...]:
    """The source itself, or the files that it will be made from; nothing where these are not known."""
    found = STAGE_PATH.fullmatch(source.path)
    if found is None:
        return (source,)
    if stubs.is_made(source.path):
        return (source.model_copy(update={"path": str(file_at(source.path, stubs.at))}),)
    return tuple(one for one in pair_sources(stubs.pipeline, source) if STAGE_PATH.fullmatch(one.path) is None)


# Files


def _missing_files(stubs: ModelStubs, stage: AnyStage) -> tuple[str, ...]:
    """Of a stage that does not train."""
    absent = missing(Data.model_construct(train=_sources(stage)), stubs.base)
    others = (path for path in _other_files(stage) if STAGE_PATH.fullmatch(path) is None)
    return (*absent, *(path for path in others if not (stubs.base / path).exists()))


def _not_made_yet(stubs: ModelStubs, name: str) -> tuple[str, ...]:
    stage = stubs.pipeline.stages[name]
    named = (place for source in _sources(stage) for place in places(source))
    return tuple(dict.fromkeys(place for place in named if not stubs.is_made(place)))


def _sources(stage: AnyStage) -> tuple[Source, ...]:
    """The rows that a stage reads."""
    match stage:
        case TrainStage():
            return tuple(source for sources in stage.data.sources().values() for source in sources)
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
        case Gate(task=CustomTask(path=path)) | BuildMoe(router=CentroidRouter(task=CustomTask(path=path))):
            return (path,)
    return ()


# Inputs of other stages, read with the functions that the stages themselves use


def read_stage_inputs(stubs: ModelStubs, name: str) -> None:
    """Raises what the stage would raise when it begins. Inputs that another stage has yet to make are left to the
    stage."""
    asked = stubs.pipeline.stages[name]
    if not all(stubs.is_made(path) for _, _, path in paths_of(asked)):
        return
    stage = with_files(asked, lambda path: str(file_at(path, stubs.at)))
    base, seed = stubs.base, stubs.pipeline.seed
    match stage:
        case Gate():
            if (renderer := _renderer(stubs, stage.base, stage)) is not None:
                split_prompts(stage, renderer, base, seed)
        case BuildMoe(router=CentroidRouter() as router):
            copies = expert_copies(stage) if stage.copies == "collapse" else {}
            names = tuple(expert for expert in stage.experts if expert not in copies)
            if len(names) > 1 and (renderer := _renderer(stubs, stage.base, router)) is not None:
                router_rows(router, names, renderer, base, seed)
        case MakePairs(method=Rules() as method):
            for split, rows in rows_of_splits(stage, base, seed).items():
                few = rule_pairs(rows[:_FEW_ROWS], method, base, seed)
                require_pairs({split: few if few.pairs else rule_pairs(rows, method, base, seed)})
        case MakePairs(method=Verdicts() as method):
            require_pairs({"train": judged_pairs(method, base)})
        case MakePairs(method=Sampled() as method):
            askable_rows(stage, method, base, seed)
        case MergeAdapter(adapter=str() as adapter):
            adapter_fingerprint(base / adapter)


def _renderer(stubs: ModelStubs, model: Input, how: Gate | CentroidRouter) -> Renderer | None:
    """None where the model has no tokenizer."""
    tokenizer = stubs.of(model).tokenizer
    return None if tokenizer is None else open_renderer(tokenizer, how.template, template_options=how.template_options)
