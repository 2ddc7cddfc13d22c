"""What became of every key of another tool's config, and what each tool would train on."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from finefit.drafts.from_config import ComparedCounts, Imported
from finefit.importers.translate import Line, grouped
from finefit.report.layout import hanging, print_lines, table, visible
from finefit.spec.load import inline

_MAX_SETTING = 160
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
    for group in grouped(lines):
        outcome = group[0].outcome
        settings = ", ".join(f"{place}: {_shown(value, _MAX_SETTING)}" for place, value in outcome.settings.items())
        words = Text(visible("; ".join(filter(None, [f"-> {settings}" if settings else "", outcome.note]))))
        *first, lead = [_key(line, console.width) for line in group]
        for above in first:
            console.print(above)
        if len(lead) >= indent:
            console.print(lead)
            lead = Text()
        print_lines(console, hanging(console, lead, words, indent=indent, width=console.width))
    console.print()


def _key(line: Line, width: int) -> Text:
    if line.is_default and line.outcome.fate == "not carried over":
        return Text(f"  {visible(line.key)} (not given)")
    lead = f"  {visible(line.key)}: "
    return Text(lead + _shown(line.value, max(20, width - len(lead))))


def _shown(value: object, most: int) -> str:
    words = inline(value)
    return words if len(words) <= most else f"{words[: most - 3]}..."


def _compared(found: ComparedCounts, tool: str, console: Console) -> Iterator[Text]:
    rows = [
        {
            "": Text(name),
            tool: Text(f"{theirs:,}"),
            "finefit": Text(f"{ours:,}"),
            " ": Text("" if theirs == ours else "differs"),
        }
        for name, (theirs, ours) in found.lines().items()
    ]
    yield from table(console, rows, right=(tool, "finefit"), below=())
    yield Text()
