"""Files of graphs are read whole and put side by side by their sentences; what has no partner is an error that names it."""

from pathlib import Path

import pytest

from finefit.data.tasks.amr import smatch_of_files
from finefit.data.tasks.amr.files import align, read_graphs
from finefit.errors import DataError
from finefit.spec.tasks import Amr

GOLD = "#::snt one\n(a / con mèo)\n\t\n#::snt two\n(b / bé\n    :mod(c / con)\n    :mod(c1 / nhỏ))\n\n#::snt three\n(d / đi)\n#::snt two\n(e / em_bé)\n"
AMR = Amr(kind="amr")


def blocks(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def gold(tmp_path: Path) -> Path:
    return blocks(tmp_path / "gold.txt", GOLD)


def test_every_block_is_found_although_a_separator_holds_a_tab_or_is_missing(gold: Path) -> None:
    found = read_graphs(gold)
    assert [(block.number, block.sentence) for block in found] == [(1, "one"), (2, "two"), (3, "three"), (4, "two")]
    assert len(found) == GOLD.count("::snt")
    assert found[0].place == "gold.txt:1"


def test_gold_against_itself_is_one_for_every_sentence(gold: Path) -> None:
    found = smatch_of_files(gold, gold, AMR)
    assert [sentence for sentence, _ in found] == ["one", "two", "three", "two"]
    assert all(
        reading.counts["matched"] == reading.counts["predicted"] == reading.counts["gold"] for _, reading in found
    )


def test_graphs_are_put_together_by_sentence_and_equal_sentences_in_their_order(gold: Path, tmp_path: Path) -> None:
    mine = blocks(
        tmp_path / "mine.txt",
        "#::snt two\n(b / first)\n\n#::snt three\n(d / đi)\n\n#::snt two\n(e / second)\n\n#::snt one\n(a / con_mèo)\n",
    )
    assert [(one.graph, other.number) for one, other in align(read_graphs(mine), read_graphs(gold))] == [
        ("(a / con_mèo)", 1),
        ("(b / first)", 2),
        ("(d / đi)", 3),
        ("(e / second)", 4),
    ]


def test_a_graph_that_was_dropped_is_an_error_that_names_its_sentence(gold: Path, tmp_path: Path) -> None:
    mine = blocks(tmp_path / "mine.txt", GOLD.replace("#::snt three\n(d / đi)\n", ""))
    with pytest.raises(DataError) as caught:
        smatch_of_files(mine, gold, AMR)
    assert (
        caught.value.problem
        == "3 predicted and 4 gold graphs do not belong together: gold.txt:3 has no predicted graph for `three`"
    )
    with pytest.raises(
        DataError, match=r"mine\.txt:3 has no gold graph for `three`|gold\.txt:3 has no gold graph for `three`"
    ):
        smatch_of_files(gold, mine, AMR)


def test_files_that_are_shifted_against_each_other_are_an_error(gold: Path, tmp_path: Path) -> None:
    shifted = blocks(tmp_path / "mine.txt", GOLD.partition("\t\n")[2] + "\n#::snt four\n(f / f)\n")
    with pytest.raises(
        DataError, match=r"4 predicted and 4 gold graphs do not belong together: .*no predicted graph for `one`"
    ):
        smatch_of_files(shifted, gold, AMR)


def test_a_sentence_that_the_gold_file_has_less_often_is_an_error(gold: Path, tmp_path: Path) -> None:
    mine = blocks(tmp_path / "mine.txt", GOLD + "#::snt one\n(x / y)\n")
    with pytest.raises(DataError, match=r"mine\.txt:5 has no gold graph for `one`"):
        smatch_of_files(mine, gold, AMR)


def test_a_block_without_a_graph_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.txt:1 has a ::snt line but no graph"):
        read_graphs(blocks(tmp_path / "mine.txt", "#::snt one\n\n#::snt two\n(a / b)\n"))


def test_a_prediction_that_is_no_graph_matches_nothing_and_adds_nothing(gold: Path, tmp_path: Path) -> None:
    mine = blocks(tmp_path / "mine.txt", GOLD.replace("(a / con mèo)", "()"))
    reading = dict(smatch_of_files(mine, gold, AMR))["one"]
    assert (reading.counts["matched"], reading.counts["predicted"], reading.counts["gold"]) == (0, 0, 2)


def test_gold_that_defines_a_variable_twice_is_an_error_naming_its_row_unless_it_is_repaired(tmp_path: Path) -> None:
    gold = blocks(
        tmp_path / "gold.txt",
        "#::snt one\n(a / b)\n\n#::snt two\n(m / mèo :classifier(c / con) :theme(c1 / chuột :classifier(c / con)))\n",
    )
    with pytest.raises(DataError, match=r"gold\.txt:2 has a graph that defines c twice"):
        smatch_of_files(gold, gold, AMR)
    (_, (_, reading)) = smatch_of_files(gold, gold, Amr(kind="amr", repair_gold=True))
    assert (
        reading.counts["matched"] == reading.counts["predicted"] == reading.counts["gold"] == 8
    )  # the gold itself is right
    assert reading.extracted["gold_repairs"] == ["c / con is c2 now, since c was defined before"]
