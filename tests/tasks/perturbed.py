"""Graphs of the shipped rows, and the same with seeded errors in them, as a model makes them."""

import random
from pathlib import Path

from finefit.tasks.amr import read_graphs
from finefit.tasks.amr_graphs import Edge, Node, parse

ROWS = Path(__file__).parents[2] / "src" / "finefit" / "recipes" / "amr-twin"


def shipped(split: str) -> list[Node]:
    return [parse(block.graph) for block in read_graphs(ROWS / f"{split}.txt")]


def perturbed(node: Node, chance: random.Random) -> Node:
    """Edges are lost, turned to another role and shuffled, concepts mistaken."""
    edges = [_edge(edge, chance) for edge in node.edges if chance.random() > 0.12]
    chance.shuffle(edges)
    concept = chance.choice(["thing", "person", "boy", "see-01"]) if chance.random() < 0.2 else node.concept
    return Node(node.variable, concept, tuple(edges))


def _edge(edge: Edge, chance: random.Random) -> Edge:
    role = chance.choice(["ARG0", "ARG1", "mod", "ARG1-of", "location"]) if chance.random() < 0.15 else edge.role
    return Edge(role, perturbed(edge.target, chance) if isinstance(edge.target, Node) else edge.target)


def pairs(count: int) -> list[tuple[Node, Node]]:
    """Predicted and gold, no two alike."""
    chance = random.Random(3)
    return [(perturbed(gold, chance), gold) for gold in chance.sample(shipped("train"), count)]
