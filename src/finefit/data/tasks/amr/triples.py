"""What a graph says, as Smatch counts it: a concept for each node, attributes with constants (the root's mark among them), relations between nodes.

The rules are those of the smatch package, so that scores can be compared: an inverse role is turned round, `mod` is the inverse of `domain`, a
constant under an inverse role says nothing, and case does not count. Two of its ways are not followed. A triple that is written twice is one
triple: counted as two it would match four times. A text of several words is all of them, not the first.
"""

from dataclasses import dataclass

from finefit.data.tasks.amr.graph import Edge, Node, nodes

_NO_INVERSE = frozenset({"prep-on-behalf-of", "prep-out-of", "consist-of"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Triples:
    """Nodes are numbers, the root is 0."""

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
            elif not _is_inverse(_plain(edge.role)):
                attributes.add((number[node.variable], _plain(edge.role), _plain(str(edge.target))))
    concepts = tuple(_plain(node.concept) for node in nodes(root))
    return Triples(concepts=concepts, attributes=frozenset(attributes), relations=frozenset(relations))


def _directed(at: int, edge: Edge, other: int) -> tuple[int, str, int]:
    role = _plain(edge.role)
    if not _is_inverse(role):
        return at, role, other
    return other, "domain" if role == "mod" else role.removesuffix("-of"), at


def _is_inverse(role: str) -> bool:
    return role == "mod" or (role.endswith("-of") and role not in _NO_INVERSE)


def _plain(text: str) -> str:
    """Case, quotes and underscores at the end make no difference."""
    return text.strip('"').lower().rstrip("_")
