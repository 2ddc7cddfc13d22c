"""The problems and proofs that were found for a spec (`finefit check`) and for a machine (`finefit doctor`)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.forecasts import GradientMap, TowerSize
from finefit.artifacts.records import Finding
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Efficiency, Preparation, SourceLedger
from finefit.preflight.machine import MachineFacts, is_ready
from finefit.report.forecast import tower_lines
from finefit.report.layout import GUTTER, gib, plural

if TYPE_CHECKING:
    from finefit.run.check_stages import CheckedPipeline, CheckedStage

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_MACHINE_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_SUPERVISED = "bold green"


def show_stage(name: str, stage: "CheckedStage", console: Console, *, is_flat: bool) -> None:
    if not is_flat:
        console.print(f"{name} ({stage.kind})", style="bold")
    if stage.prepared is not None:
        show_ledger(stage.prepared.record, console)
    if (forecast := stage.forecast) is None:
        return
    lines = []
    if forecast.fits:
        lines.append(f"memory      {gib(forecast.peak_bytes)} of {gib(forecast.budget_bytes)} on {forecast.card}")
    if not forecast.gradients.unreached:
        lines.append(f"gradients   all {forecast.gradients.trainable:,} trained tensors get a gradient")
    lines += [f"towers      {line}" for line in tower_lines(forecast.towers)]
    lines.append(f"rows        longest {forecast.lengths.longest:,} tokens ({forecast.lengths.source})")
    if (efficiency := stage.efficiency) is not None:
        grouped = f"{efficiency.grouped:.0%} if padded and grouped by length"
        padded = grouped if forecast.levers.packing else "padded, grouped by length"
        own = f"{efficiency.own:.0%} of the computed tokens belong to rows"
        compared = f"({padded}; {efficiency.in_order:.0%} if padded in the order of the rows)"
        lines.append(f"layout      {efficiency.batches_per_step:.1f} micro-batches a step; {own} {compared}")
    for line in lines:
        console.print(line, soft_wrap=True)


def show_check(found: "CheckedPipeline", console: Console) -> None:
    for name, stage in found.stages.items():
        show_stage(name, stage, console, is_flat=found.is_flat)
    show_findings(found, console)


def show_findings(found: "CheckedPipeline", console: Console) -> None:
    disk = f"at most {gib(found.disk_bytes)} for the run, {gib(found.free_disk_bytes)} are free"
    console.print(f"disk        {disk}", soft_wrap=True)
    for name, finding in found.findings:
        stage = "" if name is None or found.is_flat else f"stage {name}: "
        console.print(f"{finding.level}: {stage}{finding.problem}", style=_STYLES[finding.level], soft_wrap=True)
        if finding.remedy:
            console.print(f"  {finding.remedy}", soft_wrap=True)
    if not found.has_errors:
        console.print("no problems found that would stop this run")


def show_example(title: str, pieces: Sequence[tuple[str, bool]], console: Console) -> None:
    """The example as the model sees it; supervised text is coloured, or in brackets if the console has no colours."""
    console.print(title, style="bold")
    marks = ("", "") if console.color_system else ("⟦", "⟧")
    text = Text()
    for piece, supervised in pieces:
        text.append(f"{marks[0]}{piece}{marks[1]}" if supervised else piece, _SUPERVISED if supervised else "dim")
    console.print(text, soft_wrap=True)
    console.print()


def check_document(found: "CheckedPipeline") -> dict[str, Any]:
    """The output of `--json`. A flat spec also has the keys of its one stage at the top."""
    finding_type = TypeAdapter(Finding)
    stages: dict[str, dict[str, Any]] = {}
    for name, stage in found.stages.items():
        stages[name] = {"kind": stage.kind}
        if stage.spec is not None:
            stages[name]["ledger"] = ledger_document(stage.prepared.record) if stage.prepared else None
        if (forecast := stage.forecast) is not None:
            stages[name] |= {
                "layout": TypeAdapter(Efficiency).dump_python(stage.efficiency) if stage.efficiency else None,
                "gradients": TypeAdapter(GradientMap).dump_python(forecast.gradients, mode="json"),
                "towers": TypeAdapter(dict[str, TowerSize]).dump_python(forecast.towers, mode="json"),
                "fits": forecast.fits,
                "peak_bytes": forecast.peak_bytes,
                "budget_bytes": forecast.budget_bytes,
            }
    findings = [{"stage": name} | finding_type.dump_python(finding, mode="json") for name, finding in found.findings]
    return (next(iter(stages.values())) if found.is_flat else {}) | {
        "ok": not found.has_errors,
        "findings": findings,
        "stages": stages,
        "disk_bytes": found.disk_bytes,
        "free_disk_bytes": found.free_disk_bytes,
    }


def show_ledger(found: Preparation, console: Console) -> None:
    for source in found.sources:
        console.print(f"{source.split:<{GUTTER}}{source.source}", soft_wrap=True)
        mapping = ", ".join(f"{use} = {column}" for use, column in source.mapping.items())
        for line in (f"read as {source.shape}: {mapping}", "; ".join(_counts(source)), _tokens(source)):
            console.print(" " * GUTTER + line, soft_wrap=True)


def ledger_lines(where: StageDir) -> list[str]:
    """One line per source of a run."""
    entries = read_lines(where.ledger, SourceLedger, where=lambda entry: "read" in entry)
    return [f"{entry.split} {entry.source}: {'; '.join((*_counts(entry), _tokens(entry)))}" for entry in entries]


def _counts(source: SourceLedger) -> Iterator[str]:
    if source.records:
        yield plural(source.records, "record")
    if source.read != source.records:
        yield plural(source.read, "row")
    cut = f" ({source.cut:,} cut, {source.cut_tokens:,} tokens of their prompts lost)" if source.cut else ""
    yield f"{source.used:,} used{cut}"
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
    """The sums of all sources, and each source."""
    rows = ("records", "read", "used", "cut", "cut_tokens", "examples", "repeated")
    names = (*rows, "tokens", "supervised_tokens", "images")
    dropped: Counter[str] = Counter()
    for source in found.sources:
        dropped.update(source.dropped)
    totals = {name: sum(getattr(source, name) for source in found.sources) for name in names}
    sources = TypeAdapter(list[SourceLedger]).dump_python(list(found.sources), mode="json")
    return {**totals, "dropped": dict(dropped), "sources": sources}


def machine_verdict(found: MachineFacts, findings: tuple[Finding, ...]) -> str:
    if not is_ready(findings):
        num_errors = sum(finding.level == "error" for finding in findings)
        return f"not ready to train: fix the {'error' if num_errors == 1 else f'{num_errors} errors'} above first"
    cuda = [device for device in found.torch.devices if device.name.startswith("cuda")]
    if not cuda:
        return "ready to train on cpu"
    precision = "bf16" if cuda[0].has_bf16 else "fp32: this card has no bf16"
    return f"ready to train on {cuda[0].name} ({cuda[0].description}, {_gib(cuda[0].memory_bytes)}, {precision})"


def machine_document(found: MachineFacts, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The output of `--json`."""
    return {
        "machine": asdict(found.machine),
        "devices": [asdict(device) for device in found.torch.devices],
        "disks": [asdict(disk) for disk in found.disks],
        "power": asdict(found.power),
        "host_factor": found.host_factor,
        "findings": [asdict(finding) for finding in findings],
        "ready": is_ready(findings),
    }


def show_machine(found: MachineFacts, findings: tuple[Finding, ...], console: Console) -> None:
    """Plain text instead of markup, because commands contain brackets, and not wrapped, because they are copied."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _machine_rows(found):
        table.add_row(name, Text(value))
    for name, version in found.machine.versions.items():
        table.add_row(name, Text(version or "not installed", style="" if version else "yellow"))
    console.print(table)
    for finding in findings:
        level = f"{finding.level}: ", _MACHINE_STYLES[finding.level]
        console.print(Text.assemble(level, finding.problem, f"\n    {finding.remedy}"), soft_wrap=True)
    style = "bold green" if is_ready(findings) else "bold red"
    console.print(Text(machine_verdict(found, findings), style=style), soft_wrap=True)


def _machine_rows(found: MachineFacts) -> Iterator[tuple[str, str]]:
    machine, power = found.machine, found.power
    yield "python", machine.python
    yield "platform", machine.platform
    yield "processor", f"{machine.cpu_model}, {machine.num_cores} cores"
    yield "memory", _gib(machine.memory_bytes)
    if found.host_factor is not None:
        yield "dispatch", f"{found.host_factor:.2f} x the time of the reference host for small operations"
    for disk in found.disks:
        yield disk.use, f"{_gib(disk.free_bytes)} free in {disk.path}"
    source = {True: "battery", False: "mains", None: "unknown"}[power.on_battery]
    yield "power", source if power.percent is None else f"{source}, battery at {power.percent:.0f} %"
    for card in machine.cards:
        yield "card", f"{card.name}, {_gib(card.memory_bytes)}, {_gib(card.free_bytes)} free, driver {card.driver}"
    for device in found.torch.devices:
        precision = {True: ", bf16", False: ", no bf16", None: ""}[device.has_bf16]
        yield f"torch {device.name}", f"{device.description}, {_gib(device.memory_bytes)}{precision}"


def _gib(num_bytes: int | None) -> str:
    return "unknown size" if num_bytes is None else gib(num_bytes)
