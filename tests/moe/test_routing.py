"""Shares of tokens by expert, layer and data set, counted in the model itself."""

import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from finefit.artifacts.records import Routing, SourceRouting
from finefit.moe.routing import measure_routing, own_share, routing_map
from tests.mixtures import make_mixture

torch.set_num_threads(1)
ROWS: dict[str, list[tuple[int, ...]]] = {"law": [(10, 11, 12, 13), (20, 21)], "verse": [(100, 101, 102)], "none": []}


def by_hand(
    model: nn.Module, rows: list[tuple[int, ...]], layer: int, *, skipped: int = 0
) -> tuple[list[float], list[float]]:
    """Token by token from the router's own answer."""
    first, weight, seen = [0.0] * 3, [0.0] * 3, []
    router = model.model.layers[layer].mlp.gate  # type: ignore[union-attr, index]
    handle = router.register_forward_hook(lambda _, __, answer: seen.append(answer))
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([row]))
        _, weights, chosen = seen.pop()
        for token in range(skipped, len(row)):
            first[chosen[token][0]] += 1
            for expert, share in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
                weight[expert] += share
    handle.remove()
    return [value / sum(first) for value in first], [value / sum(weight) for value in weight]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_shares_are_those_of_the_tokens_one_by_one(family: str, skipped: int) -> None:
    model = make_mixture(family).train()
    found = measure_routing(model, ROWS, skipped=skipped)
    assert found.experts == ("0", "1", "2")
    assert found.top_k == 2
    assert set(found.sources) == {"law", "verse"}
    assert found.sources["law"].tokens == 6 - 2 * skipped
    for layer in range(2):
        first, weight = by_hand(model, ROWS["law"], layer, skipped=skipped)
        assert found.sources["law"].first[layer] == pytest.approx(first, abs=1e-5)
        assert found.sources["law"].weight[layer] == pytest.approx(weight, abs=1e-5)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def make_routing() -> Routing:
    law = SourceRouting(rows=2, tokens=10, first=((0.9, 0.1), (0.7, 0.3)), weight=((0.8, 0.2), (0.6, 0.4)))
    verse = SourceRouting(rows=1, tokens=5, first=((0.4, 0.6), (0.0, 1.0)), weight=((0.5, 0.5), (0.0, 1.0)))
    return Routing(experts=("law", "verse"), top_k=2, sources={"law": law, "verse": verse, "a & b": verse})


def test_the_own_share_is_of_data_sets_called_as_an_expert_is() -> None:
    assert own_share(make_routing()) == pytest.approx({"law": 0.8, "verse": 0.8})
    assert own_share(make_routing(), by_layer=True) == {"law": (0.9, 0.7), "verse": (0.6, 1.0)}


def test_the_map_is_an_svg_with_a_cell_for_every_data_set_layer_and_expert() -> None:
    root = ET.fromstring(routing_map(make_routing()))
    titles = {title.text: rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") for title in rect}
    assert len(titles) == 3 * 2 * 2
    assert titles["verse, layer 1, verse: 100.0%"].get("fill") == "#08306b"
    assert titles["verse, layer 1, law: 0.0%"].get("fill") == "#ffffff"
    assert "a & b, layer 0, law: 50.0%" in titles
