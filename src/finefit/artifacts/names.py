"""Names of tensors and modules, many of which differ only in a layer's number."""

from collections.abc import Iterable


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ only in numbers become one: `layers.{0..11}.q_proj`."""
    split = list(dict.fromkeys(tuple(name.split(".")) for name in names))
    for at in range(max(map(len, split), default=0)):
        split = _merged(split, at)
    return [".".join(parts) for parts in split]


def _merged(split: list[tuple[str, ...]], at: int) -> list[tuple[str, ...]]:
    """Those that differ only in the number at one place."""
    numbers: dict[tuple[str, ...], list[int]] = {}
    for parts in split:
        if at < len(parts) and parts[at].isdecimal():
            numbers.setdefault((*parts[:at], "{}", *parts[at + 1 :]), []).append(int(parts[at]))
        else:
            numbers[parts] = []
    return [(*parts[:at], _span(found), *parts[at + 1 :]) if found else parts for parts, found in numbers.items()]


def _span(numbers: list[int]) -> str:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    shown = ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return f"{{{shown}}}" if len(numbers) > 1 else shown
