"""Rows as `data.task` makes them, for whoever reads rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from finefit.data.items import as_item, text_key
from finefit.data.rows import BadRow, Row
from finefit.data.tasks import NoResult, make_build
from finefit.spec.tasks import Form


def builder(form: Form | None, *, base: Path) -> Callable[[Row], Row | BadRow] | None:
    """For a reading of rows that `form` makes prompt and answer of."""
    return None if form is None else partial(_built, make_build(form, base=base))


def _built(build: Callable[[Row], Row], row: Row) -> Row | BadRow:
    """It stays the same item as before, whatever it is built into."""
    try:
        return replace(build(row), key=text_key(as_item(row)))
    except NoResult as reason:
        return BadRow(row.source, row.number, str(reason), row.part)
