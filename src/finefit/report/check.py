"""What speaks against a run, and what was proved."""

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.forecasts import Forecast, GradientMap, TowerSize
from finefit.artifacts.records import Finding
from finefit.artifacts.trainings import Efficiency, Preparation
from finefit.report.ledger import ledger_document
from finefit.report.plan import tower_lines
from finefit.report.units import gib

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_SUPERVISED = "bold green"


def show_check(
    findings: Sequence[Finding], forecast: Forecast, console: Console, efficiency: Efficiency | None = None
) -> None:
    for finding in findings:
        show_finding(finding, console)
    for line in proved_lines(forecast, efficiency):
        console.print(line, soft_wrap=True)
    if not any(finding.level == "error" for finding in findings):
        console.print("nothing speaks against this run")


def show_finding(finding: Finding, console: Console, *, of: str | None = None) -> None:
    """`of`: the stage that it is about, where there are several."""
    stage = "" if of is None else f"stage {of}: "
    console.print(f"{finding.level}: {stage}{finding.problem}", style=_STYLES[finding.level], soft_wrap=True)
    if finding.remedy:
        console.print(f"  {finding.remedy}", soft_wrap=True)


def proved_lines(forecast: Forecast, efficiency: Efficiency | None) -> list[str]:
    gradients = forecast.gradients
    lines = (
        [f"memory      {gib(forecast.peak_bytes)} of {gib(forecast.budget_bytes)} on {forecast.card}"]
        if forecast.fits
        else []
    )
    if not gradients.unreached:
        lines.append(f"gradients   all {gradients.trainable:,} trained tensors get one")
    lines += [f"towers      {line}" for line in tower_lines(forecast.towers)]
    lines.append(f"rows        longest {forecast.lengths.longest:,} tokens ({forecast.lengths.source})")
    if efficiency is not None:
        lines.append(_layout(forecast, efficiency))
    return lines


def _layout(forecast: Forecast, efficiency: Efficiency) -> str:
    own = f"{efficiency.own:.0%} of the tokens computed are rows' own"
    padded = (
        f"{efficiency.grouped:.0%} if padded and grouped by length"
        if forecast.levers.packing
        else "padded, grouped by length"
    )
    return f"layout      {efficiency.batches_per_step:.1f} micro-batches a step; {own} ({padded}; {efficiency.in_order:.0%} if padded as they come)"


def show_example(title: str, pieces: Sequence[tuple[str, bool]], console: Console) -> None:
    """As the model sees it; what is supervised stands out, or between marks where there are no colours."""
    console.print(title, style="bold")
    marks = ("", "") if console.color_system else ("⟦", "⟧")
    text = Text()
    for piece, supervised in pieces:
        text.append(f"{marks[0]}{piece}{marks[1]}" if supervised else piece, _SUPERVISED if supervised else "dim")
    console.print(text, soft_wrap=True)
    console.print()


def check_document(
    findings: Sequence[Finding], forecast: Forecast, prepared: Preparation | None, efficiency: Efficiency | None
) -> dict[str, Any]:
    return {
        "ok": all(finding.level != "error" for finding in findings),
        "findings": TypeAdapter(list[Finding]).dump_python(list(findings), mode="json"),
        "ledger": ledger_document(prepared) if prepared else None,
        "layout": TypeAdapter(Efficiency).dump_python(efficiency) if efficiency else None,
        "gradients": TypeAdapter(GradientMap).dump_python(forecast.gradients, mode="json"),
        "towers": TypeAdapter(dict[str, TowerSize]).dump_python(forecast.towers, mode="json"),
        "fits": forecast.fits,
        "peak_bytes": forecast.peak_bytes,
        "budget_bytes": forecast.budget_bytes,
    }
