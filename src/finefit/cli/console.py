"""The console of a verb: text is shown as it stands, since paths and values may hold square brackets and colons."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_console(*, as_json: bool = False) -> "Console":
    """With --json only the document goes to stdout."""
    from rich.console import Console

    return Console(stderr=as_json, markup=False, emoji=False, highlight=False)
