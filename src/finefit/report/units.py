"""Numbers as people read them; GiB appear here and nowhere below."""

import math
from collections.abc import Sequence


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """In words, with two units at most: 43 ms, 0.43 s, 8 min 37 s, 3 h 12 min, 2 d 4 h."""
    if seconds < 59.95:
        return (
            f"{seconds * 1000:.0f} ms"
            if seconds < 0.0995
            else f"{seconds:.2f} s"
            if seconds < 9.995
            else f"{seconds:.1f} s"
        )
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def finite(value: float) -> float | None:
    """For a JSON document, which knows no infinity."""
    return value if math.isfinite(value) else None


def apportion(weights: Sequence[int], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that sum to `total`, so that rounded figures still add up: the largest remainders are rounded up."""
    whole = max(sum(weights), 1)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda at: total * weights[at] % whole, reverse=True)
    for at in by_remainder[: total - sum(shares)]:
        shares[at] += 1
    return shares
