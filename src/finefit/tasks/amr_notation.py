"""AMR graphs in PENMAN notation, read and written. A graph is a tree of nodes, each with a variable and a concept; a
variable alone points back to its node.

Notation is read as annotators write it: a role may touch its bracket, a concept may hold blanks, a variable any letter.
penman refuses a concept of several words, and smatch runs the words together."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from finefit.tasks.task import NoResult


@dataclass(frozen=True, slots=True)
class Edge:
    role: str
    """Without its colon."""
    target: "Node | str"
    """A node; or a variable or constant as it is written, a string with its quotes."""


@dataclass(frozen=True, slots=True)
class Node:
    variable: str
    concept: str
    edges: tuple[Edge, ...] = ()


def nodes(root: Node) -> Iterator[Node]:
    """In the order in which they are written."""
    yield root
    for edge in root.edges:
        if isinstance(edge.target, Node):
            yield from nodes(edge.target)


def defined_twice(root: Node) -> list[str]:
    """Variables of more than one node."""
    return [variable for variable, times in Counter(node.variable for node in nodes(root)).items() if times > 1]


def renamed(root: Node) -> tuple[Node, tuple[str, ...]]:
    """With a variable of its own for every node, and what was changed. A variable alone still means the first node that
    has it."""
    taken = {node.variable for node in nodes(root)}
    taken |= {edge.target for node in nodes(root) for edge in node.edges if isinstance(edge.target, str)}
    seen: set[str] = set()
    changes: list[str] = []

    def once(node: Node) -> Node:
        variable = node.variable
        if variable in seen:
            variable, old = _fresh(variable, taken), node.variable
            changes.append(f"{old} / {node.concept} is {variable} now, since {old} was defined before")
        seen.add(variable)
        taken.add(variable)
        edges = (
            replace(edge, target=once(edge.target)) if isinstance(edge.target, Node) else edge for edge in node.edges
        )
        return Node(variable, node.concept, tuple(edges))

    return once(root), tuple(changes)


def _fresh(variable: str, taken: set[str]) -> str:
    stem = variable.rstrip("0123456789") or variable
    return next(name for name in (f"{stem}{number}" for number in range(2, len(taken) + 3)) if name not in taken)


Spelling = Literal["as_written", "underscores"]

_DEEPEST = 200
"""An answer may open brackets without end. Python's stack is deeper than this."""
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
    """The whole text is one graph, and every variable is defined once; otherwise NoResult says what is wrong."""
    root = parse_loosely(text)
    if twice := defined_twice(root):
        raise NoResult(f"the variable {', '.join(twice)} is defined twice")
    return root


def parse_loosely(text: str) -> Node:
    """A variable may be defined twice."""
    return _Parser(text, mends=None).whole()


def mended(text: str) -> tuple[Node, tuple[str, ...]]:
    """The graph after closing brackets, dropping roles without a target and renaming variables; and what was done."""
    mends: list[str] = []
    root, changes = renamed(_Parser(text, mends=mends).whole())
    return root, (*mends, *changes)


def find_graph(answer: str) -> str:
    """The first graph of an answer, from its opening bracket to its closing one, or to the end."""
    found = _BEGIN.search(answer)
    if found is None:
        raise NoResult("the answer holds no graph" if answer.strip() else "the answer is empty")
    return answer[found.start() : _end(answer, found.start())]


def _end(text: str, begin: int) -> int:
    depth = 0
    for found in _BRACKET_OR_TEXT.finditer(text, begin):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth and found[0] == ")":
            return found.end()
    return len(text)


def write(node: Node) -> str:
    """In one line, which takes the fewest tokens."""
    inside = "".join(
        f" :{edge.role} {write(edge.target) if isinstance(edge.target, Node) else edge.target}" for edge in node.edges
    )
    return f"({node.variable} / {node.concept}{inside})"


def joined_concepts(node: Node, spelling: Spelling) -> Node:
    """With the words of concepts and of constants without quotes joined as `spelling` says."""

    def target(old: Node | str) -> Node | str:
        return joined_concepts(old, spelling) if isinstance(old, Node) else joined(old, spelling)

    edges = tuple(replace(edge, target=target(edge.target)) for edge in node.edges)
    return Node(node.variable, joined(node.concept, spelling), edges)


def joined(words: str, spelling: Spelling) -> str:
    return words if spelling == "as_written" or words.startswith('"') else words.replace(" ", "_")


class _Parser:
    """Reads a text once. Faults are raised, or listed in `mends` where that is a list."""

    def __init__(self, text: str, *, mends: list[str] | None) -> None:
        self._text = unicodedata.normalize("NFC", text).strip()
        self._at = 0
        self._mends = mends

    def whole(self) -> Node:
        if not self._text.startswith("("):
            raise NoResult("this is not a graph: it does not begin with a bracket")
        root = self._node(1)
        if root is None:
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
        """None where it has no variable or no concept, and so cannot be a target."""
        if depth > _DEEPEST:
            raise NoResult(f"brackets are nested deeper than {_DEEPEST} levels")
        opened = _VARIABLE.match(self._text, self._at)
        assert opened is not None  # a bracket is here
        self._at = opened.end()
        variable, concept = opened[1], self._concept() if opened[2] else ""
        if self._mends is None and not (variable and concept):
            missing = "concept" if variable else "variable"
            raise NoResult(f"a node has no {missing}: {_shown(self._text[opened.start() :])}")
        edges = self._edges(depth)
        return Node(variable, concept, edges) if variable and concept else None

    def _concept(self) -> str:
        self._skip_blanks()
        return self._quoted() if self._text.startswith('"', self._at) else self._words()

    def _edges(self, depth: int) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        while not self._closes():
            if role := _ROLE.match(self._text, self._at):
                self._at = role.end()
                target = self._target(depth)
                if target is not None:
                    edges.append(Edge(_ALIGNMENT.sub("", role[1]), target))
                else:
                    self._fault(f":{role[1]} has no target", "left out")
            else:
                self._stray(depth)
        return tuple(edges)

    def _closes(self) -> bool:
        self._skip_blanks()
        if self._at == len(self._text):
            self._fault("a bracket is not closed", "closed at the end")
            return True
        closes = self._text[self._at] == ")"
        self._at += closes
        return closes

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
        found = _WORDS.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return _BLANKS.sub(" ", _ALIGNMENT.sub("", found[0])).strip()

    def _stray(self, depth: int) -> None:
        """Text where a role should be."""
        self._fault(f"{_shown(self._text[self._at :])} is where a role should be", "left out")
        begin = self._at
        self._target(depth)
        if self._at == begin:
            self._at += 1

    def _skip_blanks(self) -> None:
        found = _BLANKS.match(self._text, self._at)
        self._at = found.end() if found else self._at


def _shown(text: str) -> str:
    line = _BLANKS.sub(" ", text)
    return f"`{line}`" if len(line) <= 30 else f"`{line[:30]}`..."
