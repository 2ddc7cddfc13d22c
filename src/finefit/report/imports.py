"""What became of every key of another tool's config, and what each tool would train on."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from finefit.drafts.from_config import Compared, Imported
from finefit.importers.translate import Line
from finefit.report.layout import hanging, print_lines, table, visible
from finefit.spec.load import inline

_MAX_VALUE = 60
_MAX_INDENT = 40


def show_import(found: Imported, console: Console, *, written: str) -> None:
    lost = found.translation.of("not carried over")
    console.print(f"{found.translation.config.where} is a config of {found.translation.tool.name}\n", soft_wrap=True)
    for title, chosen in (
        ("translated", [line for line in found.translation.of("translated") if not line.is_default]),
        (
            f"{found.translation.tool.name}'s defaults",
            [line for line in found.translation.of("translated") if line.is_default],
        ),
        ("not carried over, and it changes what is trained", [line for line in lost if line.outcome.matters]),
        ("not carried over, without effect on what is trained", [line for line in lost if not line.outcome.matters]),
    ):
        _show(title, chosen, console)
    equal = [line.key for line in found.translation.of("equal") if not line.is_default]
    if equal:
        console.print(f"the same in both ({len(equal)})", style="bold")
        print_lines(console, hanging(console, Text("  "), Text(", ".join(equal)), indent=2, width=console.width))
        console.print()
    if found.compared is not None:
        print_lines(console, _compared(found.compared, found.translation.tool.name, console))
    else:
        console.print(f"what each would train on is not compared: {found.not_compared}\n", soft_wrap=True)
    console.print(f"wrote {written}\nnext  finefit plan {written}", soft_wrap=True)


def _show(title: str, lines: Sequence[Line], console: Console) -> None:
    if not lines:
        return
    indent = min(_MAX_INDENT, console.width // 3)
    console.print(f"{title} ({len(lines)})", style="bold")
    for line in lines:
        settings = ", ".join(f"{place}: {_shown(value)}" for place, value in line.outcome.settings.items())
        words = Text(visible("; ".join(filter(None, [f"-> {settings}" if settings else "", line.outcome.note]))))
        lead = Text(f"  {visible(line.key)}: {_shown(line.value)}")
        if len(lead) >= indent:
            console.print(lead)
            lead = Text()
        print_lines(console, hanging(console, lead, words, indent=indent, width=console.width))
    console.print()


def _shown(value: object) -> str:
    words = inline(value)
    return words if len(words) <= _MAX_VALUE else f"{words[:_MAX_VALUE]}..."


def _compared(found: Compared, tool: str, console: Console) -> Iterator[Text]:
    def cells(name: str, theirs: object, ours: object) -> dict[str, Text]:
        note = "" if theirs == ours else "differs"
        return {"": Text(name), tool: Text(str(theirs)), "finefit": Text(str(ours)), " ": Text(note)}

    rows = [
        cells(name, f"{their:,}", f"{our:,}")
        for name, their, our in (
            ("rows", found.theirs.rows, found.ours.rows),
            ("tokens", found.theirs.tokens, found.ours.tokens),
            ("supervised tokens", found.theirs.supervised, found.ours.supervised),
            ("rows per step", round(found.theirs.rows_per_step, 1), round(found.ours.rows_per_step, 1)),
            ("steps", found.theirs.steps, found.ours.steps),
        )
    ]
    yield from table(console, rows, right=(tool, "finefit"), below=())
    yield Text()
