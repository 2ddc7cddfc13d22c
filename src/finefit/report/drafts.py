"""What `finefit init` recognised in a data file, and which models fit the card."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from finefit.drafts.data_file import InspectedData
from finefit.drafts.from_data import Choices, Proposal
from finefit.report.layout import GUTTER, duration, hanging, plural, print_lines, visible
from finefit.report.plan import RunPlan, plan_document


def show_data(found: InspectedData, console: Console) -> None:
    mapping = ", ".join(f"{use} = {column}" for use, column in found.mapping.items())
    rows = plural(found.rows, "row") + ("" if found.is_whole else " at the beginning, of more")
    lines = [("data", found.path), ("", f"read as {found.shape}: {mapping}"), ("", rows)]
    if found.fields.text == "document":
        units = '--fields "{text: paragraph}" and "{text: line}" make a row of each'
        lines.append(("", f"each text file is one text that goes on from row to row; {units}"))
    if found.num_bad:
        lines.append(("bad rows", f"{found.num_bad:,} cannot be used and are dropped; the first: {found.bad[0]}"))
    half, longest = found.tokens(0.5), found.tokens(1.0)
    images = f", without up to {plural(found.num_images, 'image')} a row" if found.num_images else ""
    lines.append(("lengths", f"about {half:,} tokens at the median, {longest:,} at most, by their bytes{images}"))
    if found.where:
        lines.append(("verdicts", f"only good answers are trained on: where {found.where}"))
    if found.repeated:
        lines.append(("repeated", f"{plural(found.repeated, 'row')} with the prompt of another row"))
    if found.validation:
        lines.append(("validation", found.validation))
    if found.test:
        lines.append(("test", f"{found.test}, {plural(found.test_rows, 'row')}"))
    else:
        lines.append(("test", "no test rows beside it: answers are not scored until data.test names some"))
    if found.shared:
        held = "of its prompts is" if found.shared == 1 else "of these prompts are"
        lines.append(("overlap", f"{found.shared:,} {held} in training too, and removed there"))
    lines.append(("task", f"{found.task}: {found.why}"))
    _show(lines, console)


def show_proposals(proposals: Sequence[Proposal], card: str, console: Console) -> None:
    for proposal in proposals:
        hours = "" if proposal.hours is None else f", {duration(proposal.hours * 3600)}"
        verdict = f"fits {card}{hours}" if proposal.fits else f"does not fit {card}"
        _show([("model", f"{proposal.size.id}: {proposal.gib_needed:.1f} GiB, {verdict}")], console)


def _show(lines: Sequence[tuple[str, str]], console: Console) -> None:
    for label, text in lines:
        lead = Text(f"{label:<{GUTTER}}", style="cyan")
        print_lines(console, hanging(console, lead, Text(visible(text)), indent=GUTTER, width=console.width))


def draft_document(
    found: InspectedData, chosen: Choices, proposals: Sequence[Proposal], *, written: str, plan: RunPlan | None
) -> dict[str, Any]:
    """`plan`: None if the model's files and shape are not known here."""
    data = {key: value for key, value in asdict(found).items() if key not in ("bytes", "fields")}
    data["fields"] = found.fields.model_dump(exclude_none=True)
    return {
        "written": written,
        "data": data | {"median_tokens": found.tokens(0.5), "longest_tokens": found.tokens(1.0)},
        "chosen": asdict(chosen),
        "proposals": [
            {"model": one.size.id, "fits": one.fits, "hours": one.hours, "gib": one.gib_needed} for one in proposals
        ],
        "fits": None if plan is None else plan.fits(),
        "plan": None if plan is None else plan_document(plan),
    }
