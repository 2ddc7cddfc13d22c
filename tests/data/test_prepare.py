"""Sources in, examples and a ledger out: used + dropped = read, and what was dropped has its place and its reason."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.stage_records import Preparation, SourceLedger
from finefit.data import tokenizer_pool
from finefit.data.examples import Examples
from finefit.data.prepare import prepare
from finefit.data.render import open_renderer
from finefit.data.rows import Row, read_items
from finefit.data.sources import RowSelection, group_keys
from finefit.data.tokenizer_pool import chunked
from finefit.errors import DataError
from finefit.spec.data import Data
from tests.conftest import write_jsonl
from tests.data.conftest import prepared

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath"]
WORDS += ["inlet", "jetty", "knoll", "ledge", "marsh", "nook", "oasis", "pond"]


def qa(number: int, length: int = 4) -> dict[str, Any]:
    """A question that is like no other, and a short answer."""
    asked = f"{WORDS[number % 16]} {WORDS[number // 16 % 16]} {number} " + "z" * length
    return {"question": asked, "answer": f"a{number}"}


def source(found: Preparation, split: str = "train", at: int = 0) -> SourceLedger:
    return [s for s in found.sources if s.split == split][at]


def test_every_row_is_used_and_its_answer_supervised(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [qa(n) for n in range(5)])
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}]})
    ledger = source(found)
    assert (ledger.records, ledger.read, ledger.used, ledger.dropped, ledger.examples) == (5, 5, 5, {}, 5)
    examples = Examples(out / "train.safetensors")
    renderer = open_renderer(tokenizer, "chat")
    answers = [
        renderer.tokenizer.decode([t for t, s in zip(e.tokens, e.supervised, strict=True) if s]) for e in examples
    ]
    assert answers == [f"a{n}<|end|>" for n in range(5)]
    assert ledger.tokens == int(examples.lengths.sum())
    assert ledger.supervised_tokens == int(examples.supervised_counts.sum())
    assert found.lengths is not None
    assert (found.lengths.num_rows, found.lengths.longest) == (5, int(examples.lengths.max()))
    assert set(found.files) == {"train.safetensors", "ledger.jsonl"}


def test_rows_that_are_too_long_and_records_that_cannot_be_used_stand_in_the_ledger_with_their_place(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows: list[dict[str, Any]] = [qa(0), qa(1, length=500), {"question": "no answer?"}, qa(3)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "max_tokens": 100, "too_long": "drop"})
    assert (source(found).read, source(found).used, source(found).dropped) == (4, 2, {"too long": 1, "unusable": 1})
    dropped = {
        line["row"]: line["reason"] for line in read_lines(out / "ledger.jsonl") if line.get("what") == "dropped"
    }
    assert dropped.keys() == {2, 3}
    assert "max_tokens is 100" in dropped[2]
    assert {fault.kind: fault.count for fault in found.problems} == {"too long": 1, "unusable": 1}
    assert all(line.startswith("a.jsonl:") for fault in found.problems for line in fault.lines)


def test_a_prompt_that_is_cut_is_counted_with_its_tokens_and_the_answer_stays(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [qa(0), qa(1, length=500)])
    found, out = prepared(
        tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "max_tokens": 100, "too_long": "cut_prompt"}
    )
    ledger = source(found)
    assert (ledger.used, ledger.cut, ledger.dropped) == (2, 1, {})
    cut = Examples(out / "train.safetensors")[1]
    assert len(cut.tokens) <= 100
    assert ledger.cut_tokens >= 400
    assert sum(cut.supervised) == len("a1") + 1


def test_a_record_of_several_questions_is_one_record_and_several_rows(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"questions": ["amber?", "birch?"], "answers": ["x", "y"]}, {"questions": ["cedar?"], "answers": ["z"]}],
    )
    ledger = source(prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}]})[0])
    assert (ledger.records, ledger.read, ledger.used) == (2, 3, 3)


def test_weights_repeat_rows_and_limits_leave_a_seeded_part_out(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [qa(n) for n in range(10)])
    write_jsonl(tmp_path / "b.jsonl", [qa(n) for n in range(20, 40)])
    write_jsonl(tmp_path / "c.jsonl", [qa(n) for n in range(50, 58)])
    train = [{"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "limit": 5}, {"path": "c.jsonl", "weight": 0.25}]
    found, out = prepared(tmp_path, tokenizer, {"train": train})
    a, b, c = (source(found, at=at) for at in range(3))
    assert (a.used, a.repeated) == (10, 15)
    assert (b.read, b.used, b.dropped, b.repeated) == (20, 5, {"left out by limit": 15}, 0)
    assert (c.used, c.dropped) == (2, {"left out by weight": 6})
    assert len(Examples(out / "train.safetensors")) == 25 + 5 + 2
    again, _ = prepared(tmp_path, tokenizer, {"train": train})
    other, _ = prepared(tmp_path, tokenizer, {"train": train}, seed=1)
    assert again.files["train.safetensors"] == found.files["train.safetensors"] != other.files["train.safetensors"]


def test_a_share_is_held_out_before_anything_is_repeated_and_equal_prompts_stay_together(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows = [qa(n) for n in range(40)] + [qa(n) | {"answer": "another"} for n in range(40)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    data = {"train": [{"path": "a.jsonl", "weight": 3}], "validation": {"share": 0.25}}
    found, out = prepared(tmp_path, tokenizer, data)
    train, held = source(found), source(found, "validation")
    assert held.used == held.read == 20
    assert (train.records, train.read, train.used, train.repeated) == (80, 60, 60, 120)
    prompts = [
        {tuple(e.tokens[: list(e.supervised).index(True)]) for e in Examples(out / f"{s}.safetensors")}
        for s in ("train", "validation")
    ]
    assert not prompts[0] & prompts[1]
    assert not any(fault.kind == "overlap" for fault in found.problems)


LONG = " ".join(WORDS[(7 * n) % 16] + str(n) for n in range(120))


@pytest.mark.parametrize(
    ("train", "held"),
    [("amber birch?", "amber birch?"), ("Amber, birch!", "amber birch?"), (LONG, LONG.replace("birch", "beech", 1))],
    ids=["exact", "normalised", "near"],
)
def test_a_test_row_in_train_is_found_and_can_be_dropped(
    tmp_path: Path, tokenizer: Path, train: str, held: str
) -> None:
    write_jsonl(
        tmp_path / "train.jsonl", [{"question": "cedar dune?", "answer": "x"}, {"question": train, "answer": "y"}]
    )
    write_jsonl(tmp_path / "test.jsonl", [{"question": held, "answer": "y"}])
    data: dict[str, Any] = {"train": [{"path": "train.jsonl"}], "test": {"path": "test.jsonl"}}
    found, _ = prepared(tmp_path, tokenizer, data)
    (fault,) = (fault for fault in found.problems if fault.kind == "overlap")
    assert fault.count == 1
    assert "train.jsonl:2" in fault.lines[0]
    assert "test.jsonl:1" in fault.lines[0]
    dropped, _ = prepared(tmp_path, tokenizer, data | {"overlap": "drop"})
    assert source(dropped).dropped == {"is in test": 1}


def test_test_rows_keep_their_text_place_and_references(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [qa(n) for n in range(3)])
    write_jsonl(tmp_path / "test.jsonl", [{"question": "jetty?", "answers": ["yes", "Yes", "yes"]}])
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "train.jsonl"}], "test": {"path": "test.jsonl"}})
    (item,) = read_items(out / "test.jsonl")
    assert (item.place, item.prompt[0].content, item.answer, item.references) == (
        "test.jsonl:1",
        "jetty?",
        "yes",
        ("yes", "Yes"),
    )
    assert found.lengths is not None
    assert found.lengths.prompt == len(open_renderer(tokenizer, "chat").prompt_tokens(item.prompt))


def test_pairs_and_images_are_refused_for_what_they_are(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    write_jsonl(tmp_path / "images.jsonl", [{"imgname": "1.png", "query": "What?", "label": "Tea"}])
    with pytest.raises(
        DataError, match=r"pairs.jsonl holds preference pairs(.|\n)*images.jsonl holds images"
    ) as caught:
        prepared(tmp_path, tokenizer, {"train": [{"path": "pairs.jsonl"}, {"path": "images.jsonl"}]})
    assert "fields: {prompt: prompt, answer: chosen}" in caught.value.remedy
    train = [{"path": "pairs.jsonl", "fields": {"prompt": "prompt", "answer": "chosen"}}]
    assert source(prepared(tmp_path, tokenizer, {"train": train})[0]).used == 1


def test_text_that_the_tokenizer_reads_as_a_control_token_is_named(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [qa(0), {"question": "say <|end|> now", "answer": "no"}])
    (fault,) = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}]})[0].problems
    assert (fault.kind, fault.lines) == ("special token", ("a.jsonl:2 holds <|end|>",))


def test_placeholders_that_nobody_filled_in_are_named(tmp_path: Path, tokenizer: Path) -> None:
    rows = [qa(0), {"question": "who are you", "answer": "I am {{name}} by {{ author }}, not {{1}} or {name}"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "t.jsonl", [{"question": "and who am {{ I }}", "answer": "you"}])
    found = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "test": {"path": "t.jsonl"}})[0].problems
    assert {(fault.kind, fault.split): fault.lines for fault in found} == {
        ("placeholder", "train"): ("a.jsonl:2 holds {{name}}, {{ author }}",),
        ("placeholder", "test"): ("t.jsonl:1 holds {{ I }}",),
    }


def test_several_processes_write_the_same_bytes_as_one(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [qa(n, length=n % 50) for n in range(700)])
    data = {"train": [{"path": "a.jsonl"}], "max_tokens": 60, "too_long": "drop"}
    alone, _ = prepared(tmp_path, tokenizer, data)
    monkeypatch.setattr(tokenizer_pool, "_BYTES_PER_PROCESS", 1 << 10)
    monkeypatch.setattr(tokenizer_pool, "count_cores", lambda: 2)
    together, _ = prepared(tmp_path, tokenizer, data)
    assert together == alone


ROW = st.one_of(
    st.builds(qa, st.integers(0, 60), st.integers(0, 120)),
    st.fixed_dictionaries(
        {"question": st.text(max_size=8)}, optional={"answer": st.one_of(st.text(max_size=8), st.none(), st.integers())}
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=25),
    too_long=st.sampled_from(["error", "drop", "cut_prompt"]),
    weight=st.sampled_from([0.5, 1, 1.7]),
    limit=st.one_of(st.none(), st.integers(1, 30)),
    share=st.sampled_from([None, 0.3]),
)
def test_used_and_dropped_make_what_was_read(
    tmp_path: Path,
    tokenizer: Path,
    rows: list[dict[str, Any]],
    too_long: str,
    weight: float,
    limit: int | None,
    share: float | None,
) -> None:
    if share is not None:  # of two prompts at least one is trained on
        weight, limit = 1, None
    write_jsonl(tmp_path / "a.jsonl", [qa(61), qa(62), *rows])
    data = {"train": [{"path": "a.jsonl", "weight": weight, "limit": limit}], "max_tokens": 80, "too_long": too_long}
    found, out = prepared(tmp_path, tokenizer, data | ({"validation": {"share": share}} if share else {}))
    assert sum(s.records for s in found.sources) == 2 + len(rows)
    assert sum(s.read for s in found.sources) == 2 + len(rows)
    for ledger in found.sources:
        assert ledger.used + sum(ledger.dropped.values()) == ledger.read
        assert ledger.cut <= ledger.used
    listed = [line for line in read_lines(out / "ledger.jsonl") if line.get("what") == "dropped"]
    asked = sum(count for s in found.sources for reason, count in s.dropped.items() if reason.startswith("left out"))
    assert len(listed) == sum(sum(s.dropped.values()) for s in found.sources) - asked
    if found.lengths is not None:
        examples = Examples(out / "train.safetensors")
        assert len(examples) == found.lengths.num_rows == source(found).examples + source(found).repeated
        assert max(examples.lengths) <= 80


def test_records_say_what_they_were_read_as(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps([{"instruction": "Add.", "input": "2 and 2", "output": "4"}]), encoding="utf-8"
    )
    ledger = source(prepared(tmp_path, tokenizer, {"train": [{"path": "a.json"}]})[0])
    assert ledger.mapping
    assert "output" in " ".join(ledger.mapping.values())


def test_rows_held_out_of_train_that_stand_in_test_are_dropped_where_that_is_asked_for(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows = [qa(n) for n in range(12)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", rows[:8])
    data = {
        "train": [{"path": "train.jsonl"}],
        "validation": {"share": 0.5},
        "test": {"path": "test.jsonl"},
        "overlap": "drop",
    }
    found, _ = prepared(tmp_path, tokenizer, data)
    dropped = [source(found, split).dropped.get("is in test", 0) for split in ("train", "validation")]
    assert sum(dropped) == 8
    assert min(dropped) > 0
    assert found.problems == ()


def test_test_rows_of_several_sources_are_told_apart(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [qa(n) for n in range(3)])
    write_jsonl(tmp_path / "a.jsonl", [qa(n) for n in range(40, 46)])
    write_jsonl(tmp_path / "b.jsonl", [qa(n) for n in range(50, 52)])
    tests = [{"path": "a.jsonl", "limit": 4}, {"path": "b.jsonl", "name": "second"}]
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "train.jsonl"}], "test": tests})
    assert [(source(found, "test", at).read, source(found, "test", at).used) for at in (0, 1)] == [(6, 4), (2, 2)]
    items = read_items(out / "test.jsonl")
    assert [(item.dataset, item.source) for item in items] == [("a", "a.jsonl")] * 4 + [("second", "b.jsonl")] * 2
    assert found.prompt_tokens is not None
    prepared(tmp_path, tokenizer, {"train": [{"path": "train.jsonl"}], "test": tests[:1]})
    assert {item.dataset for item in read_items(out / "test.jsonl")} == {""}


def test_judged_answers_are_no_references(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [qa(n) for n in range(3)])
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": "jetty?", "completion": "wrong", "label": False}])
    with pytest.raises(DataError, match=r"test\.jsonl holds answers with a verdict"):
        prepared(tmp_path, tokenizer, {"train": [{"path": "train.jsonl"}], "test": {"path": "test.jsonl"}})


def test_a_test_row_whose_image_would_be_missing_is_not_asked(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [qa(n) for n in range(3)])
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what colour?"}]
    chats = [
        [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}] for content in ("knoll?", parts)
    ]
    write_jsonl(tmp_path / "test.jsonl", [{"messages": messages} for messages in chats])
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "train.jsonl"}], "test": {"path": "test.jsonl"}})
    assert (source(found, "test").used, source(found, "test").dropped) == (1, {"unusable": 1})
    assert len(read_items(out / "test.jsonl")) == 1


def test_test_prompts_that_are_cut_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [qa(n) for n in range(3)])
    write_jsonl(tmp_path / "test.jsonl", [qa(40), qa(41, length=300)])
    data = Data.model_validate(
        {"train": [{"path": "train.jsonl"}], "test": {"path": "test.jsonl"}, "too_long": "cut_prompt"}, strict=False
    )
    out = tmp_path / "out"
    out.mkdir()
    found = prepare(data, base=tmp_path, tokenizer=tokenizer, seed=0, folder=out, max_prompt_tokens=64)
    ledger = source(found, "test")
    assert (ledger.used, ledger.cut) == (2, 1)
    assert ledger.cut_tokens > 200
    assert found.lengths is not None
    assert found.lengths.prompt is not None
    assert found.lengths.prompt <= 64


def test_the_rows_of_a_record_stay_on_one_side(tmp_path: Path, tokenizer: Path) -> None:
    records = [
        {
            "questions": [f"{WORDS[n % 16]} {n} {w}?" for w in ("who", "what", "where")],
            "answers": ["a", "b", "c"],
            "id": str(n),
        }
        for n in range(20)
    ]
    write_jsonl(tmp_path / "a.jsonl", records)
    found, out = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "validation": {"share": 0.2}})
    assert source(found, "validation").used == 12
    renderer = open_renderer(tokenizer, "chat")

    def numbers(split: str) -> set[str]:
        texts = renderer.tokenizer.batch_decode([list(e.tokens) for e in Examples(out / f"{split}.safetensors")])
        return {text.split()[1] for text in texts}

    assert not numbers("train") & numbers("validation")


def test_a_file_that_grows_while_it_is_read_is_refused() -> None:
    choice = RowSelection(taken=np.array([True, False]))
    choice.require(1, "a.jsonl")
    with pytest.raises(DataError, match="changed while it was read"):
        choice.require(2, "a.jsonl")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30))
def test_rows_that_share_a_prompt_or_a_record_have_one_key_through_any_chain(pairs: list[tuple[int, int]]) -> None:
    prompts, records = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    keys = group_keys(prompts, records)
    groups: list[set[int]] = []
    for row, (prompt, record) in enumerate(pairs):
        touching = [g for g in groups if any(pairs[other][0] == prompt or pairs[other][1] == record for other in g)]
        groups = [g for g in groups if g not in touching] + [{row}.union(*touching)]
    assert len({int(key) for key in keys}) == len(groups)
    assert all(len({int(keys[row]) for row in group}) == 1 for group in groups)


@given(lengths=st.lists(st.integers(0, 9), max_size=30), max_rows=st.integers(1, 5), max_characters=st.integers(1, 20))
def test_chunks_hold_every_row_in_order_and_end_where_they_are_full(
    lengths: list[int], max_rows: int, max_characters: int
) -> None:
    rows = [Row(source="a", number=n, text="x" * length) for n, length in enumerate(lengths)]
    chunks = list(chunked(iter(rows), max_rows=max_rows, max_characters=max_characters))
    assert [row for chunk in chunks for row in chunk] == rows
    for chunk in chunks:
        assert 1 <= len(chunk) <= max_rows
        assert sum(len(row.text) for row in chunk[:-1]) < max_characters


@pytest.mark.parametrize("mark", ["<audio>", "<video>"])
def test_prompts_about_a_recording_that_text_cannot_hold_are_refused_and_a_few_that_speak_of_html_are_not(
    tmp_path: Path, tokenizer: Path, mark: str
) -> None:
    rows = [row | {"question": f"{mark} {row['question']}"} for row in map(qa, range(6))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=f"has {mark} in the prompts of 6 of its first 6 rows"):
        prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}]})
    write_jsonl(tmp_path / "a.jsonl", [*rows[:2], *map(qa, range(10, 15))])
    write_jsonl(tmp_path / "t.jsonl", [rows[5], *map(qa, range(20, 23))])
    found, _ = prepared(tmp_path, tokenizer, {"train": [{"path": "a.jsonl"}], "test": {"path": "t.jsonl"}})
    assert source(found).used == 7
    media = {fault.split: (fault.count, fault.lines) for fault in found.problems if fault.kind == "medium"}
    assert media["train"] == (2, (f"a.jsonl:1 holds {mark}", f"a.jsonl:2 holds {mark}"))
    assert media["test"] == (1, (f"t.jsonl:1 holds {mark}",))


ASKED, GOOD = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, GOOD], "label": True},
        {"messages": [ASKED, GOOD], "label": 1},
        {"messages": [ASKED, GOOD], "label": "desirable"},
        {"prompt": "2+2", "completion": "4", "label": 1},
        {"messages": [ASKED, GOOD], "kto_tag": True, "system": "Be brief."},
        {"prompt": "2+2", "completion": "4", "label": True},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD | {"content": "5"}]},
        {"chosen_messages": [ASKED, GOOD], "rejected_messages": [ASKED, GOOD | {"content": "5"}]},
        {"question": "2+2", "context": "c", "chosen": "4", "rejected": "5"},
    ],
)
def test_what_is_suggested_for_rows_of_another_objective_can_be_written_and_works(
    tmp_path: Path, tokenizer: Path, split: str, row: dict[str, Any]
) -> None:
    judged = next((name for name in ("label", "kto_tag") if name in row), None)
    if judged is None and split == "test":  # test rows may be pairs
        return
    opposite = {"True": False, "1": 0, "desirable": "undesirable"}
    bad = row | ({judged: opposite[str(row[judged])]} if judged else {"id": 1})
    write_jsonl(tmp_path / "a.jsonl", [row, bad])
    write_jsonl(tmp_path / "b.jsonl", [qa(1)])
    named = {"train": [{"path": "b.jsonl"}], split: {"path": "a.jsonl"} if split == "test" else [{"path": "a.jsonl"}]}
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, tokenizer, named)
    assert (judged is not None and split == "train") == ("KTO" in refused.value.problem)
    source_of = {"path": "a.jsonl"}
    for key in ("where", "fields"):
        if found := re.search(rf"{key}: (\{{.*?\}}(?=$|;| and ))", refused.value.remedy):
            source_of |= {key: YAML(typ="safe").load(found[1])}
    named[split] = source_of if split == "test" else [source_of]
    ledger = source(prepared(tmp_path, tokenizer, named)[0], split)
    assert ledger.used == (1 if judged else 2)
