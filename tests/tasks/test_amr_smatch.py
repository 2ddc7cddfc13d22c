"""Smatch: what the smatch package finds, but the same every time, in any order and any thread; never less than the best
of small graphs."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import smatch
from hypothesis import given
from hypothesis import strategies as st

from finefit.tasks.amr_notation import Node, parse, write
from finefit.tasks.amr_smatch import Match, Triples, _Search, match, triples
from tests.tasks.perturbed import pairs, shipped

RESTARTS = 20


def matched(predicted: Node, gold: Node) -> Match:
    return match(triples(predicted), triples(gold), restarts=RESTARTS)


def corpus_f1(found: list[tuple[int, int, int]]) -> float:
    both, predicted, gold = (sum(counts) for counts in zip(*found, strict=True))
    return float(2 * both / (predicted + gold))


def of_the_package(predicted: Node, gold: Node, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    monkeypatch.setattr(smatch, "iteration_num", RESTARTS + 1)
    smatch.match_triple_dict.clear()
    found: tuple[int, int, int] = smatch.get_amr_match(write(predicted), write(gold))
    return found


def test_the_corpus_score_is_that_of_the_smatch_package_to_three_decimals_on_perturbed_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = pairs(100)
    theirs = [of_the_package(predicted, gold, monkeypatch) for predicted, gold in drawn]
    found = [matched(predicted, gold) for predicted, gold in drawn]
    ours = [(one.matched, one.predicted, one.gold) for one in found]
    assert [counts[1:] for counts in ours] == [counts[1:] for counts in theirs]
    assert corpus_f1(ours) == pytest.approx(corpus_f1(theirs), abs=5e-4)
    assert 0.6 < corpus_f1(ours) < 0.95  # the pairs are neither equal nor strangers


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_against_gold_is_one(split: str) -> None:
    for gold in shipped(split):
        found = matched(gold, gold)
        assert found.matched == found.predicted == found.gold


QUIRKY = [
    "(m / mưa\n    :time(h / hôm nay)\n    :theme(t / trời)\n    :degree(t1 / to))",
    "(a / and :op1(đ / đọc :agent(a1 / anh_ấy) :theme(s / sách)) :op2(v / viết :agent a1 :theme(t / thư)))",
]


@pytest.mark.parametrize("text", QUIRKY)
def test_quirky_gold_against_itself_is_one(text: str) -> None:
    assert matched(parse(text), parse(text)).f1 == 1


def test_the_score_of_a_pair_depends_on_nothing_but_the_pair() -> None:
    drawn = pairs(40)
    alone = [matched(predicted, gold) for predicted, gold in drawn]
    random.seed(1)
    assert [matched(predicted, gold) for predicted, gold in reversed(drawn)][::-1] == alone
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: matched(*pair), drawn)) == alone


LETTERS = st.integers(0, 3)
TRIPLES = st.builds(
    lambda concepts, attributes, relations: Triples(
        concepts=tuple(f"c{concept}" for concept in concepts),
        attributes=frozenset(
            {(0, "top", "top"), *((at % len(concepts), f"r{role}", f"v{value}") for at, role, value in attributes)}
        ),
        relations=frozenset((begin % len(concepts), f"r{role}", end % len(concepts)) for begin, role, end in relations),
    ),
    st.lists(LETTERS, min_size=1, max_size=5),
    st.lists(st.tuples(LETTERS, LETTERS, LETTERS), max_size=3),
    st.lists(st.tuples(st.integers(0, 4), LETTERS, st.integers(0, 4)), max_size=6),
)


def tangle(seed: int, size: int = 12) -> Triples:
    """Nodes that only their relations tell apart: where a climb ends hangs on where it begins."""
    chance = random.Random(seed)
    relations = {(chance.randrange(size), chance.choice("ab"), chance.randrange(size)) for _ in range(2 * size)}
    return Triples(concepts=("same",) * size, attributes=frozenset({(0, "top", "top")}), relations=frozenset(relations))


def test_the_starts_are_drawn_from_the_pair_itself() -> None:
    first, second = tangle(1), tangle(2)
    search = _Search(first, second)
    assert len({search.climb(search.drawn(random.Random(seed))) for seed in range(10)}) > 1
    assert len({match(first, second, restarts=1) for _ in range(10)}) == 1


@given(TRIPLES, TRIPLES, st.integers(0, 1000))
def test_a_step_gains_what_it_is_said_to_gain(first: Triples, second: Triples, seed: int) -> None:
    search = _Search(first, second)
    mapping = search.drawn(random.Random(seed))
    holder = {other: node for node, other in enumerate(mapping) if other != -1}
    before = search._worth(mapping)
    assert before == _agree(first, second, tuple(mapping))
    held = [search._adds(node, other, mapping) for node, other in enumerate(mapping)]
    for node, choices in enumerate(search._choices):
        for other in choices:
            after, holders = list(mapping), dict(holder)
            search._take(after, holders, node, other)
            assert search._worth(after) - before == search._gain(node, other, mapping, holder, held)
            assert holders == {to: at for at, to in enumerate(after) if to != -1}


def test_nothing_outside_is_drawn_from() -> None:
    random.seed(5)
    before = random.getstate()
    matched(*pairs(1)[0])
    assert random.getstate() == before


def best_of_all(first: Triples, second: Triples) -> int:
    """Every mapping is tried."""
    batch_limit = [*range(len(second.concepts)), *([-1] * len(first.concepts))]
    return max(
        _agree(first, second, mapping) for mapping in set(itertools.permutations(batch_limit, len(first.concepts)))
    )


def _agree(first: Triples, second: Triples, mapping: tuple[int, ...]) -> int:
    concepts = sum(
        to != -1 and concept == second.concepts[to] for concept, to in zip(first.concepts, mapping, strict=True)
    )
    attributes = {(mapping[at], role, value) for at, role, value in first.attributes}
    relations = {(mapping[begin], role, mapping[end]) for begin, role, end in first.relations}
    return concepts + len(attributes & second.attributes) + len(relations & second.relations)


@given(TRIPLES, TRIPLES)
def test_of_small_graphs_the_best_mapping_is_found(first: Triples, second: Triples) -> None:
    found = match(first, second, restarts=RESTARTS)
    assert (found.matched, found.predicted, found.gold) == (best_of_all(first, second), len(first), len(second))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("(b / boy :ARG0-of (g / go-01))", "(b / boy :arg0-of (x / go-01))"),
        ("(b / boy :mod (o / old))", "(b / boy :domain-of (o / old))"),
        ('(n / name :op1 "Salt")', "(n / NAME :op1 salt)"),
        ("(b / boy :ARG0-of (g / go-01 :ARG1 b) :ARG1-of g)", "(z / boy :ARG1-of (y / go-01 :ARG0 z))"),
    ],
    ids=["case", "mod is the inverse of domain", "quotes", "written twice is said once"],
)
def test_writings_that_mean_the_same_match_wholly(text: str, same: str) -> None:
    found = matched(parse(text), parse(same))
    assert found.matched == found.predicted == found.gold


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("(b / boy)", 2),
        ("(b / boy :ARG0-of (g / go-01))", 4),
        ("(b / boy :consist-of (g / gold))", 4),
        ("(b / boy :polarity - :quant 3)", 4),
    ],
)
def test_triples_are_concepts_attributes_relations_and_the_root(text: str, number: int) -> None:
    assert len(triples(parse(text))) == number


def test_an_inverse_role_is_turned_round_and_one_that_only_looks_like_it_is_not() -> None:
    assert triples(parse("(b / boy :ARG0-of (g / go-01))")).relations == {(1, "arg0", 0)}
    assert triples(parse("(b / boy :consist-of (g / gold))")).relations == {(0, "consist-of", 1)}


def test_texts_of_several_words_are_compared_whole() -> None:
    york, jersey = (parse(f'(n / name :op1 "New {word}")') for word in ("York", "Jersey"))
    assert matched(york, jersey).matched == matched(york, york).matched - 1


def test_more_starts_never_find_less() -> None:
    found: list[Any] = [
        [match(triples(p), triples(g), restarts=restarts).matched for p, g in pairs(20)] for restarts in (0, 5, 20)
    ]
    assert all(few <= some <= many for few, some, many in zip(*found, strict=True))


def test_an_answer_that_never_stops_is_matched_in_bounded_time() -> None:
    endless = parse(
        "(a / and" + "".join(f" :op{n} (s{n} / see-01 :ARG0 (b{n} / boy) :ARG1 (c{n} / cup))" for n in range(60)) + ")"
    )
    found = matched(endless, shipped("train")[0])
    assert found.predicted == 182 + 180
    assert found.matched <= found.gold
