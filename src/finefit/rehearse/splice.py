"""A rehearsal of a few layers stretched to the whole depth.

Equal layers repeat the same events. Of four of them in a row the second is written again as often as layers are missing; where a layer frees what
its neighbour made, each copy frees what *its* neighbour made. Layers whose events do not repeat are an error, never an estimate.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from finefit.rehearse.trace import LOADED, OUTSIDE, WARM_UP, Block, Cost, Trace

REHEARSED = 4
"""Periods of a run that are rehearsed: the first, two that must be equal, the last."""


_NO_UNIT = -(10**6)


class NotRegular(Exception):
    """The rehearsed layers do not repeat, so they cannot stand for others."""


@dataclass(frozen=True, slots=True)
class Run:
    """Layers in a row that are treated alike; `period` is more than one where kinds of layers alternate."""

    num_layers: int
    period: int = 1

    @property
    def missing(self) -> int:
        """Periods that need not be rehearsed."""
        return max(0, self.num_layers // self.period - REHEARSED)

    @property
    def rehearsed(self) -> int:
        return self.num_layers - self.missing * self.period


def stretch(trace: Trace, runs: Sequence[Run]) -> Trace:
    """`trace` has the `rehearsed` layers of each run, in order."""
    for at in reversed(range(len(runs))):  # from the end, so that earlier layers keep their numbers
        run = runs[at]
        if run.missing:
            start = sum(r.rehearsed for r in runs[:at]) + run.rehearsed - (REHEARSED - 1) * run.period
            trace = _repeat(trace, start, run.period, run.missing)
    return _warmed_up(trace)


def _warmed_up(trace: Trace) -> Trace:
    """The piece that loading takes first has the size of all weights."""
    total = sum(block.num_bytes for ident, block in enumerate(trace.blocks) if block.operation == LOADED and trace.category(ident) == "weights")
    trace.blocks = [replace(block, num_bytes=total) if block.operation == WARM_UP else block for block in trace.blocks]
    return trace


@dataclass(frozen=True, slots=True)
class _Visit:
    """Events in a row that work on one period of layers."""

    unit: int
    instant: str
    events: range


def _repeat(trace: Trace, start: int, period: int, missing: int) -> Trace:
    """Writes the layers [start, start + period) `missing` times more. In here a unit is a period, and the repeated one is number 1."""

    def unit_of(layer: int) -> int:
        return _NO_UNIT if layer == OUTSIDE else (layer - start) // period + 1

    visits = _visits(trace, [unit_of(layer) for layer in trace.units])
    names = _names(trace, visits)
    _require_equal(trace, names)
    copies = _Copies(trace, names, missing, period, start)
    out = Trace(blocks=copies.blocks, categories=copies.categories, host_bytes=trace.host_bytes)
    for at, visit in enumerate(visits):
        numbers: Sequence[int] = (0,)
        if visit.unit == 1:
            numbers = range(missing, -1, -1) if _goes_down(visits, at) else range(missing + 1)
        for name, event in trace.marks.items():
            if event in visit.events:
                out.marks[name] = len(out.events) + event - visit.events.start
        for number in numbers:
            copies.write(out, visit, number)
    out.costs, out.operations = _totals(trace, set(range(start, start + period)), missing + 1)
    return out


def _visits(trace: Trace, units: list[int]) -> list[_Visit]:
    found: list[_Visit] = []
    begin = 0
    for at in range(1, len(units) + 1):
        if at == len(units) or (units[at], trace.instants[at]) != (units[begin], trace.instants[begin]):
            found.append(_Visit(units[begin], trace.instants[begin], range(begin, at)))
            begin = at
    return _joined(found)


def _joined(visits: list[_Visit]) -> list[_Visit]:
    """What is done outside of any layer between two of the same or of neighbouring layers belongs to the first of them."""
    found: list[_Visit] = []
    for at, visit in enumerate(visits):
        before = found[-1] if found else None
        after = visits[at + 1] if at + 1 < len(visits) else None
        if before and before.instant == visit.instant and _continues(before, visit, after):
            found[-1] = replace(before, events=range(before.events.start, visit.events.stop))
        else:
            found.append(visit)
    return found


def _continues(before: _Visit, visit: _Visit, after: _Visit | None) -> bool:
    if visit.unit == before.unit:
        return True
    is_between = after is not None and after.instant == visit.instant and after.unit != _NO_UNIT and abs(after.unit - before.unit) <= 1
    return visit.unit == _NO_UNIT != before.unit and is_between


def _goes_down(visits: list[_Visit], at: int) -> bool:
    """Whether the pass over the layers that this visit belongs to begins at the last of them."""
    for other, down in ((at - 1, 2), (at + 1, 0)):
        if 0 <= other < len(visits) and visits[other].instant == visits[at].instant and visits[other].unit in (0, 2):
            return visits[other].unit == down
    raise NotRegular(f"during {visits[at].instant} layers are not visited in a row")


_Name = tuple[int, tuple[int, int, int]]
"""(unit, (span of one instant, visit of the unit in it, place in the visit)) of an allocation: equal units give equal names but for the unit."""


def _names(trace: Trace, visits: list[_Visit]) -> dict[int, _Name]:
    names: dict[int, _Name] = {}
    count: Counter[tuple[int, int]] = Counter()
    span = 0
    for at, visit in enumerate(visits):
        span += at > 0 and visits[at - 1].instant != visit.instant
        fresh = [ident for ident, is_new in (trace.events[event] for event in visit.events) if is_new]
        names |= {ident: (visit.unit, (span, count[visit.unit, span], place)) for place, ident in enumerate(fresh)}
        count[visit.unit, span] += 1
    return names


def _require_equal(trace: Trace, names: dict[int, _Name]) -> None:
    """The repeated unit and the one after it allocate the same, block by block."""
    first, second = ({name: trace.blocks[ident].num_bytes for ident, (unit, name) in names.items() if unit == number} for number in (1, 2))
    if first != second:
        raise NotRegular(f"{len(first.items() ^ second.items())} allocations of two equal layers differ")


class _Copies:
    """Blocks of the stretched trace: the old ones under their old idents, then those of each copy."""

    def __init__(self, trace: Trace, names: dict[int, _Name], missing: int, period: int, start: int) -> None:
        self.trace, self.names, self.missing = trace, names, missing
        self.idents = {name: ident for ident, name in names.items()}
        self.shift, self.stop = missing * period, start + period
        self.period = period
        self.blocks: list[Block] = [self._moved(block, self.shift if block.unit >= self.stop else 0) for block in trace.blocks]
        self.categories = dict(trace.categories)
        self.made: dict[tuple[tuple[int, int, int], int], int] = {}

    @staticmethod
    def _moved(block: Block, shift: int) -> Block:
        return replace(block, unit=block.unit + shift) if shift and block.unit != OUTSIDE else block

    def write(self, out: Trace, visit: _Visit, number: int) -> None:
        for at in visit.events:
            ident, is_new = self.trace.events[at]
            layer = self.trace.units[at]
            if layer != OUTSIDE:
                layer += number * self.period if visit.unit == 1 else self.shift if layer >= self.stop else 0
            for found in (self._of_copy(ident, number),) if visit.unit == 1 else self._elsewhere(ident, visit):
                out.events.append((found, is_new))
                out.units.append(layer)
                out.instants.append(self.trace.instants[at])

    def _elsewhere(self, ident: int, visit: _Visit) -> Iterator[int]:
        """A later layer's neighbour is the last copy, an earlier one's is the original; what is outside of all layers means all of them."""
        unit, name = self.names[ident]
        positions = (0,) if unit != 1 or _NO_UNIT < visit.unit < 1 else (self.missing,) if visit.unit > 1 else range(self.missing + 1)
        yield from (self._copy(name, ident, position) for position in positions)

    def _of_copy(self, ident: int, number: int) -> int:
        unit, name = self.names[ident]
        position = number + unit - 1  # among the copies
        if unit == _NO_UNIT:
            if number:
                raise NotRegular(f"a repeated layer frees {self.trace.blocks[ident].operation} of no layer")
            return ident
        if position < 0 or position > self.missing:
            return ident
        original = self.idents.get((1, name))
        if original is None or self.trace.blocks[original].num_bytes != self.trace.blocks[ident].num_bytes:
            raise NotRegular(f"two equal layers differ at {self.trace.blocks[ident].operation}")
        return self._copy(name, original, position)

    def _copy(self, name: tuple[int, int, int], original: int, position: int) -> int:
        if position == 0:
            return original
        key = (name, position)
        if key not in self.made:
            self.made[key] = len(self.blocks)
            self.blocks.append(self._moved(self.trace.blocks[original], position * self.period))
            if original in self.categories:
                self.categories[self.made[key]] = self.categories[original]
        return self.made[key]


def _totals(trace: Trace, layers: set[int], times: int) -> tuple[dict[tuple[str, int], Counter[Cost]], dict[tuple[str, int], int]]:
    costs = {
        (instant, layer): Counter({cost: count * times for cost, count in found.items()}) if layer in layers else found
        for (instant, layer), found in trace.costs.items()
    }
    operations = {(instant, layer): count * (times if layer in layers else 1) for (instant, layer), count in trace.operations.items()}
    return costs, operations


def check_whole(trace: Trace) -> Iterator[str]:
    """What cannot be in a stream of events: a block that is freed twice or before it is made."""
    alive: set[int] = set()
    for ident, is_new in trace.events:
        if is_new == (ident in alive):
            yield f"block {ident} ({trace.blocks[ident].operation}) is {'made' if is_new else 'freed'} twice"
        (alive.add if is_new else alive.discard)(ident)
