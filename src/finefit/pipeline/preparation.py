"""Before a run: what it will take on the device that it gets, and whether anything speaks against it. No weight has been loaded yet."""

from pathlib import Path

from finefit.artifacts.records import Finding, Forecast, Lengths
from finefit.errors import FindingError, SpecError
from finefit.facts.cards import parse_card
from finefit.facts.files import free_bytes
from finefit.facts.machine import Machine
from finefit.pipeline.forecasting import forecast
from finefit.plan.resolve import device_of
from finefit.preflight.run import Preparation, examine
from finefit.spec.schema import Spec


def foresee(spec: Spec, base: Path, lengths: Lengths | None, machine: Machine) -> Forecast:
    """On the device that a run would get here; of a card that the spec names only the size counts, as the most that may be used."""
    asked = parse_card(spec.card)
    if asked.count > 1:
        raise SpecError(f"card: {spec.card} means several cards, and a run takes one", "plan for several with `finefit plan`, run with card: auto")
    device = device_of(spec, machine)
    budget = asked.memory_bytes if device == "cuda" else None
    if asked.kind is not None and device == "cuda":
        budget = asked.kind.memory_bytes
    (found,) = forecast(spec, base, ("cpu" if device == "cpu" else "auto",), lengths=lengths, budget_bytes=budget)
    return found


def findings_of(spec: Spec, foretold: Forecast, machine: Machine, base: Path, runs: Path, total_steps: int | None) -> tuple[Finding, ...]:
    sources = [*spec.data.train, *(source for source in (spec.data.validation, spec.data.test) if source)]
    return examine(
        Preparation(
            spec=spec,
            forecast=foretold,
            total_steps=total_steps,
            free_disk_bytes=free_bytes(runs),
            host_memory_bytes=machine.memory_bytes,
            missing_files=tuple(source.path for source in sources if not (base / source.path).is_file()),
            has_bitsandbytes=machine.versions.get("bitsandbytes") is not None,
        )
    )


def require_sound(findings: tuple[Finding, ...]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise FindingError("\n".join(f.problem for f in errors), "\n".join(dict.fromkeys(f.remedy for f in errors)))
