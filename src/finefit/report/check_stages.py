"""What speaks against a pipeline, stage by stage, and what was proved of each."""

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from rich.console import Console

from finefit.artifacts.forecasts import GradientMap
from finefit.artifacts.records import Finding
from finefit.artifacts.trainings import Efficiency
from finefit.report.check import proved_lines, show_finding
from finefit.report.ledger import ledger_document, show_ledger
from finefit.report.units import gib

if TYPE_CHECKING:  # whose rooms bring torch
    from finefit.pipeline.examined import Examined, ExaminedStage


def show_stage(name: str, stage: "ExaminedStage", console: Console) -> None:
    console.print(f"{name} ({stage.kind})", style="bold")
    if stage.prepared is not None:
        show_ledger(stage.prepared.record, console)
    if stage.forecast is not None:
        for line in proved_lines(stage.forecast, stage.efficiency):
            console.print(line, soft_wrap=True)


def show_findings(found: "Examined", console: Console) -> None:
    console.print(
        f"disk        at most {gib(found.disk_bytes)} for all stages, {gib(found.free_disk_bytes)} are free",
        soft_wrap=True,
    )
    for name, finding in found.findings:
        show_finding(finding, console, of=name)
    if not any(finding.level == "error" for _, finding in found.findings):
        console.print("nothing speaks against this pipeline")


def check_document(found: "Examined") -> dict[str, Any]:
    return {
        "ok": all(finding.level != "error" for _, finding in found.findings),
        "findings": [
            {"stage": name} | TypeAdapter(Finding).dump_python(finding, mode="json") for name, finding in found.findings
        ],
        "stages": {name: _stage_object(stage) for name, stage in found.stages.items()},
        "disk_bytes": found.disk_bytes,
        "free_disk_bytes": found.free_disk_bytes,
    }


def _stage_object(stage: "ExaminedStage") -> dict[str, Any]:
    """Of a training what the check of a spec without stages says."""
    forecast = stage.forecast
    if forecast is None:
        return {"kind": stage.kind}
    return {
        "kind": stage.kind,
        "ledger": ledger_document(stage.prepared.record) if stage.prepared else None,
        "layout": TypeAdapter(Efficiency).dump_python(stage.efficiency) if stage.efficiency else None,
        "gradients": TypeAdapter(GradientMap).dump_python(forecast.gradients, mode="json"),
        "fits": forecast.fits,
        "peak_bytes": forecast.peak_bytes,
        "budget_bytes": forecast.budget_bytes,
    }
