"""The evaluate stage: every model answers the same rows, each in processes and a run directory of its own below the
stage's folder. Answers are never asked twice, so a stage that was killed goes on at its next item."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import sweep
from finefit.artifacts.cache import content_key
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import SequenceGate, StageJob, WiredModel, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir, stage_of
from finefit.artifacts.stage_records import EvalRequest, EvalResult, EvalStage, Subject
from finefit.compare.settings import CHOSEN
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row, read_items
from finefit.errors import DataError, RunError, SpecError
from finefit.evaluate.external_model import rows_spec, stage_model, without_rows
from finefit.evaluate.score import score_of
from finefit.facts.files import sha256_of
from finefit.moe.gate import GATE_RECORD, GATE_TABLE, choose_experts
from finefit.plan.stage_costs import same_base_bits
from finefit.run.eval_rows import own_rows, prepare_eval_rows, require_readable
from finefit.run.eval_subjects import EARLIER, ModelOnRows, open_eval_run, run_subject
from finefit.run.evaluation import BatchLimits, Say, Tick, evaluate, recording_status, request_of
from finefit.spec.data import Data, Source
from finefit.spec.models import ShapeModel
from finefit.spec.schema import Evaluation
from finefit.spec.stages import EvaluateStage, Questions, moved
from finefit.spec.tasks import LmEval
from finefit.tasks.task_files import form_content

_METRIC_KEYS = ("name", "unit", "better")


def score(job: StageJob, place: Path, *, lock: int, tick: Tick, say: Say) -> dict[str, Any]:
    """`place`: the stage's folder; `lock`: the descriptor that the answering processes inherit. All models are opened
    before the first is asked."""
    stage, base = job.stage, Path(job.base)
    assert isinstance(stage, EvaluateStage)
    models = {name: job.models[f"models.{name}"] for name in stage.models}
    require_experts(models, stage.evaluate)
    sweep(place)
    evaluations = tuple(moved(one, lambda path: str((base / path).resolve())) for one in stage.evaluate)
    runs = {
        name: rows.open(place, is_numbered=False)
        for name, rows in _models_on_rows(job, stage.data, models, evaluations).items()
    }
    for name, run in runs.items():
        require_readable(run, run_subject(stage_of(run), name), evaluations)
    gates = [
        GateModel(name=name, folder=Path(wired.gate), place=place / name)
        for name, wired in models.items()
        if wired.gate is not None
    ]
    for gate in gates:
        require_known_prompts(gate, runs)
    scored: dict[str, dict[str, EvalResult]] = {}
    for at, (name, run) in enumerate(runs.items(), 1):
        limits = BatchLimits(run=run, rows=own_rows(run))
        with run_lock(run.lock), recording_status(run):
            for one in evaluations:
                say(f"{name} ({at} of {len(runs)}): {one.label}")
                found = evaluate(run, request_of(run, name, one), lock=lock, tick=tick, limits=limits)
                scored.setdefault(name, {})[one.label] = found
    scored |= {gate.name: score_gate(gate, runs, evaluations) for gate in gates}
    for earlier in list(place.glob(f"{EARLIER}*")):
        if not (earlier / "reviews").exists():
            shutil.rmtree(earlier)
    return summary_of({name: scored[name] for name in models})


def _models_on_rows(
    job: StageJob, data: Questions, models: Mapping[str, WiredModel], evaluations: tuple[Evaluation, ...]
) -> dict[str, ModelOnRows]:
    """Without gates, which answer nothing themselves."""
    base = Path(job.base)
    spec = rows_spec(Data(train=(Source(path=""),), **data.how()), seed=job.seed, evaluations=evaluations)
    spec = spec.model_copy(update={"data": without_rows(spec.data, form_base=base)})
    found = {name: stage_model(name, wired, spec) for name, wired in models.items() if wired.gate is None}
    tunings = same_base_bits({name: (one.model, one.tuning, one.weights is not None) for name, one in found.items()})
    rows = {}
    for name, one in found.items():
        like = spec.model_copy(update={"model": one.model})
        rows[name] = ModelOnRows(
            external=replace(one, tuning=tunings[name]),
            prepared=prepare_eval_rows(data.test, like, one.tokenizer, base=base),
            base=base,
            device=job.device,
            precision=job.precision,
        )
    return rows


# A gate as a model: it answers nothing itself; its scores follow, item by item, from the answers of the experts that it
# chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class GateModel:
    """A gate among the models of an evaluation."""

    name: str
    folder: Path
    """The output of its stage."""
    place: Path
    """Of its run directory."""

    @property
    def record(self) -> SequenceGate:
        return read_record(self.folder / GATE_RECORD, SequenceGate)


def require_experts(models: Mapping[str, WiredModel], evaluations: Sequence[Evaluation]) -> None:
    for name, wired in models.items():
        if wired.gate is None:
            continue
        experts = read_record(Path(wired.gate) / GATE_RECORD, SequenceGate).experts
        if missing := [expert for expert in experts if expert not in models or models[expert].gate is not None]:
            absent = ", ".join(missing)
            among = f"models.{name} chooses among {', '.join(experts)} and answers nothing itself"
            remedy = f"name {absent} under models, too, by the names that the gate has for its experts"
            raise SpecError(f"{among}; {absent} is not among the models here", remedy)
        if own := [one.label for one in evaluations if isinstance(one.task, LmEval)]:
            raise SpecError(
                f"{', '.join(own)} brings items of its own, whose prompts models.{name} cannot see",
                "evaluate the gate in another stage",
            )


def require_known_prompts(gate: GateModel, runs: Mapping[str, RunDir]) -> None:
    """All experts are asked the same rows, in the form and with the template that the gate was trained on."""
    where = {name: stage_of(runs[name]) for name in gate.record.experts}
    subjects = {name: read_record(one.eval_stage, EvalStage).subject for name, one in where.items()}
    if len({subject.items_sha256 for subject in subjects.values()}) > 1:
        each = ", ".join(f"{name} {subject.items_sha256[:12]}" for name, subject in subjects.items())
        raise RunError(
            f"the experts of {gate.name} were not asked the same rows: {each}",
            "their tokenizers leave different rows as too long; raise data.max_tokens of the stage",
        )
    first, subject = where[gate.record.experts[0]], subjects[gate.record.experts[0]]
    if (form := form_content(subject.form, first.run)) != gate.record.form:
        trained, asked = gate.record.form or "nothing", form or "nothing"
        built = f"was trained on rows built with {trained}, and these are built with {asked}"
        raise SpecError(
            f"the gate of models.{gate.name} {built}: it would choose by prompts that it does not know",
            "give the gate's stage the same task as data.task here",
        )
    if _renderer(first, subject).sha256() != gate.record.template_sha256:
        raise SpecError(
            f"the gate of models.{gate.name} was trained on prompts of another template than these rows have",
            "give both stages the same template",
        )


def score_gate(gate: GateModel, runs: Mapping[str, RunDir], evaluations: Sequence[Evaluation]) -> dict[str, EvalResult]:
    """In a run directory that is renamed into place when it is complete; one of the same answers is kept."""
    experts = {name: runs[name] for name in gate.record.experts}
    digest = _digest(gate, experts, evaluations)

    def fill(run: RunDir) -> None:
        _fill(run, gate, digest, experts, evaluations)

    run = open_eval_run(gate.place.parent, gate.name, digest, fill, is_numbered=False, status="finished")
    where = stage_of(run)
    return {
        one.label: read_record(where.evaluation(one.label, gate.name, one.limit).result, EvalResult)
        for one in evaluations
    }


def _digest(gate: GateModel, experts: Mapping[str, RunDir], evaluations: Sequence[Evaluation]) -> str:
    results = [_paths(run, one).result for run in experts.values() for one in evaluations]
    files = [gate.folder / GATE_RECORD, gate.folder / GATE_TABLE, *results]
    names = [gate.name, *experts, *(one.label for one in evaluations)]
    return content_key([*names, *(sha256_of(file) for file in files)])


def _paths(run: RunDir, evaluation: Evaluation) -> EvalPaths:
    return stage_of(run).evaluation(evaluation.label, run.path.name, evaluation.limit)


def _fill(
    run: RunDir, gate: GateModel, digest: str, experts: Mapping[str, RunDir], evaluations: Sequence[Evaluation]
) -> None:
    where, first = run.stage(1, "eval"), stage_of(next(iter(experts.values())))
    began, own = time.perf_counter(), read_record(first.eval_stage, EvalStage)
    choices = _choices(gate, own.subject, first)
    own = replace(own, name=gate.name, subject=_subject(gate, digest, own.subject))
    shutil.copyfile(first.prepared(own.subject.items), where.prepared(own.subject.items))
    write_record(where.eval_stage, own)
    for one in evaluations:
        _compose(where, own, one, experts, choices, seconds=time.perf_counter() - began)


def _compose(
    where: StageDir,
    own: EvalStage,
    evaluation: Evaluation,
    experts: Mapping[str, RunDir],
    choices: Sequence[str],
    *,
    seconds: float,
) -> None:
    """A request and its result, as for a model that was asked."""
    asked = read_record(_paths(next(iter(experts.values())), evaluation).request, EvalRequest)
    answered = {name: read_record(_paths(run, evaluation).result, EvalResult) for name, run in experts.items()}
    paths = where.evaluation(evaluation.label, own.name, evaluation.limit)
    paths.folder.mkdir(parents=True)
    write_record(
        paths.request,
        replace(asked, checkpoint=own.name, subject=own.subject, batch_limit=EvalBatchLimit(rows=1, tokens=1)),
    )
    write_record(paths.result, replace(composed(answered, choices), checkpoint=own.name, seconds=seconds))


def _subject(gate: GateModel, digest: str, expert: Subject) -> Subject:
    """Asked as its experts are, without weights: its answers exist already."""
    return replace(
        expert,
        model=ShapeModel(kind="shape", config={}),
        model_name=f"a gate over {', '.join(gate.record.experts)}",
        model_fingerprint=digest,
        weights=None,
        manifest_sha256=None,
    )


def _choices(gate: GateModel, subject: Subject, where: StageDir) -> list[str]:
    """An expert for every row, by the prompt that the experts see."""
    rows = read_items(where.verified(subject.items, {subject.items: subject.items_sha256}))
    renderer = _renderer(where, subject)
    return choose_experts(gate.folder, [_prompt(renderer, row, subject.max_prompt_tokens) for row in rows])


def _renderer(where: StageDir, subject: Subject) -> Renderer:
    return open_renderer(where.tokenizer, subject.template, template_options=subject.template_options)


def _prompt(renderer: Renderer, row: Row, most: int | None) -> list[int]:
    if row.text:
        raise DataError(
            f"{row.place} is plain text: it asks nothing that a gate could choose by",
            "take rows with a prompt and an answer",
        )
    messages = row.prompt if most is None else renderer.cut_prompt(row.prompt, tools=row.tools, max_tokens=most)
    return renderer.prompt_tokens(messages, tools=row.tools)


def composed(answered: Mapping[str, EvalResult], choices: Sequence[str]) -> EvalResult:
    """One result from those of several models on the same items: for each item that of the model chosen for it,
    `choices[item.item]`."""
    first = next(iter(answered.values()))
    keys = [item.key for item in first.items]
    for name, result in answered.items():
        if result.definitions != first.definitions or [item.key for item in result.items] != keys:
            raise RunError(
                f"{first.task}: {name} was scored in another way, or on other items, than {next(iter(answered))}",
                "score them again",
            )
    chosen = [choices[item.item] for item in first.items]
    items = tuple(replace(answered[name].items[at], answered_by=name) for at, name in enumerate(chosen))
    counts = ", ".join(f"{name} {chosen.count(name)}" for name in answered)
    warnings = dict.fromkeys(warning for result in answered.values() for warning in result.warnings)
    return replace(
        first,
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={metric.name: score_of(metric, items) for metric in first.definitions},
        signature=_signature(answered),
        warnings=(f"of {len(items)} items the gate gave {counts}", *warnings),
        new_tokens=sum(item.new_tokens or 0 for item in items),
        loaded_bytes=None,
        peak_bytes=None,
        predicted_bytes=None,
        items=items,
    )


def _signature(answered: Mapping[str, EvalResult]) -> dict[str, str]:
    """All values where the experts' differ."""
    keys = dict.fromkeys(key for result in answered.values() for key in result.signature)
    found = {
        key: " / ".join(dict.fromkeys(result.signature.get(key, "(none)") for result in answered.values()))
        for key in keys
    }
    return found | {CHOSEN: f"one of {', '.join(answered)}, chosen for each prompt by a gate"}


# The summary for the stage's record


def summary_of(scored: Mapping[str, Mapping[str, EvalResult]]) -> dict[str, Any]:
    """By model and task, in the order of the spec."""
    results = [result for found in scored.values() for result in found.values()]
    return {
        "models": list(scored),
        "scores": {name: {task: _scores(result) for task, result in found.items()} for name, found in scored.items()},
        "metrics": {
            result.task: [{key: getattr(metric, key) for key in _METRIC_KEYS} for metric in result.definitions]
            for result in results
        },
        "loaded_bytes": max((one.loaded_bytes for one in results if one.loaded_bytes is not None), default=None),
        "peak_bytes": max((one.peak_bytes for one in results if one.peak_bytes is not None), default=None),
    }


def _scores(result: EvalResult) -> dict[str, Any]:
    """Of numbers that are not finite, None."""
    found: dict[str, Any] = {"n": result.n, "available": result.available, "coverage": result.coverage}
    found["metrics"] = {
        name: {key: value if isfinite(value := getattr(score, key)) else None for key in ("value", "low", "high")}
        for name, score in result.metrics.items()
    }
    found["warnings"] = list(result.warnings)
    if any(item.answered_by for item in result.items):
        found["answered_by"] = answered_by(result)
    return found


def answered_by(result: EvalResult) -> dict[str, int]:
    """How many items each expert answered, where a gate chose."""
    names = [item.answered_by for item in result.items if item.answered_by is not None]
    return {name: names.count(name) for name in dict.fromkeys(names)}
