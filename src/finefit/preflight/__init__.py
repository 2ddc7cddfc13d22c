"""Checks before a run: one function per check, yielding findings."""

from collections.abc import Iterable

from finefit.artifacts.records import Finding
from finefit.errors import FinefitError

LEVELS = ("error", "warning", "note")
StageFinding = tuple[str | None, Finding]
"""A finding with the name of its stage; None if it is about the whole run."""


def error(problem: str, remedy: str) -> Finding:
    return Finding(level="error", problem=problem, remedy=remedy)


def warning(problem: str, remedy: str) -> Finding:
    return Finding(level="warning", problem=problem, remedy=remedy)


def note(problem: str, remedy: str = "") -> Finding:
    return Finding(level="note", problem=problem, remedy=remedy)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sorts errors first, then warnings, then notes."""
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def require_no_errors(findings: Iterable[StageFinding], kind: type[FinefitError]) -> None:
    """Raises all errors among the findings as one."""
    errors = [(name, finding) for name, finding in findings if finding.level == "error"]
    if errors:
        problems = (finding.problem if name is None else f"stage {name}: {finding.problem}" for name, finding in errors)
        remedies = dict.fromkeys(finding.remedy for _, finding in errors if finding.remedy)
        raise kind("\n".join(problems), "\n".join(remedies))
