"""The evaluate stage: every model answers the same rows, each in separate processes and in a run directory of its own
below the stage's folder. No answer is generated twice, so a stage that was killed resumes at its next item."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import sweep
from finefit.artifacts.cache import content_key
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import SequenceGate, StageJob, WiredModel, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import EvalRequest, EvalResult, EvalStage, Subject
from finefit.compare.settings import CHOSEN
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import read_items
from finefit.errors import DataError, RunError, SpecError
from finefit.evaluate.external_model import ExternalModel, rows_spec, stage_model, without_rows
from finefit.evaluate.score import score_of
from finefit.facts.files import sha256_of
from finefit.moe.gate import GATE_RECORD, GATE_TABLE, choose_experts
from finefit.plan.prepared_data import PreparedData
from finefit.plan.stage_costs import same_base_bits
from finefit.run.eval_rows import own_rows, prepare_eval_rows, require_readable
from finefit.run.eval_subjects import EARLIER, open_eval_run, open_rows_run, run_subject, without_model
from finefit.run.evaluation import NOT_PLANNED, BatchLimits, Say, Tick, evaluate, recording_status, request_of
from finefit.spec.data import Data, Source
from finefit.spec.schema import Evaluation
from finefit.spec.stages import EvaluateStage, Questions, moved
from finefit.spec.tasks import LmEval
from finefit.tasks.custom import form_content

_METRIC_KEYS = ("name", "unit", "better")


def score(job: StageJob, place: Path, *, lock: int, tick: Tick, say: Say) -> dict[str, Any]:
    """`place`: the stage's folder; `lock`: the descriptor that the answering processes inherit. All models are opened
    before the first one is asked. Returns the summary for the stage's record."""
    stage, base = job.stage, Path(job.base)
    assert isinstance(stage, EvaluateStage)
    models = {name: job.models[f"models.{name}"] for name in stage.models}
    gates = {name: Path(wired.gate) for name, wired in models.items() if wired.gate is not None}
    for name, gate in gates.items():
        _require_experts(name, read_record(gate / GATE_RECORD, SequenceGate), models, stage.evaluate)
    sweep(place)
    evaluations = tuple(moved(one, lambda path: str((base / path).resolve())) for one in stage.evaluate)
    asked = models_on_rows(job, stage.data, models, evaluations)
    how = partial(open_rows_run, base=base, device=job.device, precision=job.precision, runs=place, is_numbered=False)
    runs = {name: how(external, prepared) for name, (external, prepared) in asked.items()}
    warned: tuple[str, ...] = ()
    for name, run in runs.items():
        warned = require_readable(run, run_subject(stage_of(run), name), evaluations)
    for warning in warned:  # the rows are the same for all models
        say(f"warning: {warning}")
    for name, gate in gates.items():
        _require_known_prompts(name, read_record(gate / GATE_RECORD, SequenceGate), runs)
    scored: dict[str, dict[str, EvalResult]] = {}
    for at, (name, run) in enumerate(runs.items(), 1):
        limits = BatchLimits(run=run, rows=own_rows(run))
        with run_lock(run.lock), recording_status(run):
            for one in evaluations:
                say(f"{name} ({at} of {len(runs)}): {one.label}")
                found = evaluate(run, request_of(run, name, one), lock=lock, tick=tick, limits=limits, say=say)
                scored.setdefault(name, {})[one.label] = found
    scored |= {name: _score_gate(name, gate, place, runs, evaluations) for name, gate in gates.items()}
    for earlier in list(place.glob(f"{EARLIER}*")):
        if not (earlier / "reviews").exists():
            shutil.rmtree(earlier)
    results = [result for name in models for result in scored[name].values()]
    return {
        "models": list(models),
        "scores": {name: {task: _scores(result) for task, result in scored[name].items()} for name in models},
        "metrics": {
            result.task: [{key: getattr(metric, key) for key in _METRIC_KEYS} for metric in result.definitions]
            for result in results
        },
        "loaded_bytes": max((one.loaded_bytes for one in results if one.loaded_bytes is not None), default=None),
        "peak_bytes": max((one.peak_bytes for one in results if one.peak_bytes is not None), default=None),
    }


def models_on_rows(
    job: StageJob, data: Questions, models: Mapping[str, WiredModel], evaluations: tuple[Evaluation, ...]
) -> dict[str, tuple[ExternalModel, PreparedData]]:
    """Returns each model with the rows rendered for it, without gates, which generate no answers themselves."""
    base = Path(job.base)
    spec = rows_spec(Data(train=(Source(path=""),), **data.how()), seed=job.seed, evaluations=evaluations)
    spec = spec.model_copy(update={"data": without_rows(spec.data, form_base=base)})
    found = {name: stage_model(name, wired, spec) for name, wired in models.items() if wired.gate is None}
    tunings = same_base_bits({name: (one.model, one.tuning, one.weights is not None) for name, one in found.items()})
    asked = {}
    for name, one in found.items():
        like = spec.model_copy(update={"model": one.model})
        prepared = prepare_eval_rows(data.test, like, one.tokenizer, base=base)
        asked[name] = replace(one, tuning=tunings[name]), prepared
    return asked


def _require_experts(
    name: str, gate: SequenceGate, models: Mapping[str, WiredModel], evaluations: Sequence[Evaluation]
) -> None:
    if missing := [expert for expert in gate.experts if expert not in models or models[expert].gate is not None]:
        absent = ", ".join(missing)
        among = f"models.{name} chooses among {', '.join(gate.experts)} and generates no answers itself"
        remedy = f"add {absent} to models, under the names that the gate uses for its experts"
        raise SpecError(f"{among}; {absent} is not among the models here", remedy)
    if own := [one.label for one in evaluations if isinstance(one.task, LmEval)]:
        problem = f"{', '.join(own)} brings its own items, whose prompts models.{name} cannot see"
        raise SpecError(problem, "evaluate the gate in another stage")


def _require_known_prompts(name: str, gate: SequenceGate, runs: Mapping[str, RunDir]) -> None:
    """All experts must have been asked the same rows, in the form and with the template that the gate was trained
    on."""
    where = {expert: stage_of(runs[expert]) for expert in gate.experts}
    subjects = {expert: read_record(one.eval_stage, EvalStage).subject for expert, one in where.items()}
    if len({subject.items_sha256 for subject in subjects.values()}) > 1:
        each = ", ".join(f"{expert} {subject.items_sha256[:12]}" for expert, subject in subjects.items())
        remedy = "their tokenizers make different rows too long; raise data.max_tokens of the stage"
        raise RunError(f"the experts of {name} were not asked the same rows: {each}", remedy)
    first, subject = where[gate.experts[0]], subjects[gate.experts[0]]
    if (form := form_content(subject.form, first.run)) != gate.form:
        trained, asked = gate.form or "nothing", form or "nothing"
        built = f"was trained on rows built with {trained}, but these are built with {asked}"
        problem = f"the gate of models.{name} {built}: it would choose by prompts of an unknown form"
        raise SpecError(problem, "give the gate's stage the same task as data.task here")
    if _renderer(first, subject).sha256() != gate.template_sha256:
        problem = f"the gate of models.{name} was trained with another template than the one of these rows"
        raise SpecError(problem, "give both stages the same template")


def _score_gate(
    name: str, folder: Path, place: Path, runs: Mapping[str, RunDir], evaluations: Sequence[Evaluation]
) -> dict[str, EvalResult]:
    """A gate generates no answers itself: its scores follow, item by item, from the answers of the experts that it
    chooses. `folder`: the output of its stage. Its run directory below `place` is kept as long as the answers are the
    same."""
    gate = read_record(folder / GATE_RECORD, SequenceGate)
    experts = {expert: runs[expert] for expert in gate.experts}
    results = [_paths(run, one).result for run in experts.values() for one in evaluations]
    digests = [sha256_of(file) for file in (folder / GATE_RECORD, folder / GATE_TABLE, *results)]
    digest = content_key([name, *experts, *(one.label for one in evaluations), *digests])

    def fill(run: RunDir) -> None:
        expert = next(iter(experts.values()))
        where, first = run.stage(1, "eval"), stage_of(expert)
        began, own = time.perf_counter(), read_record(first.eval_stage, EvalStage)
        choices = _choices(folder, own.subject, first)
        subject = without_model(own.subject, f"a gate over {', '.join(gate.experts)}", digest)
        shutil.copyfile(first.prepared(subject.items), where.prepared(subject.items))
        write_record(where.eval_stage, replace(own, name=name, subject=subject))
        for one in evaluations:  # write a request and a result, as for a model that was asked
            asked = read_record(_paths(expert, one).request, EvalRequest)
            answered = {each: read_record(_paths(its, one).result, EvalResult) for each, its in experts.items()}
            paths = where.evaluation(one.label, name, one.limit)
            paths.folder.mkdir(parents=True)
            write_record(paths.request, replace(asked, checkpoint=name, subject=subject, batch_limit=NOT_PLANNED))
            seconds = time.perf_counter() - began
            write_record(paths.result, replace(composed(answered, choices), checkpoint=name, seconds=seconds))

    run = open_eval_run(place, name, digest, fill, is_numbered=False, status="finished")
    return {one.label: read_record(_paths(run, one).result, EvalResult) for one in evaluations}


def _paths(run: RunDir, evaluation: Evaluation) -> EvalPaths:
    return stage_of(run).evaluation(evaluation.label, run.path.name, evaluation.limit)


def _choices(gate: Path, subject: Subject, where: StageDir) -> list[str]:
    """Chooses an expert for every row, by the prompt that the experts see."""
    renderer, most, prompts = _renderer(where, subject), subject.max_prompt_tokens, []
    for row in read_items(where.verified(subject.items, {subject.items: subject.items_sha256})):
        if row.text:
            problem = f"{row.place} is plain text: it has no prompt by which a gate could choose"
            raise DataError(problem, "use rows with a prompt and an answer")
        messages = row.prompt if most is None else renderer.cut_prompt(row.prompt, tools=row.tools, max_tokens=most)
        prompts.append(renderer.prompt_tokens(messages, tools=row.tools))
    return choose_experts(gate, prompts)


def _renderer(where: StageDir, subject: Subject) -> Renderer:
    return open_renderer(where.tokenizer, subject.template, template_options=subject.template_options)


def composed(answered: Mapping[str, EvalResult], choices: Sequence[str]) -> EvalResult:
    """Takes for each item the result of the model chosen for it, `choices[item.item]`, from several results on the same
    items."""
    first = next(iter(answered.values()))
    keys = [item.key for item in first.items]
    for name, result in answered.items():
        if result.definitions != first.definitions or [item.key for item in result.items] != keys:
            problem = f"{first.task}: {name} was scored in another way, or on other items, than {next(iter(answered))}"
            raise RunError(problem, "score them again")
    chosen = [choices[item.item] for item in first.items]
    items = tuple(replace(answered[name].items[at], answered_by=name) for at, name in enumerate(chosen))
    counts = ", ".join(f"{name} {chosen.count(name)}" for name in answered)
    warnings = dict.fromkeys(warning for result in answered.values() for warning in result.warnings)
    signature = {}  # joins all values if the experts' values differ
    for key in dict.fromkeys(key for result in answered.values() for key in result.signature):
        values = dict.fromkeys(result.signature.get(key, "(none)") for result in answered.values())
        signature[key] = " / ".join(values)
    return replace(
        first,
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={metric.name: score_of(metric, items) for metric in first.definitions},
        signature=signature | {CHOSEN: f"one of {', '.join(answered)}, chosen for each prompt by a gate"},
        warnings=(f"of {len(items)} items the gate gave {counts}", *warnings),
        new_tokens=sum(item.new_tokens or 0 for item in items),
        loaded_bytes=None,
        peak_bytes=None,
        predicted_bytes=None,
        items=items,
    )


def _scores(result: EvalResult) -> dict[str, Any]:
    """Replaces numbers that are not finite by None; for a gate, adds how many items each expert answered."""
    found: dict[str, Any] = {"n": result.n, "available": result.available, "coverage": result.coverage}
    found["metrics"] = {
        name: {key: value if isfinite(value := getattr(score, key)) else None for key in ("value", "low", "high")}
        for name, score in result.metrics.items()
    }
    found["warnings"] = list(result.warnings)
    if answered_by := Counter(item.answered_by for item in result.items if item.answered_by is not None):
        found["answered_by"] = dict(answered_by)
    return found
