"""Before a run: what it will take on the device that it gets, and whether anything speaks against it. No weight has been loaded yet."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.artifacts.records import Finding
from finefit.data.items import is_asked, read_items
from finefit.data.rows import Row
from finefit.data.tasks import NoResult, Task, make_task
from finefit.errors import DataError, FindingError, SpecError
from finefit.facts.cards import parse_card
from finefit.facts.files import free_bytes
from finefit.facts.machine import Machine, read_version
from finefit.model.locate import outline
from finefit.pipeline.data import PreparedData, missing
from finefit.pipeline.forecasting import forecast
from finefit.plan.engine import require_same_count
from finefit.plan.resolve import device_of
from finefit.preflight.data import examine_data
from finefit.preflight.run import OPTIONAL, Preparation, examine
from finefit.spec.schema import AutoEngine, Evaluation, Spec
from finefit.spec.tasks import Form, LmEval
from finefit.step.engines.zero_config import own_config

_SHOWN = 10


def foresee(spec: Spec, base: Path, lengths: Lengths, machine: Machine, *, nodes: int | None = None) -> Forecast:
    """On the device that a run would get here; of a card that the spec names only the size counts, as the most that may be used."""
    asked, device = parse_card(spec.card), device_of(spec, machine)
    if asked.count > 1:
        spec = _for_several(spec, asked.count, device)
    budget = asked.memory_bytes if device == "cuda" else None
    if asked.kind is not None and device == "cuda":
        budget = asked.kind.memory_bytes
    (found,) = forecast(spec, base, ("cpu" if device == "cpu" else "auto",), lengths, budget_bytes=budget, nodes=nodes)
    return found


def _for_several(spec: Spec, count: int, device: str) -> Spec:
    """The cards that the spec names by number are those that are here; the engine is told how many."""
    if device != "cuda":
        raise SpecError(
            f"card: {spec.card} means {count} cards, and this run takes the CPU",
            f"set card: cpu and engine.devices: {count}",
        )
    if isinstance(spec.engine, AutoEngine) and spec.engine.devices is None:
        return spec.model_copy(update={"engine": AutoEngine(kind="auto", devices=count)})
    require_same_count(parse_card(spec.card), spec.engine)
    return spec


def findings_of(
    spec: Spec, foretold: Forecast, machine: Machine, base: Path, runs: Path, total_steps: int | None
) -> tuple[Finding, ...]:
    return examine(
        Preparation(
            spec=spec,
            forecast=foretold,
            total_steps=total_steps,
            free_disk_bytes=free_bytes(runs),
            host_memory_bytes=machine.memory_bytes,
            missing_files=missing(spec.data, base),
            absent=frozenset(name for name in OPTIONAL if read_version(name) is None),
            engine_config=own_config(spec.engine, base),
        )
    )


def data_findings(spec: Spec, base: Path, prepared: PreparedData) -> tuple[Finding, ...]:
    config = outline(spec.model, base).config
    embeddings = config.get("text_config", config).get("vocab_size")
    return (*examine_data(prepared.record, spec, embeddings=embeddings), *_references(spec, base, prepared))


def _references(spec: Spec, base: Path, prepared: PreparedData) -> tuple[Finding, ...]:
    """A reference that its task cannot read is found now, not after the training."""
    asked = [
        evaluation for evaluation in spec.evaluate if not isinstance(evaluation.task, LmEval)
    ]  # whose tasks bring their own rows
    if not asked:
        return ()
    if spec.data.test is None:
        problem = "evaluate names a task, but data.test names no rows to answer"
        return (Finding(level="error", problem=problem, remedy="add data.test: {path: ...}, or remove evaluate"),)
    return unreadable_references(asked, read_items(prepared.path("test.jsonl")), form=spec.data.task, base=base)


def unreadable_references(
    evaluations: Iterable[Evaluation], rows: Sequence[Row], *, form: Form | None, base: Path
) -> tuple[Finding, ...]:
    tasks = [(make_task(e, form=form, base=base), e) for e in evaluations if not isinstance(e.task, LmEval)]
    asked = [(task, row) for task, evaluation in tasks for row in rows if is_asked(row, evaluation.sources)]
    faults = [
        f"{row.place} cannot be a reference of {task.name}: {reason}"
        for task, row in asked
        if (reason := _unreadable(task, row))
    ]
    if not faults:
        return ()
    more = f"\nand {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return (
        Finding(
            level="error", problem="\n".join(faults[:_SHOWN]) + more, remedy="mend these rows, or evaluate another task"
        ),
    )


def _unreadable(task: Task, row: Row) -> str | None:
    try:
        task.require(row)
    except NoResult as reason:
        return str(reason)
    return None


def require_data(findings: tuple[Finding, ...]) -> None:
    """Data that a run cannot stand on is the user's to mend."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise DataError(
            "\n".join(f.problem for f in errors), "\n".join(dict.fromkeys(f.remedy for f in errors if f.remedy))
        )


def require_sound(findings: tuple[Finding, ...]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise FindingError("\n".join(f.problem for f in errors), "\n".join(dict.fromkeys(f.remedy for f in errors)))
