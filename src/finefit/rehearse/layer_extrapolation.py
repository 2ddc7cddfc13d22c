"""Extrapolates a rehearsal of a few layers to the whole depth.

Equal layers repeat the same events. Of four layers in a row, the second is repeated for the missing ones; if a layer
frees what its neighbour allocated, each copy frees what *its* neighbour allocated. If layers of two kinds do the same
with different sizes, the second rehearsed layer is of one kind and the third of the other, and each layer between the
first and the last is a copy of the one with its kind. Layers whose events do not repeat are an error, never an
estimate."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from finefit.rehearse.trace import LOADED, OUTSIDE, WARM_UP, Block, Trace

REHEARSED_PERIODS = 4
"""Number of periods that are rehearsed: the first, two that must be equal, and the last."""
_NO_UNIT = -(10**6)
_MIDDLE = (1, 2)
_NORM, _SIDE_BY_SIDE = "aten::_foreach_norm.Scalar", "aten::stack"
_Place = tuple[int, int, int]
"""(span of one instant, visit of the unit in it, place in the visit) of an allocation, which is the same in equal
units."""
_Name = tuple[int, _Place]
"""(unit, place in it)"""


class LayersDiffer(Exception):
    """The rehearsed layers do not repeat, so other layers cannot be extrapolated from them."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers that are treated alike; `period` is more than one if kinds of layers alternate."""

    num_layers: int
    period: int = 1
    like: tuple[int, ...] = ()
    """For kinds that differ only in size: which middle layer (0 or 1) each inner layer copies."""

    @property
    def missing(self) -> int:
        """Number of periods that need not be rehearsed."""
        return max(0, self.num_layers // self.period - REHEARSED_PERIODS)

    @property
    def rehearsed(self) -> int:
        return self.num_layers - self.missing * self.period


def extrapolate(trace: Trace, *stacks: Sequence[LayerRun]) -> Trace:
    """`trace` has the `rehearsed` layers of each run, in order. The layers of a stack are consecutive."""
    low = sum(run.rehearsed for runs in stacks for run in runs)
    for runs in reversed(stacks):  # from the end, so that earlier layers keep their numbers
        end = high = low
        low -= sum(run.rehearsed for run in runs)
        for run in reversed(runs):
            if run.missing:
                trace = _repeat(trace, range(low, high), end - (REHEARSED_PERIODS - 1) * run.period, run)
                high += run.missing * run.period
            end -= run.rehearsed
    return _resized(trace)


def _resized(trace: Trace) -> Trace:
    """Loading first allocates the size of all weights; the stack of gradient norms has one entry per tensor."""
    loaded = [(ident, block) for ident, block in enumerate(trace.blocks) if block.operation == LOADED]
    total = sum(block.num_bytes for ident, block in loaded if trace.category(ident) == "weights")
    sizes: dict[int, int] = {}
    norms = 0
    for block, ident in ((trace.blocks[ident], ident) for ident, is_new in trace.events if is_new):
        if block.operation == WARM_UP:
            sizes[ident] = total
        elif block.operation == _NORM:
            norms += block.num_bytes
        elif block.operation == _SIDE_BY_SIDE and block.instant == "update":
            sizes[ident], norms = norms or block.num_bytes, 0
    trace.blocks = [
        block._replace(num_bytes=sizes[ident]) if ident in sizes else block for ident, block in enumerate(trace.blocks)
    ]
    return trace


@dataclass(frozen=True, slots=True)
class _Visit:
    """Consecutive events that belong to one period of layers."""

    unit: int
    instant: str
    events: range
    key: tuple[int, int] = (0, 0)
    """(span of one instant, visit of the unit in it): equal units have visits with equal keys."""


def _repeat(trace: Trace, stack: range, start: int, run: LayerRun) -> Trace:
    """Repeats the layers [start, start + period) for the missing periods. A unit is a period; unit 1 is repeated."""

    def unit_of(layer: int) -> int:
        return (layer - start) // run.period + 1 if layer in stack else _NO_UNIT

    visits = _visits(trace, [unit_of(layer) for layer in trace.units])
    copies = _Copies(trace, visits, stack, start, run)
    out = Trace(blocks=copies.blocks, categories=copies.categories, host_bytes=trace.host_bytes)
    for at, visit in enumerate(visits):
        if visit.unit not in _MIDDLE:
            copies.write_elsewhere(out, visit)
            continue
        places = range(run.missing + 1) if visit.unit == 1 else (run.missing + 1,)
        for place in reversed(places) if visit.unit == 1 and _goes_down(visits, at) else places:
            copies.write(out, visit, place)
    # the number of layers that each layer represents
    middle = range(start, start + 2 * run.period)
    times = {layer: copies.like.count(unit_of(layer) - 1) for layer in middle}
    out.costs = {
        key: Counter({cost: count * times.get(key[1], 1) for cost, count in found.items()})
        for key, found in trace.costs.items()
    }
    out.operations = {
        key: Counter({kind: count * times.get(key[1], 1) for kind, count in found.items()})
        for key, found in trace.operations.items()
    }
    return out


def _visits(trace: Trace, units: list[int]) -> list[_Visit]:
    """Events outside any layer, between visits of one layer or of neighbouring layers, belong to the first visit."""
    parts: list[_Visit] = []
    for (unit, instant), same in groupby(range(len(units)), key=lambda at: (units[at], trace.instants[at])):
        events = list(same)
        parts.append(_Visit(unit, instant, range(events[0], events[-1] + 1)))
    found: list[_Visit] = []
    for part, after in zip(parts, (*parts[1:], None), strict=True):
        before = found[-1] if found else None
        if before and before.instant == part.instant and _continues(before, part, after):
            found[-1] = replace(before, events=range(before.events.start, part.events.stop))
        else:
            found.append(part)
    count: Counter[tuple[int, int]] = Counter()
    span = 0
    for at, visit in enumerate(found):
        span += at > 0 and found[at - 1].instant != visit.instant
        found[at] = replace(visit, key=(span, count[visit.unit, span]))
        count[visit.unit, span] += 1
    return found


def _continues(before: _Visit, visit: _Visit, after: _Visit | None) -> bool:
    if visit.unit == before.unit:
        return True
    if visit.unit != _NO_UNIT or before.unit == _NO_UNIT or after is None or after.unit == _NO_UNIT:
        return False
    return after.instant == visit.instant and abs(after.unit - before.unit) <= 1


def _goes_down(visits: list[_Visit], at: int) -> bool:
    """Returns whether this visit's pass over the layers starts at the last of them."""
    for other, down in ((at - 1, 2), (at + 1, 0)):
        if 0 <= other < len(visits) and visits[other].instant == visits[at].instant and visits[other].unit in (0, 2):
            return visits[other].unit == down
    raise LayersDiffer(f"during {visits[at].instant} layers are not visited in a row")


class _Copies:
    """The blocks of the extrapolated trace: the original blocks under their idents, then those of each copy. The middle
    has a place for each period between the first and the last; `like` says which rehearsed period, 0 or 1, a place
    copies."""

    def __init__(self, trace: Trace, visits: list[_Visit], stack: range, start: int, run: LayerRun) -> None:
        self.trace, self.start, self.run = trace, start, run
        self.last = run.missing + 1
        """The last middle place."""
        self.like = run.like or (0,) * self.last + (1,)
        self.visits = {(visit.unit, visit.key): visit for visit in visits if visit.unit in _MIDDLE}
        self.names: dict[int, _Name] = {}
        for visit in visits:
            fresh = [ident for ident, is_new in (trace.events[event] for event in visit.events) if is_new]
            self.names |= {ident: (visit.unit, (*visit.key, place)) for place, ident in enumerate(fresh)}
        self.idents = {name: ident for ident, name in self.names.items()}
        self.made: dict[tuple[_Place, int], int] = {}
        self._require_equal()
        self.blocks = [self._behind(block, stack) for block in trace.blocks]
        self.categories = dict(trace.categories)

    def _require_equal(self) -> None:
        """The two middle periods must allocate the same, block by block; two kinds may differ only in sizes."""
        found: list[set[object]] = [set(), set()]
        for visit in self.visits.values():
            for at, event in enumerate(visit.events):
                ident, is_new = self.trace.events[event]
                unit, name = self.names[ident]
                if self.run.like:
                    distance = unit if unit == _NO_UNIT else unit - visit.unit
                    found[visit.unit - 1].add((visit.key, at, is_new, distance, name))
                elif is_new:
                    found[visit.unit - 1].add((visit.key, name, self.trace.blocks[ident].num_bytes))
        if not found[0]:
            raise LayersDiffer("a layer has no events")
        if found[0] != found[1]:
            raise LayersDiffer(f"{len(found[0] ^ found[1])} allocations of two equal layers differ")

    def _behind(self, block: Block, stack: range) -> Block:
        """Moves layers after the repeated one; in the same stack their modules are renumbered."""
        if block.unit < self.start + self.run.period:
            return block
        shift = self.run.missing * self.run.period
        return _moved(block, shift) if block.unit in stack else block._replace(unit=block.unit + shift)

    def write(self, out: Trace, visit: _Visit, place: int) -> None:
        """Writes the events of a middle place, copied from the rehearsed unit of its kind."""
        unit = self.like[place] + 1
        visit, shift = self.visits[unit, visit.key], (place + 1 - unit) * self.run.period
        for at in visit.events:
            ident, is_new = self.trace.events[at]
            layer = self.trace.units[at]
            moved = layer if layer == OUTSIDE else layer + shift
            out.note(self._seen_from(ident, unit, place), is_new, moved, visit.instant)

    def write_elsewhere(self, out: Trace, visit: _Visit) -> None:
        for at in visit.events:
            ident, is_new = self.trace.events[at]
            layer = self.trace.units[at]
            layer += self.run.missing * self.run.period if layer >= self.start + self.run.period else 0
            for found in self._from_elsewhere(ident, visit):
                out.note(found, is_new, layer, self.trace.instants[at])

    def _from_elsewhere(self, ident: int, visit: _Visit) -> Iterator[int]:
        """For a later layer yields the copy of the last middle place, for an earlier one that of the first, and outside
        layers all copies."""
        unit, name = self.names[ident]
        if unit not in _MIDDLE:
            yield ident
        elif visit.unit == _NO_UNIT:
            places = range(self.last) if unit == 1 else (self.last,)
            yield from (self._copy(name, place) for place in places)
        else:
            yield self._copy(name, unit - 1 if visit.unit < 1 else self.last + unit - 2)

    def _seen_from(self, ident: int, own: int, place: int) -> int:
        """Translates `ident`, as seen from the rehearsed unit `own`, to a unit in this place."""
        unit, name = self.names[ident]
        if unit == _NO_UNIT:
            if self.run.like or place != (own - 1) * self.last:
                raise LayersDiffer(f"a repeated layer frees {self.trace.blocks[ident].operation}, which has no layer")
            return ident
        wanted = place + unit - own
        beside = wanted + 1 if wanted < 0 else wanted - self.last + 2
        found = self._copy(name, wanted) if 0 <= wanted <= self.last else self.idents.get((beside, name))
        if found is None or self.blocks[found].num_bytes != self.trace.blocks[ident].num_bytes:
            raise LayersDiffer(f"two equal layers differ at {self.trace.blocks[ident].operation}")
        return found

    def _copy(self, name: _Place, place: int) -> int:
        key = (name, place)
        if (found := self.made.get(key)) is None:
            found = self.made[key] = self._make_copy(name, place)
        return found

    def _make_copy(self, name: _Place, place: int) -> int:
        original = self.idents.get((self.like[place] + 1, name))
        if original is None:
            raise LayersDiffer("a layer frees what its neighbour does not allocate")
        if place == self.like[place] * self.last:
            return original
        self.blocks.append(_moved(self.trace.blocks[original], (place - self.like[place]) * self.run.period))
        ident = len(self.blocks) - 1
        if original in self.categories:
            self.categories[ident] = self.categories[original]
        return ident


def _moved(block: Block, shift: int) -> Block:
    """Moves the block to another layer, with that layer's number in the module's name."""
    if block.unit == OUTSIDE:
        return block
    return block._replace(unit=block.unit + shift, module=_renumbered(block.module, shift))


@lru_cache(maxsize=1 << 16)
def _renumbered(module: str, shift: int) -> str:
    return re.sub(r"(?<=\.)\d+\b", lambda number: str(int(number[0]) + shift), module, count=1)


def find_inconsistencies(trace: Trace) -> Iterator[str]:
    """Describes impossible events in a stream: a block that is freed twice or before it is allocated."""
    alive: set[int] = set()
    for ident, is_new in trace.events:
        if is_new == (ident in alive):
            yield f"block {ident} ({trace.blocks[ident].operation}) is {'made' if is_new else 'freed'} twice"
        (alive.add if is_new else alive.discard)(ident)
