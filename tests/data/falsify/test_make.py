import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.artifacts.journal import read_lines
from finefit.data.falsify.falsified import RuleName
from finefit.data.falsify.make import ALL_RULES, Made, make_pairs
from finefit.data.falsify.words import KindOfTerm, Words
from finefit.data.falsify.written import pair_record, write_pairs
from finefit.data.fingerprint import normalise
from finefit.data.pieces import Work
from finefit.data.read import open_source
from finefit.data.render import Renderer
from finefit.data.rows import BadRow, Image, Message, Row, ToolCall
from finefit.errors import DataError
from finefit.spec.rows import Source
from tests.conftest import make_tokenizer
from tests.data.conftest import WIDE
from tests.data.falsify.corpus import make_row, make_rows, row_of

ROOT = Path(__file__).parents[3]
ROWS = make_rows(150)


@pytest.fixture(scope="module")
def made() -> Made:
    return make_pairs(ROWS, seed=7)


def _changes(made: Made) -> dict[str, list[tuple[str, str, str, int]]]:
    changes: dict[str, list[tuple[str, str, str, int]]] = {}
    for pair in made.pairs:
        changes.setdefault(pair.row.place, []).append(
            (pair.change.rule, pair.change.before, pair.change.after, pair.change.at)
        )
    return changes


def test_lengths_and_words_tell_no_side(made: Made) -> None:
    assert made.audit is not None
    assert made.audit.warnings == ()
    for pair_lengths in made.audit.length.values():
        assert 0.47 < pair_lengths.within < 0.53


def test_differences_of_every_size_are_even(made: Made) -> None:
    assert made.audit is not None
    assert len(made.audit.sizes) >= 6
    assert all(abs(size.longer - size.shorter) <= 5 for size in made.audit.sizes)
    assert sum(size.longer for size in made.audit.sizes) == pytest.approx(
        sum(size.shorter for size in made.audit.sizes), abs=4
    )


def test_every_rule_makes_its_part(made: Made) -> None:
    assert {rule: count.made for rule, count in made.rules.items()} == Counter(pair.change.rule for pair in made.pairs)
    assert all(0.1 < count.share < 0.4 for count in made.rules.values())
    assert sum(count.share for count in made.rules.values()) == pytest.approx(1)


def test_no_pair_is_a_no_op_and_no_wrong_side_is_right_elsewhere(made: Made) -> None:
    right = {normalise(row.answer) for row in ROWS}
    for pair in made.pairs:
        assert pair.change.answer == pair.row.answer
        assert normalise(pair.change.text) not in right
        assert normalise(pair.change.before) != normalise(pair.change.after)


def test_the_same_seed_makes_the_same_pairs_in_whatever_order_rows_come(made: Made) -> None:
    again = make_pairs(ROWS[::-1], seed=7)
    assert _changes(again) == _changes(made)
    assert [pair.row.number for pair in again.pairs] == sorted((pair.row.number for pair in again.pairs), reverse=True)
    assert _changes(make_pairs(ROWS, seed=8)) != _changes(made)


def test_every_process_makes_the_same_pairs() -> None:
    """Whatever the order of its sets."""
    code = """
from finefit.data.falsify.make import make_pairs
from tests.data.falsify.corpus import make_rows
print([(pair.change.before, pair.change.after) for pair in make_pairs(make_rows(12), seed=0).pairs])"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
        )
        for seed in ("1", "2")
    ]
    assert printed[0].stdout == printed[1].stdout != "[]\n"


def test_a_row_has_the_same_options_whatever_it_is_called() -> None:
    renamed = [replace(row, source="other.jsonl", number=row.number + 1000) for row in ROWS[:20]]
    first, second = make_pairs(ROWS[:20], seed=0), make_pairs(renamed, seed=0)
    assert list(_changes(first).values()) == list(_changes(second).values())


ODD: tuple[Row | BadRow, ...] = (
    BadRow("rows.jsonl", 900, "is no JSON"),
    Row(source="rows.jsonl", number=901, text="plain"),
    replace(make_row(902), rejected=(Message("assistant", "no"),)),
    replace(make_row(903), is_good=False),
    replace(make_row(904), images=(Image(path="a.png"),)),
    replace(make_row(905), messages=(Message("user", "q"), Message("assistant", "a", "thought"))),
    replace(make_row(906), messages=(Message("user", "q"), Message("assistant", "a", "", (ToolCall("f", "{}"),)))),
    row_of("yes", number=907),
    replace(make_row(1), number=908),
)


def test_every_row_that_is_not_used_has_its_reason() -> None:
    made = make_pairs([*ROWS[:5], *ODD], seed=0, shares={"entity": 1.0, "number": 1.0, "negation": 1.0})
    assert (made.read, made.used) == (14, 5)
    assert {unused.place.split(":")[1]: unused.reason for unused in made.unused} == {
        "900": "is no JSON",
        "901": "is plain text, without a prompt and an answer",
        "902": "is a preference pair already",
        "903": "has an answer that is judged wrong",
        "904": "has images, which the rules cannot see",
        "905": "has an answer with tool calls or reasoning, which the rules cannot change",
        "906": "has an answer with tool calls or reasoning, which the rules cannot change",
        "907": "has an answer that no rule can change: entity, number, negation",
        "908": "says the same as rows.jsonl:1",
    }


def test_an_answer_that_is_judged_right_is_used() -> None:
    assert make_pairs([replace(make_row(1), is_good=True)], seed=0).used == 1


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 30).map(make_row) | st.sampled_from(ODD), max_size=8), st.integers(1, 4), st.integers(0, 9)
)
def test_used_and_unused_are_all_that_was_read(rows: list[Row | BadRow], per_row: int, seed: int) -> None:
    made = make_pairs(rows, seed=seed, per_row=per_row)
    assert made.read == len(rows) == made.used + len(made.unused)
    places = Counter(pair.row.place for pair in made.pairs)
    assert len(places) <= made.used
    assert all(1 <= count <= per_row for count in places.values())
    assert len({(pair.row.messages, pair.change.rule) for pair in made.pairs}) == len(made.pairs)
    assert (made.audit is None) == (not made.pairs)


def test_another_right_answer_of_the_row_is_never_the_wrong_side() -> None:
    words = Words(kinds={"organ": KindOfTerm(words=("liver", "kidney", "lungs"))})
    other = row_of("It was the lungs.", number=2, asked="And?")

    def wrong(*references: str) -> set[str]:
        made = make_pairs(
            [row_of("It was the liver.", references=references), other], seed=0, shares={"entity": 1.0}, words=words
        )
        assert made.used + len(made.unused) == 2
        return {pair.change.text for pair in made.pairs}

    assert wrong() == {"It was the kidney."}
    assert wrong("it was the KIDNEY") == set()


def test_shares_and_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="none is left to make pairs by"):
        make_pairs(ROWS, seed=0, shares={"entity": 0.0})
    with pytest.raises(DataError, match="one is negative"):
        make_pairs(ROWS, seed=0, shares={"entity": 1.0, "number": -1.0})
    with pytest.raises(DataError, match="3 pairs of each row are asked for, by 2 rules"):
        make_pairs(ROWS, seed=0, per_row=3, shares={"entity": 1.0, "number": 1.0})


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_rule_can_be_asked_for_alone(rule: RuleName) -> None:
    made = make_pairs(ROWS[:20], seed=0, shares={rule: 1.0})
    assert made.pairs
    assert {pair.change.rule for pair in made.pairs} == {rule}
    assert list(made.rules) == [rule]
    assert made.rules[rule].impossible == 20 - made.used


def test_the_rules_load_no_torch() -> None:
    code = "import sys, finefit.data.falsify.written; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


# as files


def test_the_written_pairs_are_read_as_objective_dpo_reads_pairs(made: Made, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", made.pairs)
    rows = [
        row for row in open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows() if isinstance(row, Row)
    ]
    assert len(rows) == len(made.pairs)
    for row, pair in zip(rows, made.pairs, strict=True):
        assert (row.kind, row.messages, row.num_given) == ("pair", pair.row.messages, 1)
        assert row.rejected == (Message("assistant", pair.change.text),)
    piece = Work(Renderer(make_tokenizer(), "chat"), WIDE, pairs=True).render(rows)
    assert (piece.problems, piece.sides, piece.examples) == ({}, 2, [1] * len(rows))


def test_a_line_tells_rule_change_and_row(made: Made, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", made.pairs)
    for line in read_lines(tmp_path / "pairs.jsonl"):
        change = line["change"]
        assert (
            line["chosen"][: change["at"]] + change["after"] + line["chosen"][change["at"] + len(change["before"]) :]
            == line["rejected"]
        )
        assert line["rule"] in ALL_RULES
        assert line["row"].startswith("rows.jsonl:")


def test_earlier_calls_and_thoughts_and_tools_come_back_as_they_were(tmp_path: Path) -> None:
    call = ToolCall("lookup", '{"word": "rain"}')
    earlier = (
        Message("system", "Be brief."),
        Message("user", "q"),
        Message("assistant", "", "hm", (call,)),
        Message("tool", "wet"),
    )
    tools = '[{"name": "lookup"}]'
    row = replace(make_row(1), messages=(*earlier, make_row(1).messages[-1]), tools=tools)
    made = make_pairs([row], seed=0)
    write_pairs(tmp_path / "pairs.jsonl", made.pairs)
    (read,) = open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows()
    assert isinstance(read, Row)
    assert (read.messages, json.loads(read.tools), read.num_given) == (row.messages, json.loads(tools), 4)
    assert "tools" not in pair_record(make_pairs([make_row(1)], seed=0).pairs[0])
