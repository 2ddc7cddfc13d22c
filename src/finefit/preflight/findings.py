"""Findings of several checks as one list."""

from collections.abc import Iterable

from finefit.artifacts.records import Finding

LEVELS = ("error", "warning", "note")
"""Gravest first."""


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes."""
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))
