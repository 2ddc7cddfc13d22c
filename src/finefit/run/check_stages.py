"""`finefit check`: checks every stage of a run before the first one begins, as far as its inputs exist."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, StageForecast
from finefit.artifacts.records import Finding, file_at, with_files
from finefit.artifacts.stage_records import Efficiency
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import read_items
from finefit.errors import FindingError, FinefitError, MissingPackage, UserError
from finefit.facts.files import free_bytes
from finefit.facts.machine import Machine, read_machine
from finefit.model.resolve_model import adapter_fingerprint, read_stub
from finefit.plan import stage_forecasts
from finefit.plan.client import shared_planner
from finefit.plan.prepared_data import PreparedData, missing, places, prepare_data, present
from finefit.plan.resolve import require_unscaled, resolve
from finefit.plan.stage_costs import cards_here, eval_rows_spec, forecast_stage, prepared_eval_rows, training_costs
from finefit.plan.stage_forecasts import ModelStubs, pair_sources, training_spec
from finefit.preflight import StageFinding
from finefit.preflight.data import QUESTION_CHECKS, data_findings, find_leaks, long_references, unreadable_references
from finefit.preflight.model import require_model_here
from finefit.preflight.pipeline import PipelineFacts, check_facts, sorted_findings, with_stage_keys
from finefit.preflight.training import TrainingFacts, forecaster_here, require_packages
from finefit.spec import stages as kinds
from finefit.spec.data import Data, Source
from finefit.spec.models import Lora
from finefit.spec.pipeline import Pipeline, needs
from finefit.spec.schema import Spec
from finefit.spec.stages import STAGE_PATH, AnyStage, EvaluateStage, Input, TrainStage, models_of, paths_of
from finefit.spec.tasks import CustomTask
from finefit.stages.build_moe import router_rows
from finefit.stages.gate import split_prompts
from finefit.stages.make_pairs import judged_pairs, require_pairs, rows_of_splits, rule_pairs
from finefit.stages.sampled_pairs import askable_rows

_MAX_SHOWN = 10
_FEW_ROWS = 64
"""Usually enough rows to show that rules make pairs from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStage:
    """All fields but `kind` are for a training."""

    kind: str
    spec: Spec | None = None
    """Without held-out rows that do not exist."""
    prepared: PreparedData | None = None
    rows: tuple[Finding, ...] = ()
    """What was found in them, where they exist."""
    forecast: Forecast | None = None
    efficiency: Efficiency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPipeline:
    is_flat: bool
    stages: dict[str, CheckedStage]
    findings: tuple[StageFinding, ...]
    """Errors come first, then the order of stages."""
    disk_bytes: int
    free_disk_bytes: int
    refusal: type[FinefitError] = FindingError
    """Of its errors: what cannot be run here until a package is installed is no finding about the spec."""

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for _, finding in self.findings)


Forecasts = Mapping[str, tuple[Forecast, ...]]
"""Forecasts of trainings on this machine, by stage."""
_NONE: Forecasts = {}


def check_pipeline(
    pipeline: Pipeline,
    base: Path,
    runs: Path,
    *,
    done: stage_forecasts.FinishedOutput = stage_forecasts.no_output,
    names: Collection[str] | None = None,
    forecasts: Forecasts = _NONE,
    nodes: int | None = None,
) -> CheckedPipeline:
    """On the device that a run gets on this machine: the one list of checks of `check` and `run`. `runs`: where the run
    directory will be; `names`: only these stages; `forecasts`: those that exist already; `nodes`: that ranks were
    started on already."""
    stubs, machine = ModelStubs(pipeline=pipeline, base=base.resolve(), done=done), read_machine()
    checking = _Checking(pipeline=pipeline, stubs=stubs, forecasts=forecasts, machine=machine, nodes=nodes)
    free = free_bytes(runs)
    with shared_planner():
        for name in pipeline.order():
            if names is None or name in names:
                checking.check(name)
    not_made_yet = {}
    for name in checking.stages:
        named = dict.fromkeys(place for source in _sources(pipeline.stages[name]) for place in places(source))
        if waiting := tuple(place for place in named if not stubs.is_made(place)):
            not_made_yet[name] = waiting
    facts = PipelineFacts(
        pipeline=pipeline,
        costs=checking.costs,
        free_disk_bytes=free,
        host_memory_bytes=machine.memory_bytes,
        trainings=checking.trainings,
        missing=checking.missing,
        base=base,
        not_made_yet=not_made_yet,
    )
    whole = [one for one in check_facts(facts) if one[0] is None or one[0] in checking.stages]
    return CheckedPipeline(
        is_flat=pipeline.is_flat,
        stages=checking.stages,
        findings=sorted_findings([*checking.findings, *whole], pipeline),
        disk_bytes=sum(one.disk_bytes for one in checking.costs.values()),
        free_disk_bytes=free,
        refusal=MissingPackage if checking.lacks_package else FindingError,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checking:
    pipeline: Pipeline
    stubs: ModelStubs
    forecasts: Forecasts
    machine: Machine
    nodes: int | None
    stages: dict[str, CheckedStage] = field(default_factory=dict)
    costs: dict[str, StageForecast] = field(default_factory=dict)
    trainings: dict[str, TrainingFacts] = field(default_factory=dict)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: list[StageFinding] = field(default_factory=list)
    mistakes: list[UserError] = field(default_factory=list)

    @property
    def lacks_package(self) -> bool:
        return any(isinstance(error, MissingPackage) for error in self.mistakes)

    def check(self, name: str) -> None:
        """A user error in one of several stages becomes a finding, so that the others are still checked."""
        stage, stubs = self.pipeline.stages[name], self.stubs
        self.stages[name] = CheckedStage(kind=stage.kind)
        try:
            self._require_models(name, stage)
            if isinstance(stage, TrainStage):
                return self._training(name, stage)
            self.costs[name] = self._forecast(name)
            absent = missing(Data.model_construct(train=_sources(stage)), stubs.base)
            others = (path for path in _other_files(stage) if STAGE_PATH.fullmatch(path) is None)
            self.missing[name] = (*absent, *(path for path in others if not (stubs.base / path).exists()))
            if isinstance(stage, EvaluateStage):
                rows = dict.fromkeys(found for model in stage.models for found in _row_findings(stubs, stage, model))
                self.findings.extend((name, found) for found in rows)
                for trained in below(self.pipeline, name):
                    if isinstance(training := self.pipeline.stages[trained], TrainStage):
                        self.findings.extend((name, found) for found in _overlap(stubs, stage, trained, training))
            if not self.missing[name]:
                _read_stage_inputs(stubs, name)
        except UserError as error:
            if self.pipeline.is_flat:
                raise
            problem = error.problem.removeprefix(f"stage {name}: ")
            found = Finding(level="error", problem=problem, remedy=error.remedy)
            self.findings.append((name, with_stage_keys(self.pipeline, name, found)))
            self.mistakes.append(error)

    def _require_models(self, name: str, stage: AnyStage) -> None:
        """Those that no stage makes. An adapter that a stage has yet to make is left to the training."""
        for key, model in models_of(stage):
            if isinstance(model, kinds.StageModel):
                continue
            tuning = stage.tuning if isinstance(stage, TrainStage) and key == "model" else None
            if isinstance(tuning, Lora) and tuning.adapter is not None and STAGE_PATH.fullmatch(tuning.adapter):
                tuning = tuning.model_copy(update={"adapter": None})
            here = with_files(model, lambda path: str(file_at(path, self.stubs.at)))
            is_expert = key.startswith("experts")  # a mixture has its base's tokenizer
            unknown = require_model_here(here, tuning, self.stubs.base, reads_rows=not is_expert)
            self.findings.extend((name, found) for found in unknown)

    def _forecast(self, name: str) -> StageForecast:
        if name in self.forecasts:
            return training_costs(self.forecasts[name])
        return forecast_stage(self.stubs, name, cards_here(self.pipeline), forecaster_here(self.nodes))

    def _training(self, name: str, stage: TrainStage) -> None:
        spec, base = training_spec(self.stubs, name), self.stubs.base
        there = spec.model_copy(update={"data": present(spec.data, base)})
        tokenizer = read_stub(spec.model, base).tokenizer
        has_rows = tokenizer is not None and not missing(there.data, base)
        prepared = prepare_data(there, base, tokenizer) if tokenizer is not None and has_rows else None
        self.stages[name] = CheckedStage(kind="train", spec=there, prepared=prepared)
        not_made = {
            path
            for asked, path in zip(_places_in(stage.data), _places_in(spec.data), strict=True)
            if not self.stubs.is_made(asked)
        }
        self.missing[name] = tuple(path for path in missing(spec.data, base) if path not in not_made)
        if prepared is not None:
            is_test_absent = spec.data.test is not None and there.data.test is None  # reported as a separate finding
            asked = there.model_copy(update={"evaluate": ()}) if is_test_absent else there
            found = data_findings(asked, base, prepared)
            self.stages[name] = replace(self.stages[name], rows=found)
            self.findings.extend((name, with_stage_keys(self.pipeline, name, finding)) for finding in found)
        is_trained_on = {place for source in spec.data.train for place in places(source)}
        is_unusable = prepared is not None and prepared.record.lengths is None
        if is_unusable or is_trained_on & set(self.missing[name]):  # a rehearsal of other rows would prove nothing
            return
        self.costs[name] = self._forecast(name)
        forecast = self.costs[name].forecasts[0]
        efficiency = prepared.efficiency(there, forecast.levers) if prepared else None
        self.stages[name] = replace(self.stages[name], forecast=forecast, efficiency=efficiency)
        training = TrainingFacts.read(there, forecast, base)
        require_packages(training)
        if prepared is not None and (rows := prepared.record.lengths) is not None and rows.num_rows is not None:
            values = resolve(there, overrides=(), machine=self.machine, num_rows=rows.num_rows, forecast=forecast)
            require_unscaled(forecast.levers, values["precision"].value)
        self.trainings[name] = training


def _places_in(data: Data) -> list[str]:
    return [place for sources in data.sources().values() for source in sources for place in places(source)]


def below(pipeline: Pipeline, name: str) -> list[str]:
    """Returns the stages that a stage depends on, directly or not, in order."""
    wanted = {name}
    for other in reversed(pipeline.order()):
        if other in wanted:
            wanted |= set(needs(pipeline.stages[other]))
    return [other for other in pipeline.order() if other in wanted and other != name]


def _row_findings(stubs: ModelStubs, stage: EvaluateStage, model: str) -> Iterator[Finding]:
    """Yields findings on the rows as they are rendered for one model."""
    prepared = prepared_eval_rows(stubs, stage, model)
    if prepared is not None:
        spec = eval_rows_spec(stubs, stage, model)
        yield from (found for check in QUESTION_CHECKS for found in check(prepared.record, spec))
        rows = read_items(prepared.path("test.jsonl"))
        yield from unreadable_references(stage.evaluate, rows, form=stage.data.task, base=stubs.base)
        yield from long_references(stage.evaluate, rows)


def _overlap(stubs: ModelStubs, stage: EvaluateStage, trained: str, training: TrainStage) -> Iterator[Finding]:
    """Yields findings on test rows that the model was trained on, which cannot measure what it has learned. Pairs are
    compared by the rows from which they are made. A training that drops its test rows also drops them for later
    evaluations of the same test set."""
    sources = tuple(found for source in training.data.train for found in _existing(stubs, source))
    asked = _existing(stubs, stage.data.test)
    are_dropped = training.data.overlap == "drop" and training.data.test == stage.data.test
    if not sources or len(asked) != 1 or are_dropped or missing(Data(train=sources, test=asked[0]), stubs.base):
        return
    # rows that are built in the same way are compared as built; others, and the sources of pairs, as in their files
    exist = all(stubs.is_made(source.path) for source in (*training.data.train, stage.data.test))
    form = training.data.task if exist and training.data.task == stage.data.task else None
    seed = stubs.pipeline.seed
    found = find_leaks(sources, asked[0], base=stubs.base, seed=seed, turns=training.data.turns, form=form)
    if found:
        lines = "\n".join(f"  {one.row} ({trained}) is {one.other}: {one.how}" for one in found[:_MAX_SHOWN])
        more = f"\n  and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        problem = f"{len(found):,} of its rows are also training rows of stage {trained}:\n{lines}{more}"
        remedy = f"remove them from one of the two files, or --set stages.{trained}.data.overlap=warn to ignore it"
        yield Finding(level="warning" if training.data.overlap == "warn" else "error", problem=problem, remedy=remedy)


def _existing(stubs: ModelStubs, source: Source) -> tuple[Source, ...]:
    """Returns the source itself, or the files from which it will be made; nothing if these are unknown."""
    found = STAGE_PATH.fullmatch(source.path)
    if found is None:
        return (source,)
    if stubs.is_made(source.path):
        return (source.model_copy(update={"path": str(file_at(source.path, stubs.at))}),)
    return tuple(one for one in pair_sources(stubs.pipeline, source) if STAGE_PATH.fullmatch(one.path) is None)


def _sources(stage: AnyStage) -> tuple[Source, ...]:
    if isinstance(stage, TrainStage):
        return tuple(source for sources in stage.data.sources().values() for source in sources)
    return tuple(part for key, part, _ in paths_of(stage) if isinstance(part, Source) and key.endswith(".path"))


def _other_files(stage: AnyStage) -> list[str]:
    holders: tuple[type, ...] = (kinds.PythonStage, kinds.Rules, kinds.Verdicts)
    if isinstance(stage, kinds.Gate | kinds.BuildMoe):
        holders = (*holders, CustomTask)
    return [path for _, holder, path in paths_of(stage) if isinstance(holder, holders)]


def _read_stage_inputs(stubs: ModelStubs, name: str) -> None:
    """Reads the inputs with the stage's own functions, and raises the errors that the stage would. Inputs that are not
    made yet are left to the stage."""
    asked = stubs.pipeline.stages[name]
    if not all(stubs.is_made(path) for _, _, path in paths_of(asked)):
        return
    stage = with_files(asked, lambda path: str(file_at(path, stubs.at)))
    base, seed = stubs.base, stubs.pipeline.seed
    match stage:
        case kinds.Gate():
            if (renderer := _renderer(stubs, stage.base, stage)) is not None:
                split_prompts(stage, renderer, base, seed)
        case kinds.BuildMoe(router=kinds.CentroidRouter() as router):
            copies = stage_forecasts.expert_copies(stage) if stage.copies == "collapse" else {}
            names = tuple(expert for expert in stage.experts if expert not in copies)
            if len(names) > 1 and (renderer := _renderer(stubs, stage.base, router)) is not None:
                router_rows(router, names, renderer, base, seed)
        case kinds.MakePairs(method=kinds.Rules() as method):
            for split, rows in rows_of_splits(stage, base, seed).items():
                few = rule_pairs(rows[:_FEW_ROWS], method, base, seed)
                require_pairs({split: few if few.pairs else rule_pairs(rows, method, base, seed)})
        case kinds.MakePairs(method=kinds.Verdicts() as method):
            require_pairs({"train": judged_pairs(method, base)})
        case kinds.MakePairs(method=kinds.Sampled() as method):
            askable_rows(stage, method, base, seed)
        case kinds.MergeAdapter(adapter=str() as adapter):
            adapter_fingerprint(base / adapter)


def _renderer(stubs: ModelStubs, model: Input, how: kinds.Gate | kinds.CentroidRouter) -> Renderer | None:
    """Returns None if the model has no tokenizer."""
    tokenizer = stubs.of(model).tokenizer
    return None if tokenizer is None else open_renderer(tokenizer, how.template, template_options=how.template_options)
