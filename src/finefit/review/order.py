"""In which order a rater meets the sheets, and where each answer stands. Both follow from the seed, the rater and the sheet alone, so a restart
changes nothing and neither does a sheet that comes or goes."""

import hashlib
import json

from finefit.review.stack import Sheet, Stack


def _drawn(*of: str | int) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(of).encode()).digest()[:8])


def shared_first(stack: Stack, seed: int) -> list[Sheet]:
    """An order that all raters have in common: its beginning is a sample of the sheets."""
    return sorted(stack.sheets, key=lambda sheet: _drawn("shared", seed, sheet.key))


def order_of(stack: Stack, seed: int, rater: str, *, overlap: int | None = None) -> list[Sheet]:
    """Each rater's own. `overlap`: so many sheets come first for everybody."""
    shared = {sheet.key for sheet in shared_first(stack, seed)[:overlap]}
    return sorted(stack.sheets, key=lambda sheet: (sheet.key not in shared, _drawn("order", seed, rater, sheet.key)))


def sides(sheet: Sheet, seed: int, rater: str) -> tuple[int, ...]:
    """Which model stands first, and which second."""
    if len(sheet.answers) == 1:
        return (0,)
    return (0, 1) if _drawn("sides", seed, rater, sheet.key) % 2 == 0 else (1, 0)
