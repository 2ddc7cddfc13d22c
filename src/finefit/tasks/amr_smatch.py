"""Smatch: how many triples of two graphs agree under the best mapping of one's nodes to the other's, found by hill
climbing from many starts.

Triples follow the rules of the smatch package, so that scores can be compared: an inverse role is turned round, `mod`
is the inverse of `domain`, a constant under an inverse role is ignored, and so is case. Two rules differ. A triple that
is written twice is one triple: counted as two it would match four times. A string of several words is all of them, not
the first.

The package searches in the same way, but seeds itself by the clock and keeps state in a module, so that a pair has many
scores and threads disturb each other. Here the starts are drawn from the pair itself: a pair has one score.
"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finefit.tasks.amr_notation import Edge, Node, nodes

_NO_INVERSE = frozenset({"prep-on-behalf-of", "prep-out-of", "consist-of"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Triples:
    """A concept for each node, attributes with constants (among them the root's mark), relations. The root is node
    0."""

    concepts: tuple[str, ...]
    attributes: frozenset[tuple[int, str, str]]
    """Node, role, constant."""
    relations: frozenset[tuple[int, str, int]]
    """From, role, to."""

    def __len__(self) -> int:
        return len(self.concepts) + len(self.attributes) + len(self.relations)


def triples(root: Node) -> Triples:
    """Every variable must be defined once."""
    number = {node.variable: at for at, node in enumerate(nodes(root))}
    attributes = {(0, "top", "top")}
    relations: set[tuple[int, str, int]] = set()
    for node in nodes(root):
        for edge in node.edges:
            other = number.get(edge.target.variable if isinstance(edge.target, Node) else edge.target)
            if other is not None:
                relations.add(_directed(number[node.variable], edge, other))
            elif not _is_inverse(_normalised(edge.role)):
                attributes.add((number[node.variable], _normalised(edge.role), _normalised(str(edge.target))))
    concepts = tuple(_normalised(node.concept) for node in nodes(root))
    return Triples(concepts=concepts, attributes=frozenset(attributes), relations=frozenset(relations))


def _directed(at: int, edge: Edge, other: int) -> tuple[int, str, int]:
    role = _normalised(edge.role)
    if not _is_inverse(role):
        return at, role, other
    return other, "domain" if role == "mod" else role.removesuffix("-of"), at


def _is_inverse(role: str) -> bool:
    return role == "mod" or (role.endswith("-of") and role not in _NO_INVERSE)


def _normalised(text: str) -> str:
    """Case, quotes and underscores at the end make no difference."""
    return text.strip('"').lower().rstrip("_")


Link = tuple[int, int]
"""A node of the first graph, mapped to one of the second."""


@dataclass(frozen=True, slots=True)
class Match:
    matched: int
    predicted: int
    gold: int

    @property
    def f1(self) -> float:
        return 2 * self.matched / (self.predicted + self.gold)


def match(predicted: Triples, gold: Triples, *, restarts: int) -> Match:
    """Climbs from the mapping that equal concepts suggest, and from `restarts` random ones."""
    search = _Search(predicted, gold)
    chance = random.Random(_seed(predicted, gold))
    most = min(len(predicted), len(gold))
    best = search.climb(search.by_concepts(chance))
    for _ in range(restarts):
        if best == most:
            break
        best = max(best, search.climb(search.drawn(chance)))
    return Match(best, len(predicted), len(gold))


def _seed(*graphs: Triples) -> int:
    content = repr([(graph.concepts, sorted(graph.attributes), sorted(graph.relations)) for graph in graphs])
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "little")


class _Search:
    """What each link is worth alone and together with another. -1 marks a node without a partner."""

    def __init__(self, first: Triples, second: Triples) -> None:
        self._concepts = first.concepts, second.concepts
        self._alone = _worth_alone(first, second)
        self._together = _worth_together(first, second)
        links = sorted(self._alone.keys() | self._together.keys())
        self._choices: list[list[int]] = [[] for _ in first.concepts]
        for node, other in links:
            self._choices[node].append(other)

    def by_concepts(self, chance: random.Random) -> list[int]:
        """Each node to the first free one of the same concept, the others to any free one."""
        mine, theirs = self._concepts
        start, free = [-1] * len(mine), set(range(len(theirs)))
        for node, choices in enumerate(self._choices):
            start[node] = next((other for other in choices if other in free and theirs[other] == mine[node]), -1)
            free.discard(start[node])
        return self._filled(start, free, range(len(mine)), chance)

    def drawn(self, chance: random.Random) -> list[int]:
        mine, theirs = self._concepts
        return self._filled([-1] * len(mine), set(range(len(theirs))), range(len(mine)), chance)

    def _filled(self, start: list[int], free: set[int], nodes: Sequence[int], chance: random.Random) -> list[int]:
        for node in nodes:
            if start[node] == -1 and (open_choices := [other for other in self._choices[node] if other in free]):
                start[node] = chance.choice(open_choices)
                free.remove(start[node])
        return start

    def climb(self, mapping: list[int]) -> int:
        """The triples that agree once no single move or exchange is a gain. Changes `mapping`."""
        holder = {other: node for node, other in enumerate(mapping) if other != -1}
        while True:
            gain, node, other = self._best_step(mapping, holder)
            if gain <= 0:
                return self._worth(mapping)
            self._take(mapping, holder, node, other)

    def _take(self, mapping: list[int], holder: dict[int, int], node: int, other: int) -> None:
        """The node that has `other` gets what this one had."""
        left, loser = mapping[node], holder.get(other)
        mapping[node], holder[other] = other, node
        if left != -1:
            del holder[left]
        if loser is not None:
            mapping[loser] = left
            if left != -1:
                holder[left] = loser

    def _best_step(self, mapping: list[int], holder: Mapping[int, int]) -> tuple[int, int, int]:
        best = (0, -1, -1)
        held = [self._adds(node, other, mapping) for node, other in enumerate(mapping)]
        for node, choices in enumerate(self._choices):
            for other in choices:
                if other != mapping[node] and (gain := self._gain(node, other, mapping, holder, held)) > best[0]:
                    best = (gain, node, other)
        return best

    def _gain(
        self, node: int, other: int, mapping: Sequence[int], holder: Mapping[int, int], held: Sequence[int]
    ) -> int:
        gain = self._adds(node, other, mapping) - held[node]
        loser = holder.get(other)
        if loser is None:
            return gain
        left = mapping[node]
        gain += self._adds(loser, left, mapping) - held[loser]
        # both change at once: what they have together is lost once, not twice, and neither sees what they will have
        return gain + self._with((node, left), (loser, other)) + self._with((node, other), (loser, left))

    def _adds(self, node: int, other: int, mapping: Sequence[int]) -> int:
        """What the link is worth together with the others of the mapping."""
        link = (node, other)
        return self._alone.get(link, 0) + sum(
            worth for (at, to), worth in self._together.get(link, {}).items() if mapping[at] == to
        )

    def _with(self, one: Link, other: Link) -> int:
        return self._together.get(one, {}).get(other, 0)

    def _worth(self, mapping: Sequence[int]) -> int:
        pairs = sum(
            self._adds(node, other, mapping) - self._alone.get((node, other), 0) for node, other in enumerate(mapping)
        )
        return sum(self._alone.get(link, 0) for link in enumerate(mapping)) + pairs // 2


def _worth_alone(first: Triples, second: Triples) -> dict[Link, int]:
    worth: defaultdict[Link, int] = defaultdict(int)
    for node, concept in enumerate(first.concepts):
        for other, same in enumerate(second.concepts):
            worth[node, other] += concept == same
    for node, role, value in first.attributes:
        for other, other_role, other_value in second.attributes:
            worth[node, other] += (role, value) == (other_role, other_value)
    for begin, role, end in first.relations:
        if begin == end:
            for other, other_role, other_end in second.relations:
                worth[begin, other] += role == other_role and other == other_end
    return {link: count for link, count in worth.items() if count}


def _worth_together(first: Triples, second: Triples) -> dict[Link, dict[Link, int]]:
    """Both ways round. Two links never share a node."""
    worth: defaultdict[Link, dict[Link, int]] = defaultdict(dict)
    for begin, role, end in first.relations:
        for other_begin, other_role, other_end in second.relations:
            if role == other_role and begin != end and other_begin != other_end:
                one, other = (begin, other_begin), (end, other_end)
                worth[one][other] = worth[other][one] = worth[one].get(other, 0) + 1
    return dict(worth)
