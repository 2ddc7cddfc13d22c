"""What `finefit init` recognised in a data file, and which models fit the card."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from finefit.drafts.data_file import DataFile
from finefit.drafts.from_data import Choices, Proposal
from finefit.report.layout import GUTTER, duration, plural, visible


def show_data(found: DataFile, console: Console) -> None:
    mapping = ", ".join(f"{use} = {column}" for use, column in found.mapping.items())
    rows = plural(found.rows, "row") + ("" if found.is_whole else " at the beginning, of more")
    lines = [("data", f"{found.path}"), ("", f"read as {found.shape}: {mapping}"), ("", rows)]
    if found.num_bad:
        lines.append(("bad rows", f"{found.num_bad:,} cannot be used and are dropped; the first: {found.bad[0]}"))
    half, longest = found.tokens(0.5), found.tokens(1.0)
    lines.append(("lengths", f"about {half:,} tokens at the median, {longest:,} at most (from letters)"))
    if found.where:
        lines.append(("verdicts", f"only good answers are trained on: where {found.where}"))
    if found.repeated:
        lines.append(("repeated", f"{plural(found.repeated, 'row')} with the prompt of another row"))
    if found.test:
        shared = f", {found.shared_with_test:,} of whose prompts are in training too" if found.shared_with_test else ""
        lines.append(("test", f"{found.test}{shared}"))
    else:
        lines.append(("test", "no file of test rows beside it: answers are not scored until data.test names one"))
    lines.append(("task", f"{found.task}: {found.why}"))
    for label, text in lines:
        console.print(f"{label:<{GUTTER}}{visible(text)}", soft_wrap=True)


def show_proposals(proposals: Sequence[Proposal], card: str, console: Console) -> None:
    for proposal in proposals:
        hours = "" if proposal.hours is None else f", {duration(proposal.hours * 3600)}"
        verdict = f"fits {card}{hours}" if proposal.fits else f"does not fit {card}"
        console.print(
            f"{'model':<{GUTTER}}{proposal.size.id}: {proposal.gib_needed:.1f} GiB, {verdict}", soft_wrap=True
        )


def draft_document(
    found: DataFile, chosen: Choices, proposals: Sequence[Proposal], written: str, questions: int
) -> dict[str, Any]:
    data = {key: value for key, value in asdict(found).items() if key != "letters"}
    return {
        "written": written,
        "questions": questions,
        "data": data | {"median_tokens": found.tokens(0.5), "longest_tokens": found.tokens(1.0)},
        "chosen": asdict(chosen),
        "proposals": [
            {"model": one.size.id, "fits": one.fits, "hours": one.hours, "gib": one.gib_needed} for one in proposals
        ],
    }
