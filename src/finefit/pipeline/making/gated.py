"""A gate as a model: it answers nothing itself. What it scores follows, item by item, from what the experts have answered that it chooses among."""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from finefit import __version__
from finefit.artifacts.evaluations import EvalItem, EvalRequest, EvalResult, EvalStage, Subject
from finefit.artifacts.forecasts import Room
from finefit.artifacts.pipelines import SequenceGate, WiredModel
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, RunDir, StageDir
from finefit.compare.settings import CHOSEN
from finefit.data.items import read_items
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row
from finefit.errors import DataError, RunError, SpecError
from finefit.evaluate.gate import RECORD, TABLE, choose
from finefit.evaluate.score import score_of
from finefit.facts.files import read_file
from finefit.pipeline.bare import STAGING, digest_at, put_at
from finefit.pipeline.create import stage_of
from finefit.pipeline.taskfiles import form_content
from finefit.spec.models import ShapeModel
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import LmEval


@dataclass(frozen=True, slots=True, kw_only=True)
class GateModel:
    """A gate among the models of an evaluation."""

    name: str
    folder: Path
    """With what its stage has made."""
    place: Path
    """Of its run directory."""

    @property
    def record(self) -> SequenceGate:
        return read_record(self.folder / RECORD, SequenceGate)


def require_experts(models: Mapping[str, WiredModel], evaluations: Sequence[Evaluation]) -> None:
    """Told before anything is asked."""
    for name, wired in models.items():
        if wired.gate is None:
            continue
        experts = read_record(Path(wired.gate) / RECORD, SequenceGate).experts
        if missing := [expert for expert in experts if expert not in models or models[expert].gate is not None]:
            raise SpecError(
                f"models.{name} chooses among {', '.join(experts)} and answers nothing itself; {', '.join(missing)} is not among the models here",
                f"name {', '.join(missing)} under models too: they are known by the names that the gate has for its experts",
            )
        if own := [one.label for one in evaluations if isinstance(one.task, LmEval)]:
            raise SpecError(
                f"{', '.join(own)} brings items of its own, whose prompts models.{name} cannot see",
                "evaluate the gate in another stage",
            )


def require_known_prompts(gate: GateModel, runs: Mapping[str, RunDir]) -> None:
    """Told before anything is asked: the experts will all be asked the same, and in the form that the gate was trained on."""
    _require_same_items(gate, {name: runs[name] for name in gate.record.experts})
    where = stage_of(runs[gate.record.experts[0]])
    subject = read_record(where.eval_stage, EvalStage).subject
    if (asked := form_content(subject.form, where.run)) != gate.record.form:
        raise SpecError(
            f"the gate of models.{gate.name} was trained on rows that were built with {gate.record.form or 'nothing'}, and these are built with "
            f"{asked or 'nothing'}: it would choose by prompts that it does not know",
            "give the stage of the gate as task what data.task is here",
        )
    if _renderer(where, subject).sha256() != gate.record.template_sha256:
        raise SpecError(
            f"the gate of models.{gate.name} was trained on prompts of another template than these rows are asked with",
            "give both stages the same template",
        )


def score_gate(gate: GateModel, runs: Mapping[str, RunDir], evaluations: Sequence[Evaluation]) -> dict[str, EvalResult]:
    """In a run directory that is made whole at once; one that follows from the same answers stays as it is."""
    experts = {name: runs[name] for name in gate.record.experts}
    digest = _digest(gate, experts, evaluations)
    if digest_at(gate.place) != digest:
        _create(gate, digest, experts, evaluations)
    where = stage_of(RunDir(gate.place))
    return {
        one.label: read_record(where.evaluation(one.label, gate.name, one.limit).result, EvalResult)
        for one in evaluations
    }


def _digest(gate: GateModel, experts: Mapping[str, RunDir], evaluations: Sequence[Evaluation]) -> str:
    files = [
        gate.folder / RECORD,
        gate.folder / TABLE,
        *(_paths(run, one).result for run in experts.values() for one in evaluations),
    ]
    content = [
        gate.name,
        *experts,
        *(one.label for one in evaluations),
        *(read_file(file, file.parent).sha256 for file in files),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _paths(run: RunDir, evaluation: Evaluation) -> EvalPaths:
    return stage_of(run).evaluation(evaluation.label, run.path.name, evaluation.limit)


def _create(gate: GateModel, digest: str, experts: Mapping[str, RunDir], evaluations: Sequence[Evaluation]) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f"{STAGING}{gate.name}-", dir=gate.place.parent))
    try:
        _fill(RunDir(staging), gate, digest, experts, evaluations)
        staging.chmod(0o755)
        put_at(staging, gate.place)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _fill(
    run: RunDir, gate: GateModel, digest: str, experts: Mapping[str, RunDir], evaluations: Sequence[Evaluation]
) -> None:
    where, first = run.stage(1, "eval"), stage_of(next(iter(experts.values())))
    began, own = time.perf_counter(), read_record(first.eval_stage, EvalStage)
    choices = _choices(gate, own.subject, first)
    own = replace(own, name=gate.name, subject=_subject(gate, digest, own.subject))
    for folder in (run.log.parent, where.path / "data"):
        folder.mkdir(parents=True)
    run.log.touch()
    shutil.copyfile(first.prepared(own.subject.items), where.prepared(own.subject.items))
    write_record(where.eval_stage, own)
    for one in evaluations:
        _compose(where, own, one, experts, choices, seconds=time.perf_counter() - began)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_record(
        run.run, Run(name=gate.name, digest=digest, finefit=__version__, created=now, kind="eval", status="finished")
    )


def _compose(
    where: StageDir,
    own: EvalStage,
    evaluation: Evaluation,
    experts: Mapping[str, RunDir],
    choices: Sequence[str],
    *,
    seconds: float,
) -> None:
    """One request and its result, as if somebody had been asked."""
    asked = read_record(_paths(next(iter(experts.values())), evaluation).request, EvalRequest)
    answered = {name: read_record(_paths(run, evaluation).result, EvalResult) for name, run in experts.items()}
    paths = where.evaluation(evaluation.label, own.name, evaluation.limit)
    paths.folder.mkdir(parents=True)
    write_record(paths.request, replace(asked, checkpoint=own.name, subject=own.subject, room=Room(rows=1, tokens=1)))
    write_record(paths.result, replace(composed(answered, choices), checkpoint=own.name, seconds=seconds))


def _require_same_items(gate: GateModel, experts: Mapping[str, RunDir]) -> None:
    items = {
        name: read_record(stage_of(run).eval_stage, EvalStage).subject.items_sha256 for name, run in experts.items()
    }
    if len(set(items.values())) > 1:
        raise RunError(
            f"the experts of {gate.name} were not asked the same rows: {', '.join(f'{name} {sha256[:12]}' for name, sha256 in items.items())}",
            "their tokenizers leave different rows as too long; raise data.max_tokens of the stage",
        )


def _subject(gate: GateModel, digest: str, expert: Subject) -> Subject:
    """Asked as its experts are. It has no weights that could be loaded: its answers are there already."""
    return replace(
        expert,
        model=ShapeModel(kind="shape", config={}),
        model_name=f"a gate over {', '.join(gate.record.experts)}",
        model_fingerprint=digest,
        weights=None,
        manifest_sha256=None,
    )


def _choices(gate: GateModel, subject: Subject, where: StageDir) -> list[str]:
    """An expert for every row, by its prompt as the experts see it."""
    rows = read_items(where.verified(subject.items, {subject.items: subject.items_sha256}))
    renderer = _renderer(where, subject)
    return choose(gate.folder, [_prompt(renderer, row, subject.max_prompt_tokens) for row in rows])


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
    """One result from those of several models on the same items: of each item that of the model which was chosen for it, `choices[item.item]`."""
    first = next(iter(answered.values()))
    for name, result in answered.items():
        if result.definitions != first.definitions or [item.key for item in result.items] != [
            item.key for item in first.items
        ]:
            raise RunError(
                f"{first.task}: {name} was scored in another way, or on other items, than {next(iter(answered))}",
                "score them anew",
            )
    items = tuple(_chosen(answered, choices[item.item], at) for at, item in enumerate(first.items))
    taken = [sum(item.answered_by == name for item in items) for name in answered]
    words = ", ".join(f"{name} {count}" for name, count in zip(answered, taken, strict=True))
    told = dict.fromkeys(warning for result in answered.values() for warning in result.warnings)
    return replace(
        first,
        coverage=sum(item.failure is None for item in items) / len(items),
        metrics={metric.name: score_of(metric, items) for metric in first.definitions},
        signature=_signature(answered),
        warnings=(f"of {len(items)} items the gate gave {words}", *told),
        new_tokens=sum(item.new_tokens or 0 for item in items),
        loaded_bytes=None,
        peak_bytes=None,
        foretold_bytes=None,
        items=items,
    )


def _chosen(answered: Mapping[str, EvalResult], name: str, at: int) -> EvalItem:
    return replace(answered[name].items[at], answered_by=name)


def _signature(answered: Mapping[str, EvalResult]) -> dict[str, str]:
    """Where the experts' differ, all of them."""
    keys = dict.fromkeys(key for result in answered.values() for key in result.signature)
    found = {
        key: " / ".join(dict.fromkeys(result.signature.get(key, "(none)") for result in answered.values()))
        for key in keys
    }
    return found | {CHOSEN: f"one of {', '.join(answered)}, chosen for each prompt by a gate"}
