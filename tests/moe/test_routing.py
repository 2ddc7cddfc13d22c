"""A router that starts from hidden states knows whose token it sees, whatever all tokens have in common; and shares of
tokens by expert, layer and data set are counted in the model itself."""

import xml.etree.ElementTree as ET

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from finefit.artifacts.records import Routing, SourceRouting
from finefit.errors import DataError
from finefit.model.experts import record_routing, routers_of
from finefit.moe.routing import fit_centroids, measure_routing, num_shared, own_share, routing_map
from tests.conftest import make_model
from tests.mixtures import make_mixture

torch.set_num_threads(1)
Rows = dict[str, list[tuple[int, ...]]]


def make_rows(*experts: tuple[str, int, int], count: int = 16, length: int = 12, before: tuple[int, ...] = ()) -> Rows:
    """Of each expert rows of tokens between two numbers, behind the same first tokens."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: [(*before, *torch.randint(low, high, (length,), generator=generator).tolist()) for _ in range(count)]
        for name, low, high in experts
    }


DOMAINS = (("a", 10, 50), ("b", 100, 140), ("c", 200, 240))


def telling_model() -> LlamaForCausalLM:
    """Tokens of a domain lean a little into a direction of its own; half of the hidden values are loud and tell
    nothing, and all tokens lean far into one direction, as in trained models."""
    model, generator = make_model(), torch.Generator().manual_seed(4)
    embedding = model.get_input_embeddings().weight.data
    embedding[:, :8] *= 5
    for at, (_, low, high) in enumerate(DOMAINS):
        embedding[low:high, 8:] += torch.randn(8, generator=generator) * 0.02 * (1 + at)
    embedding += torch.randn(16, generator=generator) * 0.2
    return model


def test_held_out_tokens_go_to_their_own_expert_in_spite_of_what_all_have_in_common() -> None:
    found = fit_centroids(telling_model(), make_rows(*DOMAINS))
    assert len(found.routers_EH) == 2
    assert found.routers_EH[0].shape == (3, 16)
    assert all(share > 0.9 for shares in found.own.values() for share in shares)
    assert found.tokens == {"a": 12 * 12, "b": 12 * 12, "c": 12 * 12}
    assert {name: len(rows) for name, rows in found.held.items()} == {"a": 4, "b": 4, "c": 4}


def test_experts_with_the_same_rows_cannot_be_told_apart() -> None:
    rows = make_rows(("a", 10, 60), count=32)["a"]
    found = fit_centroids(make_model(), {"a": rows[:16], "b": rows[16:]})
    assert all(0.2 < share < 0.8 for shares in found.own.values() for share in shares)


@pytest.mark.parametrize("order", [1, -1], ids=["as they are", "the other way round"])
def test_two_experts_with_the_same_rows_are_refused_whatever_a_third_has(order: int) -> None:
    rows = make_rows(("a", 10, 50), ("c", 200, 240))
    with pytest.raises(DataError, match="a and b have the same rows"):
        fit_centroids(make_model(), {"a": rows["a"], "c": rows["c"], "b": rows["a"][::order]})


def test_rows_that_differ_only_where_they_are_held_out_are_refused() -> None:
    rows = make_rows(("a", 10, 50), count=8)["a"]
    other = [(9, at) if at % 4 == 3 else row for at, row in enumerate(rows)]
    with pytest.raises(DataError, match="a and b have the same rows"):
        fit_centroids(make_model(), {"a": rows, "b": other})


def test_choices_are_decided_at_the_median_and_not_final() -> None:
    model, rows = make_model(), make_rows(("a", 10, 14), ("b", 100, 104))
    found = fit_centroids(model, rows)
    states: list[Tensor] = []
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0]))
    with torch.no_grad():
        for name, several in rows.items():
            for row in several:
                if row not in found.held[name]:
                    model(torch.tensor([row]))
    handle.remove()
    logits = torch.cat(states) @ found.routers_EH[1].T
    assert float((logits[:, 0] - logits[:, 1]).abs().median()) == pytest.approx(2.0, rel=0.01)


def test_what_stands_before_every_row_is_not_looked_at() -> None:
    before = (7, 8, 9, 7, 8)
    found = fit_centroids(make_model(), make_rows(("a", 10, 14), ("b", 100, 104), before=before))
    assert found.skipped == 5
    assert found.tokens["a"] == 12 * 12


def test_a_single_row_shows_nothing_of_what_all_have_in_common() -> None:
    assert num_shared([(5, 6, 7)]) == num_shared([(5, 6, 7), (5, 6, 7)]) == 0
    assert num_shared([(5, 6, 7), (5, 6, 8)]) == 2


def test_rows_that_are_alike_to_their_end_leave_a_token() -> None:
    rows: Rows = {"a": [(5, 6), (5, 6, 7)], "b": [(5, 6, 8), (5, 6, 9)]}
    found = fit_centroids(make_model(), rows)
    assert found.skipped == 1


def test_rows_of_any_length_looked_at_together_give_what_each_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        name: [row[: 3 + at % 9] for at, row in enumerate(several)] for name, several in make_rows(*DOMAINS).items()
    }
    together = fit_centroids(telling_model(), rows)
    monkeypatch.setattr("finefit.moe.routing._TOKENS", 1)
    alone = fit_centroids(telling_model(), rows)
    assert together.own == alone.own
    for one, other in zip(together.routers_EH, alone.routers_EH, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_equal_rows_stand_on_one_side_alone() -> None:
    rows = make_rows(("a", 10, 14), ("b", 100, 104), count=8)
    twice = {name: [row for row in several for _ in range(4)] for name, several in rows.items()}
    found = fit_centroids(make_model(), twice)
    assert found.tokens == {"a": 6 * 12, "b": 6 * 12}
    with pytest.raises(DataError, match="expert a has 1 different rows"):
        fit_centroids(make_model(), {"a": rows["a"][:1] * 8, "b": rows["b"]})


def test_the_model_is_left_without_hooks() -> None:
    model = make_model()
    fit_centroids(model, make_rows(("a", 10, 14), ("b", 100, 104), count=4))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_dense_model_has_no_routers_and_qk_norms_are_none() -> None:
    width = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "head_dim": 8}
    config = Qwen3Config(**width, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    assert routers_of(Qwen3ForCausalLM(config)) == {}
    with record_routing([]) as said:
        assert said == []


# where tokens go

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
    assert own_share(make_routing()) == {"law": (0.9, 0.7), "verse": (0.6, 1.0)}


def test_the_map_is_an_svg_with_a_cell_for_every_data_set_layer_and_expert() -> None:
    root = ET.fromstring(routing_map(make_routing()))
    titles = {title.text: rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") for title in rect}
    assert len(titles) == 3 * 2 * 2
    assert titles["verse, layer 1, verse: 100.0%"].get("fill") == "#08306b"
    assert titles["verse, layer 1, law: 0.0%"].get("fill") == "#ffffff"
    assert "a & b, layer 0, law: 50.0%" in titles
