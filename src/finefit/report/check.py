"""What speaks against a run, and what was proved."""

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from finefit.artifacts.records import Finding, Forecast, GradientMap
from finefit.report.units import gib

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def show_check(findings: Sequence[Finding], forecast: Forecast, console: Console) -> None:
    for finding in findings:
        console.print(f"{finding.level}: {finding.problem}", style=_STYLES[finding.level], soft_wrap=True)
        console.print(f"  {finding.remedy}", soft_wrap=True)
    for line in _proved(findings, forecast):
        console.print(line, soft_wrap=True)


def _proved(findings: Sequence[Finding], forecast: Forecast) -> list[str]:
    gradients = forecast.gradients
    lines = [f"memory     {gib(forecast.peak_bytes)} of {gib(forecast.budget_bytes)} on {forecast.card}"] if forecast.fits else []
    if not gradients.unreached:
        lines.append(f"gradients  all {gradients.trainable:,} trained tensors get one")
    lines.append(f"rows       longest {forecast.lengths.longest:,} tokens ({forecast.lengths.source})")
    if not any(finding.level == "error" for finding in findings):
        lines.append("nothing speaks against this run")
    return lines


def check_document(findings: Sequence[Finding], forecast: Forecast) -> dict[str, Any]:
    return {
        "ok": all(finding.level != "error" for finding in findings),
        "findings": TypeAdapter(list[Finding]).dump_python(list(findings), mode="json"),
        "gradients": TypeAdapter(GradientMap).dump_python(forecast.gradients, mode="json"),
        "fits": forecast.fits,
        "peak_bytes": forecast.peak_bytes,
        "budget_bytes": forecast.budget_bytes,
    }
