"""The rows of amr-twin are graphs, disjoint, varied, and reproducible byte for byte; the recipes of one folder differ
in one key."""

from collections import Counter
from functools import cache
from pathlib import Path

import penman
import pytest

from finefit.plan.resolve import leaves
from finefit.spec.load import load_spec
from finefit.tasks.amr import GraphBlock, read_graphs
from finefit.tasks.amr_graphs import Node, nodes, parse

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "finefit" / "recipes"
ROWS = RECIPES / "amr-twin"
NUM_ROWS = {"train": 120, "test": 30}


@cache
def blocks(split: str) -> tuple[GraphBlock, ...]:
    return tuple(read_graphs(ROWS / f"{split}.txt"))


def graphs(split: str) -> list[Node]:
    return [parse(block.graph) for block in blocks(split)]


@pytest.mark.parametrize("split", NUM_ROWS)
def test_every_sentence_has_a_graph_that_penman_reads_too(split: str) -> None:
    assert len(blocks(split)) == NUM_ROWS[split]
    for block, root in zip(blocks(split), graphs(split), strict=True):
        assert penman.decode(block.graph).top == root.variable
        assert block.sentence.endswith((".", "?"))


def test_no_sentence_stands_twice_and_none_in_both_files() -> None:
    sentences = [block.sentence.lower() for split in NUM_ROWS for block in blocks(split)]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize("split", NUM_ROWS)
def test_graphs_hold_what_makes_them_more_than_lists(split: str) -> None:
    found: Counter[str] = Counter()
    for root in graphs(split):
        variables = {node.variable for node in nodes(root)}
        edges = [edge for node in nodes(root) for edge in node.edges]
        found["met again"] += any(edge.target in variables for edge in edges)
        for role in ("polarity", "quant", "name", "ARG0-of", "op2"):
            found[role] += any(edge.role == role for edge in edges)
    assert min(found.values()) >= 0.05 * NUM_ROWS[split]
    assert found["met again"] >= 0.25 * NUM_ROWS[split]


def test_no_test_word_is_new_to_who_has_trained() -> None:
    known = {node.concept for root in graphs("train") for node in nodes(root)}
    assert {node.concept for root in graphs("test") for node in nodes(root)} <= known


@pytest.mark.parametrize("folder", ["amr", "amr-twin"])
def test_the_recipes_of_a_folder_differ_in_their_name_and_one_key(folder: str) -> None:
    paths = sorted(path for path in (RECIPES / folder).glob("*.yaml") if path.name != "base.yaml")
    assert [path.stem for path in paths] == (
        ["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"] if folder == "amr" else ["baseline", "mtup2"]
    )
    told = [{key: value for key, value, _ in leaves(load_spec(path))} for path in paths]
    differing = {key for key in told[0] if len({repr(one[key]) for one in told}) > 1}
    assert differing == {"name", "data.task.method"}
    assert [one["data.task.method"] for one in told] == [path.stem for path in paths]


def test_the_twin_asks_the_same_as_the_recipe() -> None:
    big, twin = (load_spec(RECIPES / folder / "mtup2.yaml") for folder in ("amr", "amr-twin"))
    assert big.tuning.kind == twin.tuning.kind == "lora"
    assert (
        [evaluation.label for evaluation in big.evaluate]
        == [evaluation.label for evaluation in twin.evaluate]
        == ["amr"]
    )
    assert big.evaluate[0].checkpoints == twin.evaluate[0].checkpoints == "all"
