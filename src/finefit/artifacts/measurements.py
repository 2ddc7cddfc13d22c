"""What forecasts said and what was then measured, kept for each card and its versions: the plan's own uncertainty."""

from dataclasses import dataclass
from importlib.metadata import version

from finefit.artifacts.journal import Journal, read_lines
from finefit.facts.files import finefit_cache

WORTH_A_WARNING = 0.03
_PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    card: str
    foretold_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative; above zero where more was foretold than measured."""
        return self.foretold_bytes / self.measured_bytes - 1


def keep_measurement(found: Measurement) -> None:
    place = finefit_cache() / "measurements.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    with Journal(place) as journal:
        journal.write(
            card=found.card,
            foretold_bytes=found.foretold_bytes,
            measured_bytes=found.measured_bytes,
            versions=_versions(),
        )


def uncertainty(card: str) -> float | None:
    """The largest relative error of this card's forecasts with the installed versions; None where none was measured."""
    place = finefit_cache() / "measurements.jsonl"
    if not place.exists():
        return None
    lines = [line for line in read_lines(place) if line.get("card") == card and line.get("versions") == _versions()]
    return max((abs(line["foretold_bytes"] / line["measured_bytes"] - 1) for line in lines), default=None)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
