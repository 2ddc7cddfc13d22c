"""An AMR graph as it is written: a tree of nodes, each with a variable and a concept; a bare variable points back to its node."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Edge:
    role: str
    """Without its colon."""
    target: "Node | str"
    """A node; or a variable or constant as it is written, a text with its quotes."""


@dataclass(frozen=True, slots=True)
class Node:
    variable: str
    concept: str
    edges: tuple[Edge, ...] = ()


def nodes(root: Node) -> Iterator[Node]:
    """In the order of their writing."""
    yield root
    for edge in root.edges:
        if isinstance(edge.target, Node):
            yield from nodes(edge.target)


def defined_twice(root: Node) -> list[str]:
    """Variables that stand for more than one node."""
    return [variable for variable, times in Counter(node.variable for node in nodes(root)).items() if times > 1]


def renamed(root: Node) -> tuple[Node, tuple[str, ...]]:
    """Every node has a variable of its own, and what was changed. A bare variable goes on meaning the first node that has it."""
    taken = {node.variable for node in nodes(root)} | {
        edge.target for node in nodes(root) for edge in node.edges if isinstance(edge.target, str)
    }
    seen: set[str] = set()
    changes: list[str] = []

    def once(node: Node) -> Node:
        variable = node.variable
        if variable in seen:
            variable = _fresh(variable, taken)
            changes.append(
                f"{node.variable} / {node.concept} is {variable} now, since {node.variable} was defined before"
            )
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
