"""Before a run: what it will take on the device that it gets, and whether anything speaks against it. No weight has been loaded yet."""

from pathlib import Path

from finefit.artifacts.records import Finding, Forecast, Lengths
from finefit.errors import FindingError
from finefit.facts.files import free_bytes
from finefit.facts.machine import Machine
from finefit.pipeline.forecasting import forecast
from finefit.plan.resolve import device_of
from finefit.preflight.run import Preparation, examine
from finefit.spec.schema import Spec


def foresee(spec: Spec, base: Path, lengths: Lengths | None, machine: Machine) -> Forecast:
    """On the device that a run would get here; a card that the spec names is its budget."""
    device = device_of(spec, machine)
    card = "cpu" if device == "cpu" else spec.card
    (found,) = forecast(spec, base, (card,), lengths=lengths)
    return found


def findings_of(spec: Spec, foretold: Forecast, machine: Machine, runs: Path, total_steps: int | None) -> tuple[Finding, ...]:
    return examine(
        Preparation(
            spec=spec,
            forecast=foretold,
            total_steps=total_steps,
            free_disk_bytes=free_bytes(runs),
            host_memory_bytes=machine.memory_bytes,
        )
    )


def require_sound(findings: tuple[Finding, ...]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise FindingError("\n".join(f.problem for f in errors), "\n".join(dict.fromkeys(f.remedy for f in errors)))
