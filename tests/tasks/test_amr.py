"""The AMR task over rows: all items count, what is no graph counts as nothing found, gold is right or repaired in the
open."""

import random
from pathlib import Path
from typing import Any, get_args

import pytest

from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.evaluate.score import score_item
from finefit.spec.schema import Evaluation
from finefit.spec.tasks import Amr, AmrForm
from finefit.stats.metrics import value
from finefit.tasks import NoResult, Reply, ScoredReply, Task
from finefit.tasks.amr import (
    Method,
    amr_task,
    build_row,
    concepts,
    last_result,
    prompt_of,
    read_graphs,
    skeleton,
    target_of,
)
from finefit.tasks.amr_graphs import parse, write
from finefit.tasks.make import make_task
from tests.tasks.perturbed import pairs, perturbed
from tests.tasks.test_amr_graphs import corpus_f1, matched, of_the_package

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


def test_concepts_are_written_alike_on_both_sides_unless_they_stay_as_written() -> None:
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
        built = build_row(form, a_row(write(gold)))
        found = counts(task, built.answer, built)
        assert found["matched"] == found["predicted"] == found["gold"]
        assert built.prompt[-1].content.endswith("The boy wants to go.")


def build(row: Row, **form: Any) -> Row:
    return build_row(AmrForm(kind="amr", **form), row)


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
    with pytest.raises(NoResult, match="is not a sentence with a graph"):
        build(row)


def test_gold_with_words_behind_it_is_refused() -> None:
    with pytest.raises(NoResult, match="comes after the graph"):
        a_task().require(a_row(f"{GOLD} (x / y)"))


# What is asked and answered by each method, and that the last result is found again.

GRAPH = parse('(w / want-01 :polarity - :ARG0 (b / boy :quant 2) :ARG1 (g / go-02 :ARG0 b :name "Salt Lake"))')
WRITTEN = '(w / want-01 :polarity - :ARG0 (b / boy :quant 2) :ARG1 (g / go-02 :ARG0 b :name "Salt Lake"))'
METHODS: tuple[Method, ...] = get_args(Method)


def test_the_skeleton_has_concepts_for_variables_and_for_what_is_met_again() -> None:
    assert skeleton(GRAPH) == '(want-01 :polarity - :ARG0 (boy :quant 2) :ARG1 (go-02 :ARG0 (boy) :name "Salt Lake"))'


def test_concepts_stand_in_the_order_of_their_writing_each_as_often_as_it_has_nodes() -> None:
    assert concepts(parse("(c / cat :mod (c2 / cat))")) == "concept_1 | cat\nconcept_2 | cat"


CONCEPTS = "concept_1 | want-01\nconcept_2 | boy\nconcept_3 | go-02"
RELATIONS = """\
want-01 | :polarity | -
want-01 | :ARG0 | boy
want-01 | :ARG1 | go-02
boy | :quant | 2
go-02 | :ARG0 | boy
go-02 | :name | "Salt Lake\""""
TARGETS = {
    "baseline": WRITTEN,
    "mtup2": f"Task 1: {skeleton(GRAPH)}\nTask 2: {WRITTEN}",
    "mtup3a": (
        f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: AMR_NO_VAR]\n{skeleton(GRAPH)}\n[STEP 3: AMR_WITH_VAR]\n{WRITTEN}"
    ),
    "mtup3b": f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: RELATIONS]\n{RELATIONS}\n[STEP 3: AMR_WITH_VAR]\n{WRITTEN}",
    "mtup4": (
        f"[STEP 1: CONCEPTS]\n{CONCEPTS}\n[STEP 2: RELATIONS]\n{RELATIONS}\n"
        f"[STEP 3: AMR_NO_VAR]\n{skeleton(GRAPH)}\n[STEP 4: AMR_WITH_VAR]\n{WRITTEN}"
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_of_a_method_is_its_sub_tasks_one_behind_the_other(method: Method) -> None:
    assert target_of(GRAPH, method) == TARGETS[method]


@pytest.mark.parametrize("method", METHODS)
def test_the_last_result_is_found_in_what_was_built(method: Method) -> None:
    assert (
        last_result(target_of(GRAPH, method), method) == WRITTEN if method in ("baseline", "mtup2") else f"\n{WRITTEN}"
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_prompt_names_every_label_that_the_answer_must_have_and_the_sentence_last(method: Method) -> None:
    prompt = prompt_of("The boys do not want to go.", method)
    assert prompt.endswith("\nSentence: The boys do not want to go.")
    labels = [line.split("]")[0] + "]" for line in TARGETS[method].splitlines() if line.startswith("[STEP")]
    labels += [line[:7] for line in TARGETS[method].splitlines() if line.startswith("Task")]
    assert all(f"\n{label} " in prompt for label in labels)
    assert len(labels) == (0 if method == "baseline" else int(method[4]))


def test_every_method_asks_in_words_of_its_own() -> None:
    assert len({prompt_of("x", method) for method in METHODS}) == len(METHODS)


def test_of_a_model_that_does_not_stop_the_first_sentence_counts() -> None:
    answer = "Task 1: (a)\nTask 2: (a / a)\nTask 1: (b)\nTask 2: (b / b)"
    assert last_result(answer, "mtup2").startswith("(a / a)")


def test_a_label_may_be_written_in_bold_or_in_small_letters() -> None:
    assert last_result("**Task 1:** (a)\n**task 2:** (a / a)", "mtup2") == "(a / a)"


def test_an_answer_without_the_last_label_has_no_result_although_it_holds_a_graph() -> None:
    with pytest.raises(NoResult, match=r"the answer has no `Task 2:`"):
        last_result("Task 1: (a / a)", "mtup2")
    with pytest.raises(NoResult, match="the answer is empty"):
        last_result(" \n", "mtup4")


# Files of graphs

GRAPH_FILE = (
    "#::snt one\n(a / con mèo)\n\t\n#::snt two\n(b / bé\n    :mod(c / con)\n    :mod(c1 / nhỏ))\n\n#::snt "
    "three\n(d / đi)\n#::snt two\n(e / em_bé)\n"
)
AMR = Amr(kind="amr")


def blocks(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def gold(tmp_path: Path) -> Path:
    return blocks(tmp_path / "gold.txt", GRAPH_FILE)


def test_every_block_is_found_although_a_separator_holds_a_tab_or_is_missing(gold: Path) -> None:
    found = read_graphs(gold)
    assert [(block.number, block.sentence) for block in found] == [(1, "one"), (2, "two"), (3, "three"), (4, "two")]
    assert len(found) == GRAPH_FILE.count("::snt")
    assert found[0].place == "gold.txt:1"


def test_a_block_without_a_graph_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.txt:1 has a ::snt line but no graph"):
        read_graphs(blocks(tmp_path / "mine.txt", "#::snt one\n\n#::snt two\n(a / b)\n"))


# Smatch on published graphs, and on files with the quirks of real annotators; skipped where they are not there.

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TRAIN, TEST = DATA / "amr_qald9" / "qald-9-amr-train.txt", DATA / "amr_qald9" / "qald-9-amr-test.txt"
published = pytest.mark.skipif(not TEST.exists(), reason="the published graphs are not here")


def against_themselves(path: Path, settings: Amr = AMR) -> list[ScoredReply]:
    task = amr_task("amr", settings, form=None)
    found = []
    for block in read_graphs(path):
        messages = (Message("user", block.sentence), Message("assistant", block.graph))
        row = Row(source=block.source, number=block.number, messages=messages)
        task.require(row)
        found.append(task.read(Reply(text=block.graph), row))
    return found


@published
@pytest.mark.parametrize(("path", "count"), [(TEST, 150), (TRAIN, 408)])
def test_every_published_graph_matches_itself_wholly(path: Path, count: int) -> None:
    found = against_themselves(path)
    assert len(found) == count
    assert all(one.counts["matched"] == one.counts["predicted"] == one.counts["gold"] > 0 for one in found)


@published
@pytest.mark.parametrize("name", ["vlsp_test_ground_truth.txt", "vlsp_train.txt"])
def test_quirky_files_match_themselves_once_a_recorded_repair_is_on(name: str) -> None:
    path = DATA / "seed_shapes" / name
    found = against_themselves(path, Amr(kind="amr", repair_gold=True))
    assert len(found) == path.read_text(encoding="utf-8").count("::snt")
    assert all(one.counts["matched"] == one.counts["predicted"] == one.counts["gold"] > 0 for one in found)
    if name == "vlsp_train.txt":
        with pytest.raises(NoResult, match="twice"):
            against_themselves(path)


@published
def test_a_hundred_perturbed_graphs_score_as_the_package_scores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    drawn = [
        (perturbed(gold, chance), gold)
        for gold in chance.sample([parse(block.graph) for block in read_graphs(TRAIN)], 100)
    ]
    theirs = [of_the_package(predicted, gold, monkeypatch) for predicted, gold in drawn]
    ours = [(one.matched, one.predicted, one.gold) for one in (matched(predicted, gold) for predicted, gold in drawn)]
    print(f"\nSmatch of 100 perturbed graphs: {corpus_f1(ours):.3f}, by the package {corpus_f1(theirs):.3f}")
    assert corpus_f1(ours) == pytest.approx(corpus_f1(theirs), abs=5e-4)
    assert 0.6 < corpus_f1(ours) < 0.95
