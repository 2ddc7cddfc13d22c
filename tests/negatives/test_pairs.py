import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finefit.artifacts.atomic import read_lines
from finefit.data.fingerprint import normalise
from finefit.data.render import Renderer
from finefit.data.rows import BadRow, Image, Message, Row, ToolCall
from finefit.data.sources import open_source
from finefit.data.tokenizer_pool import ChunkRenderer
from finefit.errors import DataError
from finefit.negatives.lexicon import KindOfTerm, Words
from finefit.negatives.pairs import (
    ALL_RULES,
    RulePairs,
    ScoredAnswer,
    ScoredPairs,
    from_scored,
    make_pairs,
    pair_record,
)
from finefit.negatives.rules import RuleName
from finefit.spec.data import Source
from tests.conftest import make_tokenizer, write_jsonl
from tests.data.conftest import WIDE
from tests.negatives.corpus import make_row, make_rows, row_of

ROOT = Path(__file__).parents[2]
ROWS = make_rows(150)


@pytest.fixture(scope="module")
def made() -> RulePairs:
    return make_pairs(ROWS, seed=7)


def _changes(made: RulePairs) -> dict[str, list[tuple[str, str, str, int]]]:
    changes: dict[str, list[tuple[str, str, str, int]]] = {}
    for pair in made.pairs:
        changes.setdefault(pair.row.place, []).append(
            (pair.change.rule, pair.change.before, pair.change.after, pair.change.at)
        )
    return changes


def test_lengths_and_words_tell_no_side(made: RulePairs) -> None:
    assert made.audit is not None
    assert made.audit.warnings == ()
    for pair_lengths in made.audit.length.values():
        assert 0.47 < pair_lengths.within < 0.53


def test_differences_of_every_size_are_even(made: RulePairs) -> None:
    assert made.audit is not None
    assert len(made.audit.sizes) >= 6
    assert all(abs(size.longer - size.shorter) <= 5 for size in made.audit.sizes)
    assert sum(size.longer for size in made.audit.sizes) == pytest.approx(
        sum(size.shorter for size in made.audit.sizes), abs=4
    )


def test_every_rule_makes_its_part(made: RulePairs) -> None:
    assert {rule: count.made for rule, count in made.rules.items()} == Counter(pair.change.rule for pair in made.pairs)
    assert all(0.1 < count.share < 0.4 for count in made.rules.values())
    assert sum(count.share for count in made.rules.values()) == pytest.approx(1)


def test_no_pair_is_a_no_op_and_no_wrong_side_is_right_elsewhere(made: RulePairs) -> None:
    right = {normalise(row.answer) for row in ROWS}
    for pair in made.pairs:
        assert pair.change.answer == pair.row.answer
        assert normalise(pair.change.text) not in right
        assert normalise(pair.change.before) != normalise(pair.change.after)


def test_the_same_seed_makes_the_same_pairs_in_whatever_order_rows_come(made: RulePairs) -> None:
    again = make_pairs(ROWS[::-1], seed=7)
    assert _changes(again) == _changes(made)
    assert [pair.row.number for pair in again.pairs] == sorted((pair.row.number for pair in again.pairs), reverse=True)
    assert _changes(make_pairs(ROWS, seed=8)) != _changes(made)


def test_every_process_makes_the_same_pairs() -> None:
    """Whatever the order of its sets."""
    code = """
from finefit.negatives.pairs import make_pairs
from tests.negatives.corpus import make_rows
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
    BadRow("rows.jsonl", 900, "is not JSON"),
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
        "900": "is not JSON",
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
    with pytest.raises(DataError, match="all are 0"):
        make_pairs(ROWS, seed=0, shares={"entity": 0.0})
    with pytest.raises(DataError, match="one is negative"):
        make_pairs(ROWS, seed=0, shares={"entity": 1.0, "number": -1.0})
    with pytest.raises(DataError, match="3 pairs of each row are requested, but 2 rules"):
        make_pairs(ROWS, seed=0, per_row=3, shares={"entity": 1.0, "number": 1.0})


@pytest.mark.parametrize("rule", ALL_RULES)
def test_a_rule_can_be_asked_for_alone(rule: RuleName) -> None:
    made = make_pairs(ROWS[:20], seed=0, shares={rule: 1.0})
    assert made.pairs
    assert {pair.change.rule for pair in made.pairs} == {rule}
    assert list(made.rules) == [rule]
    assert made.rules[rule].impossible == 20 - made.used


def test_the_rules_load_no_torch() -> None:
    code = "import sys, finefit.negatives.pairs; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


# as files


def test_the_written_pairs_are_read_as_objective_dpo_reads_pairs(made: RulePairs, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [pair_record(pair) for pair in made.pairs])
    rows = [
        row for row in open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows() if isinstance(row, Row)
    ]
    assert len(rows) == len(made.pairs)
    for row, pair in zip(rows, made.pairs, strict=True):
        assert (row.kind, row.messages, row.num_given) == ("pair", pair.row.messages, 1)
        assert row.rejected == (Message("assistant", pair.change.text),)
    piece = ChunkRenderer(Renderer(make_tokenizer(), "chat"), WIDE, pairs=True).render(rows)
    assert (piece.problems, piece.sides, piece.examples) == ({}, 2, [1] * len(rows))


def test_a_line_tells_rule_change_and_row(made: RulePairs, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [pair_record(pair) for pair in made.pairs])
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
    write_jsonl(tmp_path / "pairs.jsonl", [pair_record(pair) for pair in made.pairs])
    (read,) = open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows()
    assert isinstance(read, Row)
    assert (read.messages, json.loads(read.tools), read.num_given) == (row.messages, json.loads(tools), 4)
    assert "tools" not in pair_record(make_pairs([make_row(1)], seed=0).pairs[0])


def _row(asked: str = "Why?", *, number: int = 1, tools: str = "") -> Row:
    return Row(
        source="a", number=number, messages=(Message("user", asked), Message("assistant", "Because.")), tools=tools
    )


def _samples(*scored: tuple[str, float]) -> list[ScoredAnswer]:
    return [ScoredAnswer(answer=answer, score=score) for answer, score in scored]


def _texts(found: ScoredPairs) -> list[tuple[str, str]]:
    return [(pair.chosen.answer, pair.rejected.answer) for pair in found.pairs]


def test_the_best_answer_is_preferred_to_the_worst() -> None:
    found = from_scored([(_row(), _samples(("fair", 0.5), ("good", 0.9), ("bad", 0.1)))], seed=0)
    assert _texts(found) == [("good", "bad")]
    assert (found.pairs[0].row.place, found.unused) == ("a:1", ())


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ((("one", 1.0),), "has 1 sampled answers, and a pair needs two"),
        ((("one", 1.0), ("two", 1.0)), "has scores from 1 to 1, which differ by no more than 0.2"),
        ((("one", 1.0), ("two", 0.85)), "has scores from 0.85 to 1, which differ by no more than 0.2"),
        (
            (("Same text.", 1.0), (" same  TEXT", 0.0)),
            "has a best and a worst answer that read the same, or one that is empty",
        ),
        ((("one", 1.0), (" ", 0.0)), "has a best and a worst answer that read the same, or one that is empty"),
    ],
)
def test_a_row_without_a_difference_is_not_used_and_says_why(
    samples: tuple[tuple[str, float], ...], reason: str
) -> None:
    found = from_scored([(_row(), _samples(*samples))], seed=0, margin=0.2)
    assert found.pairs == ()
    assert [(unused.place, unused.reason) for unused in found.unused] == [("a:1", reason)]


def test_among_equal_scores_those_are_taken_that_keep_lengths_even() -> None:
    rows = [
        (
            _row(f"Why {at}?", number=at),
            _samples((f"middle {at:03}", 1.0), (f"longermuch {at:03}", 0.0), (f"mi {at:03}", 0.0)),
        )
        for at in range(100)
    ]
    found = from_scored(rows, seed=0)
    assert found.audit is not None
    assert [(size.longer, size.shorter) for size in found.audit.sizes] == [(50, 50)]
    assert from_scored(rows[::-1], seed=0).pairs[::-1] == found.pairs


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match="a:1 has an answer whose score is not a finite number"):
        from_scored([(_row(), _samples(("one", math.nan), ("two", 1.0)))], seed=0)


@given(
    st.dictionaries(
        st.text("ab", max_size=3), st.lists(st.tuples(st.text("xy ", max_size=3), st.integers(0, 2)), max_size=4)
    )
)
def test_pairs_and_unused_are_all_rows_also_of_files_that_are_called_alike(
    rows: dict[str, list[tuple[str, int]]],
) -> None:
    found = from_scored([(_row(asked), _samples(*samples)) for asked, samples in rows.items()], seed=0)
    assert len(rows) == len(found.pairs) + len(found.unused)
    assert all(pair.chosen.score > pair.rejected.score for pair in found.pairs)


def test_scored_pairs_are_read_as_pairs_with_the_tools_of_their_prompt(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    found = from_scored([(_row(tools=json.dumps(tools)), _samples(("good", 0.9), ("bad", 0.1)))], seed=0)
    write_jsonl(tmp_path / "pairs.jsonl", [pair_record(pair) for pair in found.pairs])
    (row,) = open_source(Source(path="pairs.jsonl"), tmp_path, split="train").rows()
    assert isinstance(row, Row)
    assert (row.kind, row.answer, row.rejected) == ("pair", "good", (Message("assistant", "bad"),))
    assert json.loads(row.tools) == tools
