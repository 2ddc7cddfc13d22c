"""The AMR task over rows: all items count, what is no graph counts as nothing found, gold is right or repaired in the open."""

import random
from pathlib import Path
from typing import Any

import pytest

from finefit.data.rows import Message, Row
from finefit.data.tasks import NoResult, Reply, Task, make_build, make_task
from finefit.data.tasks.amr.notation import write
from finefit.evaluate.score import score_item
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import AmrForm
from finefit.stats.metrics import value
from tests.data.amr.perturbed import pairs

GOLD = "(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0 b))"
TRIPLES = 7.0
TWICE = "(m / mèo :classifier(c / con) :theme(c1 / chuột :classifier(c / con)))"


def a_row(answer: str = GOLD, **more: Any) -> Row:
    return Row(
        source="gold.txt",
        number=7,
        messages=(Message("user", "The boy wants to go."), Message("assistant", answer)),
        **more,
    )


def a_task(form: AmrForm | None = None, **settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": "amr", **settings}}), form=form)


def counts(task: Task, answer: str, row: Row | None = None) -> dict[str, float]:
    return score_item(task, 0, row or a_row(), prompt="", reply=Reply(text=answer)).counts


def test_an_answer_that_says_the_same_in_other_words_is_right() -> None:
    found = counts(a_task(), "Here: (x / want-01 :ARG1 (y / go-02 :ARG0 (z / boy)) :ARG0 z). Done.")
    assert found == {"matched": TRIPLES, "predicted": TRIPLES, "gold": TRIPLES, "parsable": 1.0, "root": 1.0}


@pytest.mark.parametrize(
    "answer", ["", "I do not know.", "(w / want-01 :ARG0 (b / boy", "(w / want-01 :ARG0 (b / boy) :ARG1 (b / bird))"]
)
def test_an_answer_that_is_no_graph_matches_nothing_adds_nothing_and_leaves_all_to_be_found(answer: str) -> None:
    item = score_item(a_task(), 0, a_row(), prompt="", reply=Reply(text=answer))
    assert item.counts == {"matched": 0.0, "predicted": 0.0, "gold": TRIPLES, "parsable": 0.0, "root": 0.0}
    assert item.failure
    assert item.reference == GOLD
    assert item.counts == a_task().nothing(a_row())


def test_the_score_is_micro_over_all_pairs_and_failures_pull_it_down() -> None:
    task = a_task()
    right, wrong = counts(task, GOLD), counts(task, "nothing")
    scores = {metric.name: value(metric, [right, right, wrong]) for metric in task.metrics}
    assert scores == {
        "smatch": pytest.approx(2 * 14 / (14 + 21)),  # among the two that can be read it would be 1
        "precision": 1.0,
        "recall": pytest.approx(14 / 21),
        "parsable": pytest.approx(2 / 3),
        "root": pytest.approx(2 / 3),
    }


def test_another_root_is_seen() -> None:
    assert counts(a_task(), "(g / go-02 :ARG0 (b / boy))")["root"] == 0.0


def test_spelling_is_made_the_same_on_both_sides_unless_it_is_to_stay() -> None:
    row = a_row("(h / hôm_nay)")
    assert counts(a_task(), "(h / hôm nay)", row)["matched"] == 2.0
    assert counts(a_task(concepts="as_written"), "(h / hôm nay)", row)["matched"] == 1.0
    assert a_task(concepts="as_written").signature["concepts"] == "as_written"


def test_gold_that_defines_a_variable_twice_is_an_error_unless_a_recorded_repair_is_on() -> None:
    with pytest.raises(
        NoResult, match=r"has a graph that defines c twice; give the second another name, or set repair_gold: true"
    ):
        a_task().require(a_row(TWICE))
    task = a_task(repair_gold=True)
    item = score_item(
        task,
        0,
        a_row(TWICE),
        prompt="",
        reply=Reply(text="(m / mèo :classifier (c / con) :theme (d / chuột :classifier (e / con)))"),
    )
    assert item.counts["matched"] == item.counts["predicted"] == item.counts["gold"] == 8.0
    assert item.extracted["gold_repairs"] == ["c / con is c2 now, since c was defined before"]
    assert task.signature["repair_gold"] == "true"
    assert counts(task, TWICE, a_row(TWICE))["matched"] == 8.0  # the gold itself is right
    assert (
        counts(task, TWICE, a_row("(m / mèo)"))["parsable"] == 0.0
    )  # where the gold needs no repair, an answer gets none


def test_the_nearest_of_several_references_counts() -> None:
    item = score_item(
        a_task(), 0, a_row("(x / other)", references=("(x / other)", GOLD)), prompt="", reply=Reply(text=GOLD)
    )
    assert item.counts["matched"] == TRIPLES
    assert item.reference == GOLD


def test_mending_is_scored_beside_the_answer_as_it_stands_for_the_same_items() -> None:
    task = a_task(mend_answers=True)
    cut, sound = "(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02 :ARG0", GOLD
    items = [score_item(task, 0, a_row(), prompt="", reply=Reply(text=answer)) for answer in (cut, sound, "nothing")]
    scores = {metric.name: value(metric, [item.counts for item in items]) for metric in task.metrics}
    assert scores["smatch"] == pytest.approx(2 * 7 / (7 + 21))
    assert scores["smatch_mended"] == pytest.approx(2 * 13 / (13 + 21))
    assert [scores["parsable"], scores["parsable_mended"]] == pytest.approx([1 / 3, 2 / 3])
    assert items[0].failure == ":ARG0 has no target"  # mended or not, the answer itself is none
    assert items[0].extracted["graph"] is None
    assert items[0].extracted["mended"] == "(w / want-01 :ARG0 (b / boy) :ARG1 (g / go-02))"
    assert items[0].extracted["mends"][0] == ":ARG0 has no target: left out"
    assert items[2].counts == task.nothing(a_row())


def test_mending_changes_nothing_where_nothing_is_wrong() -> None:
    task = a_task(mend_answers=True)
    for predicted, gold in pairs(20):
        found = counts(task, write(predicted), a_row(write(gold)))
        assert (found["matched_mended"], found["predicted_mended"]) == (found["matched"], found["predicted"])


def test_the_own_score_is_the_same_with_and_without_mending() -> None:
    chance = random.Random(1)
    for predicted, gold in pairs(20):
        text = write(predicted)
        text = text[: chance.randrange(len(text))]
        with_it, without = (counts(a_task(mend_answers=mends), text, a_row(write(gold))) for mends in (True, False))
        assert {name: with_it[name] for name in without} == without


@pytest.mark.parametrize("method", ["baseline", "mtup2", "mtup3a", "mtup3b", "mtup4"])
def test_what_is_built_is_read_again_and_right(method: Any) -> None:
    form = AmrForm(kind="amr", method=method)
    task = a_task(form)
    for _, gold in pairs(10):
        built = make_build(form, base=Path())(a_row(write(gold)))
        found = counts(task, built.answer, built)
        assert found["matched"] == found["predicted"] == found["gold"]
        assert built.prompt[-1].content.endswith("The boy wants to go.")


def build(row: Row, **form: Any) -> Row:
    return make_build(AmrForm(kind="amr", **form), base=Path())(row)


def test_building_keeps_system_message_place_and_references() -> None:
    row = a_row(references=(GOLD, "(x / y)"))
    row = Row(
        source=row.source,
        number=row.number,
        messages=(Message("system", "You parse."), *row.messages),
        references=row.references,
    )
    built = build(row, method="mtup2")
    assert (built.place, built.messages[0]) == (row.place, row.messages[0])
    assert [reference.splitlines()[1] for reference in built.references] == [f"Task 2: {GOLD}", "Task 2: (x / y)"]


def test_building_spells_concepts_one_way_or_leaves_them() -> None:
    assert build(a_row("(h / hôm nay)")).answer == "(h / hôm_nay)"
    assert build(a_row("(h / hôm nay)"), concepts="as_written").answer == "(h / hôm nay)"


def test_a_repair_is_told_in_the_row_and_without_it_the_row_cannot_be_built() -> None:
    assert build(a_row(TWICE), repair_gold=True).repairs == ("c / con is c2 now, since c was defined before",)
    assert build(a_row()).repairs == ()
    assert build(a_row(references=(GOLD, TWICE)), repair_gold=True).repairs == (
        "c / con is c2 now, since c was defined before",
    )
    with pytest.raises(NoResult, match="defines c twice"):
        build(a_row(TWICE))


@pytest.mark.parametrize(
    "row",
    [
        Row(source="a", number=1, text="plain"),
        Row(source="a", number=1, messages=(Message("assistant", GOLD),)),
        a_row(rejected=(Message("assistant", "x"),), num_given=1),
    ],
    ids=["plain text", "no sentence", "a pair"],
)
def test_what_is_no_sentence_with_a_graph_cannot_be_built(row: Row) -> None:
    with pytest.raises(NoResult, match="is no sentence with a graph"):
        build(row)


def test_gold_with_words_behind_it_is_refused() -> None:
    with pytest.raises(NoResult, match="stands behind the graph"):
        a_task().require(a_row(f"{GOLD} (x / y)"))
