"""The problems that a check found, and what it proved."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import Forecast, GradientMap, TowerSize
from finefit.artifacts.records import Finding
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Efficiency, Preparation, SourceLedger
from finefit.report.forecast import tower_lines
from finefit.report.layout import GUTTER, gib, plural

if TYPE_CHECKING:
    from finefit.run.check_stages import CheckedPipeline, CheckedStage


_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_SUPERVISED = "bold green"


def show_stage(name: str, stage: "CheckedStage", console: Console, *, is_flat: bool) -> None:
    if not is_flat:
        console.print(f"{name} ({stage.kind})", style="bold")
    if stage.prepared is not None:
        show_ledger(stage.prepared.record, console)
    if stage.forecast is not None:
        for line in proved_lines(stage.forecast, stage.efficiency):
            console.print(line, soft_wrap=True)


def show_findings(found: "CheckedPipeline", console: Console) -> None:
    disk = f"at most {gib(found.disk_bytes)} for the run, {gib(found.free_disk_bytes)} are free"
    console.print(f"disk        {disk}", soft_wrap=True)
    for name, finding in found.findings:
        stage = "" if name is None or found.is_flat else f"stage {name}: "
        console.print(f"{finding.level}: {stage}{finding.problem}", style=_STYLES[finding.level], soft_wrap=True)
        if finding.remedy:
            console.print(f"  {finding.remedy}", soft_wrap=True)
    if not found.has_errors:
        console.print("no problem was found that stops this run")


def proved_lines(forecast: Forecast, efficiency: Efficiency | None) -> list[str]:
    gradients, lengths = forecast.gradients, forecast.lengths
    lines = []
    if forecast.fits:
        lines.append(f"memory      {gib(forecast.peak_bytes)} of {gib(forecast.budget_bytes)} on {forecast.card}")
    if not gradients.unreached:
        lines.append(f"gradients   all {gradients.trainable:,} trained tensors get one")
    lines += [f"towers      {line}" for line in tower_lines(forecast.towers)]
    lines.append(f"rows        longest {lengths.longest:,} tokens ({lengths.source})")
    if efficiency is not None:
        grouped = f"{efficiency.grouped:.0%} if padded and grouped by length"
        padded = grouped if forecast.levers.packing else "padded, grouped by length"
        own = f"{efficiency.own:.0%} of the tokens computed are rows' own"
        compared = f"({padded}; {efficiency.in_order:.0%} if padded in the order of the rows)"
        lines.append(f"layout      {efficiency.batches_per_step:.1f} micro-batches a step; {own} {compared}")
    return lines


def show_example(title: str, pieces: Sequence[tuple[str, bool]], console: Console) -> None:
    """As the model sees it; supervised text is coloured, or between brackets where there are no colours."""
    console.print(title, style="bold")
    marks = ("", "") if console.color_system else ("⟦", "⟧")
    text = Text()
    for piece, supervised in pieces:
        text.append(f"{marks[0]}{piece}{marks[1]}" if supervised else piece, _SUPERVISED if supervised else "dim")
    console.print(text, soft_wrap=True)
    console.print()


def check_document(found: "CheckedPipeline") -> dict[str, Any]:
    """What `--json` prints. A flat spec has the keys of its one stage at the top, too."""
    finding_type = TypeAdapter(Finding)
    stages = {name: _stage_object(stage) for name, stage in found.stages.items()}
    findings = [{"stage": name} | finding_type.dump_python(finding, mode="json") for name, finding in found.findings]
    return (next(iter(stages.values())) if found.is_flat else {}) | {
        "ok": not found.has_errors,
        "findings": findings,
        "stages": stages,
        "disk_bytes": found.disk_bytes,
        "free_disk_bytes": found.free_disk_bytes,
    }


def _stage_object(stage: "CheckedStage") -> dict[str, Any]:
    forecast = stage.forecast
    if forecast is None:
        return {"kind": stage.kind}
    return {
        "kind": stage.kind,
        "ledger": ledger_document(stage.prepared.record) if stage.prepared else None,
        "layout": TypeAdapter(Efficiency).dump_python(stage.efficiency) if stage.efficiency else None,
        "gradients": TypeAdapter(GradientMap).dump_python(forecast.gradients, mode="json"),
        "towers": TypeAdapter(dict[str, TowerSize]).dump_python(forecast.towers, mode="json"),
        "fits": forecast.fits,
        "peak_bytes": forecast.peak_bytes,
        "budget_bytes": forecast.budget_bytes,
    }


_SOURCE = TypeAdapter(SourceLedger)


def show_ledger(found: Preparation, console: Console) -> None:
    for source in found.sources:
        console.print(f"{source.split:<{GUTTER}}{source.source}", soft_wrap=True)
        mapping = ", ".join(f"{use} = {column}" for use, column in source.mapping.items())
        for line in (f"read as {source.shape}: {mapping}", "; ".join(_counts(source)), _tokens(source)):
            console.print(" " * GUTTER + line, soft_wrap=True)


def ledger_lines(where: StageDir) -> list[str]:
    """One line per source of a run."""
    entries = [_SOURCE.validate_python(entry) for entry in read_lines(where.ledger) if "read" in entry]
    return [f"{entry.split} {entry.source}: {'; '.join((*_counts(entry), _tokens(entry)))}" for entry in entries]


def _counts(source: SourceLedger) -> Iterator[str]:
    if source.records:
        yield plural(source.records, "record")
    if source.read != source.records:
        yield plural(source.read, "row")
    yield f"{source.used:,} used" + (
        f" ({source.cut:,} cut, {source.cut_tokens:,} tokens of their prompts lost)" if source.cut else ""
    )
    if source.dropped:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in source.dropped.items())
        yield f"{sum(source.dropped.values()):,} dropped ({reasons})"
    if source.examples and source.examples != source.used:
        yield f"{source.examples:,} sequences"
    if source.repeated:
        yield f"{source.repeated:,} repeated by weight"
    if source.images:
        yield plural(source.images, "image")


def _tokens(source: SourceLedger) -> str:
    if source.split == "test":
        return f"{source.tokens:,} tokens of prompts"
    share = source.supervised_tokens / source.tokens if source.tokens else 0
    return f"{source.tokens:,} tokens, {source.supervised_tokens:,} supervised ({share:.0%})"


def ledger_document(found: Preparation) -> dict[str, Any]:
    sources = TypeAdapter(list[SourceLedger]).dump_python(list(found.sources), mode="json")
    return {**_totals(found.sources), "sources": sources}


def _totals(sources: Sequence[SourceLedger]) -> dict[str, Any]:
    rows = ("records", "read", "used", "cut", "cut_tokens", "examples", "repeated")
    names = (*rows, "tokens", "supervised_tokens", "images")
    dropped: Counter[str] = Counter()
    for source in sources:
        dropped.update(source.dropped)
    return {name: sum(getattr(source, name) for source in sources) for name in names} | {"dropped": dict(dropped)}
