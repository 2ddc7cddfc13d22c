"""AMR graphs: reads and writes PENMAN notation, and compares graphs by Smatch. A graph is a tree of nodes, each with a
variable and a concept; a variable alone refers to its node.

The reader accepts what annotators write: a role may touch its bracket, a concept may contain blanks, a variable may be
any letter. penman refuses a concept of several words, and smatch joins the words.
"""

import hashlib
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from finefit.tasks import NoResult


@dataclass(frozen=True, slots=True)
class Edge:
    role: str
    """Written without its colon."""
    target: "Node | str"
    """A node; or a variable or constant as it is written, a string with its quotes."""


@dataclass(frozen=True, slots=True)
class Node:
    variable: str
    concept: str
    edges: tuple[Edge, ...] = ()


def nodes(root: Node) -> Iterator[Node]:
    """The nodes in the order in which they are written."""
    yield root
    for edge in root.edges:
        if isinstance(edge.target, Node):
            yield from nodes(edge.target)


def defined_twice(root: Node) -> list[str]:
    return [variable for variable, times in Counter(node.variable for node in nodes(root)).items() if times > 1]


def renamed(root: Node) -> tuple[Node, tuple[str, ...]]:
    """The graph with a unique variable for every node, and what was changed. A variable alone means the first node with
    it."""
    taken = {node.variable for node in nodes(root)}
    taken |= {edge.target for node in nodes(root) for edge in node.edges if isinstance(edge.target, str)}
    seen, changes = set[str](), list[str]()

    def once(node: Node) -> Node:
        variable = node.variable
        if variable in seen:
            stem, old = variable.rstrip("0123456789") or variable, variable
            variable = next(name for number in count(2) if (name := f"{stem}{number}") not in taken)
            changes.append(f"{old} / {node.concept} is {variable} now, since {old} was defined before")
        seen.add(variable)
        taken.add(variable)
        edges = (
            replace(edge, target=once(edge.target)) if isinstance(edge.target, Node) else edge for edge in node.edges
        )
        return Node(variable, node.concept, tuple(edges))

    return once(root), tuple(changes)


ConceptStyle = Literal["as_written", "underscores"]

_DEEPEST = 200
"""An answer may open any number of brackets. Python's stack allows more than this depth."""
_BEGIN = re.compile(r"""\(\s*[^\s()/":]+\s*/""")
_VARIABLE = re.compile(r"""\(\s*([^\s()/":]*)\s*(/?)""")
_ROLE = re.compile(r""":([^\W\d_][^\s()":]*)\s*""")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"(?:~[\w.,]*)?', re.DOTALL)
_WORDS = re.compile(r"""(?:(?!:[^\W\d_])[^()"])+""")
_BRACKET_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|[()]', re.DOTALL)
_REST_OF_TEXT = re.compile(r'"[^")\n]*')
_ALIGNMENT = re.compile(r"~(?:[a-z]\.)?\d+(?:,\d+)*(?=\s|$)")
_BLANKS = re.compile(r"\s+")


def parse(text: str) -> Node:
    """Requires the whole text to be one graph and every variable to be defined once; otherwise raises NoResult with the
    problem."""
    root = parse_loosely(text)
    if twice := defined_twice(root):
        raise NoResult(f"the variable {', '.join(twice)} is defined twice")
    return root


def parse_loosely(text: str) -> Node:
    """A variable may be defined twice."""
    return _Parser(text, mends=None).whole()


def mended(text: str) -> tuple[Node, tuple[str, ...]]:
    """The graph after closing brackets, dropping roles without a target and renaming variables; and what was
    repaired."""
    mends: list[str] = []
    root, changes = renamed(_Parser(text, mends=mends).whole())
    return root, (*mends, *changes)


def find_graph(answer: str) -> str:
    """The first graph of an answer, from its opening bracket to its closing one, or to the end of the answer."""
    if (found := _BEGIN.search(answer)) is None:
        raise NoResult("the answer holds no graph" if answer.strip() else "the answer is empty")
    begin, depth = found.start(), 0
    for found in _BRACKET_OR_TEXT.finditer(answer, begin):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth and found[0] == ")":
            return answer[begin : found.end()]
    return answer[begin:]


def write(node: Node) -> str:
    """The graph in one line, which takes the fewest tokens."""
    inside = "".join(
        f" :{edge.role} {write(edge.target) if isinstance(edge.target, Node) else edge.target}" for edge in node.edges
    )
    return f"({node.variable} / {node.concept}{inside})"


def joined_concepts(node: Node, style: ConceptStyle) -> Node:
    """Joins the words of concepts and of unquoted constants as `style` says."""
    if style == "as_written":
        return node

    def joined(words: str) -> str:
        return words if words.startswith('"') else words.replace(" ", "_")

    def target(old: Node | str) -> Node | str:
        return joined_concepts(old, style) if isinstance(old, Node) else joined(old)

    edges = tuple(replace(edge, target=target(edge.target)) for edge in node.edges)
    return Node(node.variable, joined(node.concept), edges)


class _Parser:
    """Reads a text once. Faults are raised, or listed in `mends` if that is a list."""

    def __init__(self, text: str, *, mends: list[str] | None) -> None:
        self._text = unicodedata.normalize("NFC", text).strip()
        self._at = 0
        self._mends = mends

    def whole(self) -> Node:
        if not self._text.startswith("("):
            raise NoResult("this is not a graph: it does not begin with a bracket")
        if (root := self._node(1)) is None:
            raise NoResult("the graph has no concept at its root")
        self._skip_blanks()
        if self._at < len(self._text):
            self._fault(f"{_shown(self._text[self._at :])} comes after the graph", "left out")
        return root

    def _fault(self, problem: str, mend: str) -> None:
        if self._mends is None:
            raise NoResult(problem)
        self._mends.append(f"{problem}: {mend}")

    def _node(self, depth: int) -> Node | None:
        """None if it has no variable or no concept and so cannot be a target."""
        if depth > _DEEPEST:
            raise NoResult(f"brackets are nested deeper than {_DEEPEST} levels")
        opened = _VARIABLE.match(self._text, self._at)
        assert opened is not None  # a bracket is here
        self._at = opened.end()
        variable, concept = opened[1], ""
        if opened[2]:
            self._skip_blanks()
            concept = self._quoted() if self._text.startswith('"', self._at) else self._words()
        if self._mends is None and not (variable and concept):
            missing = "concept" if variable else "variable"
            raise NoResult(f"a node has no {missing}: {_shown(self._text[opened.start() :])}")
        edges = self._edges(depth)
        return Node(variable, concept, edges) if variable and concept else None

    def _edges(self, depth: int) -> tuple[Edge, ...]:
        """The edges up to the closing bracket."""
        edges: list[Edge] = []
        while True:
            self._skip_blanks()
            if self._at == len(self._text):
                self._fault("a bracket is not closed", "closed at the end")
                return tuple(edges)
            if self._text[self._at] == ")":
                self._at += 1
                return tuple(edges)
            if role := _ROLE.match(self._text, self._at):
                self._at = role.end()
                if (target := self._target(depth)) is not None:
                    edges.append(Edge(_ALIGNMENT.sub("", role[1]), target))
                else:
                    self._fault(f":{role[1]} has no target", "left out")
            else:  # text where a role should be
                begin = self._at
                self._fault(f"{_shown(self._text[begin:])} is where a role should be", "left out")
                self._target(depth)
                self._at = max(self._at, begin + 1)

    def _target(self, depth: int) -> Node | str | None:
        if self._text.startswith("(", self._at):
            return self._node(depth + 1)
        if self._text.startswith('"', self._at):
            return self._quoted()
        return self._words() or None

    def _quoted(self) -> str:
        if found := _TEXT.match(self._text, self._at):
            self._at = found.end()
            return _BLANKS.sub(" ", found[0][: found[0].rindex('"') + 1])
        self._fault(f"a quote is not closed: {_shown(self._text[self._at :])}", "closed")
        found = _REST_OF_TEXT.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found[0].rstrip() + '"'

    def _words(self) -> str:
        if (found := _WORDS.match(self._text, self._at)) is None:
            return ""
        self._at = found.end()
        return _BLANKS.sub(" ", _ALIGNMENT.sub("", found[0])).strip()

    def _skip_blanks(self) -> None:
        if found := _BLANKS.match(self._text, self._at):
            self._at = found.end()


def _shown(text: str) -> str:
    line = _BLANKS.sub(" ", text)
    return f"`{line}`" if len(line) <= 30 else f"`{line[:30]}`..."


# Smatch: how many triples of two graphs agree under the best mapping of one's nodes to the other's, found by hill
# climbing from many starts. Triples follow the rules of the smatch package, so that scores can be compared: an inverse
# role is turned round, `mod` is the inverse of `domain`, a constant under an inverse role is ignored, and so is case.
# Two rules differ. A triple that is written twice is one triple: counted as two it would match four times. A string of
# several words is all of them, not the first.
#
# The package searches in the same way, but seeds itself by the clock and keeps state in a module, so that a pair has
# many scores and threads disturb each other. Here the starts are drawn from the pair itself: a pair has one score.

_NO_INVERSE = frozenset({"prep-on-behalf-of", "prep-out-of", "consist-of"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Triples:
    """A concept for each node (node 0 is the root), attributes with constants (one marks the root), and relations."""

    concepts: tuple[str, ...]
    attributes: frozenset[tuple[int, str, str]]
    """Node, role, constant."""
    relations: frozenset[tuple[int, str, int]]
    """Triples of (from, role, to)."""

    def __len__(self) -> int:
        return len(self.concepts) + len(self.attributes) + len(self.relations)


def triples(root: Node) -> Triples:
    """Every variable must be defined once."""
    number = {node.variable: at for at, node in enumerate(nodes(root))}
    attributes = {(0, "top", "top")}
    relations: set[tuple[int, str, int]] = set()
    for node in nodes(root):
        for edge in node.edges:
            at, role = number[node.variable], _normalised(edge.role)
            other = number.get(edge.target.variable if isinstance(edge.target, Node) else edge.target)
            is_inverse = role == "mod" or (role.endswith("-of") and role not in _NO_INVERSE)
            if other is not None and is_inverse:
                relations.add((other, "domain" if role == "mod" else role.removesuffix("-of"), at))
            elif other is not None:
                relations.add((at, role, other))
            elif not is_inverse:
                attributes.add((at, role, _normalised(str(edge.target))))
    concepts = tuple(_normalised(node.concept) for node in nodes(root))
    return Triples(concepts=concepts, attributes=frozenset(attributes), relations=frozenset(relations))


def _normalised(text: str) -> str:
    """Case, quotes and underscores at the end make no difference."""
    return text.strip('"').lower().rstrip("_")


Link = tuple[int, int]
"""Maps a node of the first graph to one of the second."""


@dataclass(frozen=True, slots=True)
class Match:
    matched: int
    predicted: int
    gold: int

    @property
    def f1(self) -> float:
        return 2 * self.matched / (self.predicted + self.gold)


def match(predicted: Triples, gold: Triples, *, restarts: int) -> Match:
    """Climbs from the mapping that equal concepts suggest, and from `restarts` random mappings."""
    content = repr([(graph.concepts, sorted(graph.attributes), sorted(graph.relations)) for graph in (predicted, gold)])
    chance = random.Random(int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "little"))
    search, most = _SmatchSearch(predicted, gold), min(len(predicted), len(gold))
    best = search.climb(search.start(chance, by_concepts=True))
    for _ in range(restarts):
        if best == most:
            break
        best = max(best, search.climb(search.start(chance, by_concepts=False)))
    return Match(best, len(predicted), len(gold))


class _SmatchSearch:
    """The value of each link alone and together with another one. -1 marks a node without a partner."""

    def __init__(self, first: Triples, second: Triples) -> None:
        self._concepts = first.concepts, second.concepts
        self._alone = _worth_alone(first, second)
        self._together = _worth_together(first, second)
        self._choices: list[list[int]] = [[] for _ in first.concepts]
        for node, other in sorted(self._alone.keys() | self._together.keys()):
            self._choices[node].append(other)

    def start(self, chance: random.Random, *, by_concepts: bool) -> list[int]:
        """Maps each node to the first free one of the same concept if `by_concepts`, and all others to any free one."""
        mine, theirs = self._concepts
        start, free = [-1] * len(mine), set(range(len(theirs)))
        for node, choices in enumerate(self._choices if by_concepts else ()):
            start[node] = next((other for other in choices if other in free and theirs[other] == mine[node]), -1)
            free.discard(start[node])
        for node, choices in enumerate(self._choices):
            if start[node] == -1 and (open_choices := [other for other in choices if other in free]):
                start[node] = chance.choice(open_choices)
                free.remove(start[node])
        return start

    def climb(self, mapping: list[int]) -> int:
        """The number of triples that agree once no single move or exchange is a gain. Changes `mapping`."""
        holder = {other: node for node, other in enumerate(mapping) if other != -1}
        while True:
            gain, node, other = self._best_step(mapping, holder)
            if gain <= 0:
                alone = sum(self._alone.get(link, 0) for link in enumerate(mapping))
                return (alone + sum(self._adds(node, other, mapping) for node, other in enumerate(mapping))) // 2
            left, loser = mapping[node], holder.get(other)
            mapping[node], holder[other] = other, node
            if left != -1:
                del holder[left]
            if loser is not None:  # the node that had `other` gets what this one had
                mapping[loser] = left
                if left != -1:
                    holder[left] = loser

    def _best_step(self, mapping: Sequence[int], holder: Mapping[int, int]) -> tuple[int, int, int]:
        best = (0, -1, -1)
        held = [self._adds(node, other, mapping) for node, other in enumerate(mapping)]
        for node, choices in enumerate(self._choices):
            left = mapping[node]
            for other in choices:
                if other == left:
                    continue
                gain = self._adds(node, other, mapping) - held[node]
                if (loser := holder.get(other)) is not None:
                    gain += self._adds(loser, left, mapping) - held[loser]
                    # both change at once: what they have together is lost once, not twice, and neither sees what they
                    # will have
                    gain += self._with((node, left), (loser, other)) + self._with((node, other), (loser, left))
                if gain > best[0]:
                    best = (gain, node, other)
        return best

    def _adds(self, node: int, other: int, mapping: Sequence[int]) -> int:
        """The value of the link together with the others of the mapping."""
        together = self._together.get((node, other), {}).items()
        return self._alone.get((node, other), 0) + sum(worth for (at, to), worth in together if mapping[at] == to)

    def _with(self, one: Link, other: Link) -> int:
        return self._together.get(one, {}).get(other, 0)


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
    """Works both ways round. Two links never share a node."""
    worth: defaultdict[Link, dict[Link, int]] = defaultdict(dict)
    for begin, role, end in first.relations:
        for other_begin, other_role, other_end in second.relations:
            if role == other_role and begin != end and other_begin != other_end:
                one, other = (begin, other_begin), (end, other_end)
                worth[one][other] = worth[other][one] = worth[one].get(other, 0) + 1
    return dict(worth)
