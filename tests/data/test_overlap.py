import pickle
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.fingerprint import Fingerprint, fingerprint, held_share, normalise, prompt_key, system_is_content
from finefit.data.overlap import Overlap, OverlapIndex, OverlapKind, TrainDuplicates, common_windows
from finefit.data.rows import Image, Message, Row, ToolCall
from finefit.errors import DataError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]


def _prose(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(num_words))


def _changed(text: str, at: int) -> str:
    words = text.split()
    words[at] = "otherwise"
    return " ".join(words)


def _ask(question: str, answer: str = "yes", *, number: int = 1, source: str = "rows.jsonl", system: str = "") -> Row:
    opening = (Message("system", system),) if system else ()
    return Row(
        source=source, number=number, messages=(*opening, Message("user", question), Message("assistant", answer))
    )


def _text(text: str, number: int = 1, source: str = "rows.jsonl") -> Row:
    return Row(source=source, number=number, text=text)


def _chat(*said: str, system: str = "", num_given: int = 0) -> Row:
    opening = (Message("system", system),) if system else ()
    turns = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said))
    return Row(source="rows.jsonl", number=1, messages=opening + turns, num_given=num_given)


def _overlaps(train: Sequence[Row], test: Sequence[Row], *, with_system: bool = False) -> list[Overlap]:
    fingerprints = [fingerprint(row, with_system=with_system) for row in train]
    index = OverlapIndex(common_windows(fingerprints))
    for row in test:
        index.add_held("test", row, fingerprint(row, with_system=with_system))
    found = (index.find(row, fp) for row, fp in zip(train, fingerprints, strict=True))
    return [overlap for overlap in found if overlap]


def _kind(row: Row, held: Row, *, with_system: bool = False) -> str | None:
    found = _overlaps([row], [held], with_system=with_system)
    return found[0].kind if found else None


def _duplicates(rows: Sequence[Row]) -> tuple[dict[OverlapKind, int], list[Overlap]]:
    fingerprints = [fingerprint(row) for row in rows]
    duplicates = TrainDuplicates(common_windows(fingerprints))
    for row, fp in zip(rows, fingerprints, strict=True):
        duplicates.add(row, fp)
    return duplicates.summary()


def test_each_kind_is_told_apart_and_names_both_places() -> None:
    long = _prose(1, 200)
    test = [_ask("Who wrote it?", "Ann", number=7, source="test.jsonl"), _ask(long, number=8, source="test.jsonl")]
    train = [
        _ask("Who wrote it?", "Ann", number=1),
        _ask("Who wrote it?", "Bob", number=2),
        _ask("who  wrote it", "Ann", number=3),
        _ask(_changed(long, 100), number=4),
        _ask(f"{_prose(2, 150)} {long} {_prose(3, 150)}", number=5),
        _ask("Who painted it?", "Ann", number=6),
    ]
    found = _overlaps(train, test)
    assert [(o.row, o.other, o.kind) for o in found] == [
        ("rows.jsonl:1", "test.jsonl:7", "row"),
        ("rows.jsonl:2", "test.jsonl:7", "prompt"),
        ("rows.jsonl:3", "test.jsonl:7", "normalised"),
        ("rows.jsonl:4", "test.jsonl:8", "near"),
        ("rows.jsonl:5", "test.jsonl:8", "contained"),
    ]
    assert {(o.split, o.other_split) for o in found} == {("train", "test")}
    assert [o.how.split(" (")[0] for o in found] == [
        "the same row",
        "the same prompt with another answer",
        "the same but for case and punctuation",
        "nearly the same",
        "contains it as a whole",
    ]
    assert 0.9 < found[3].similarity < 1


def test_the_closest_held_row_is_named() -> None:
    text = _prose(4, 300)
    test = [
        _text(_changed(_changed(_changed(text, 10), 90), 200), 1),
        _text(_changed(text, 50), 2),
        _text(_prose(5, 300), 3),
    ]
    assert [o.other for o in _overlaps([_text(text)], test)] == ["rows.jsonl:2"]
    assert [(o.kind, o.other) for o in _overlaps([_text(text)], [*test, _text(text.upper(), 4)])] == [
        ("normalised", "rows.jsonl:4")
    ]


def test_a_row_is_not_compared_with_its_own_split() -> None:
    row = _ask("Who wrote it?")
    index = OverlapIndex(np.empty(0, np.uint32))
    index.add_held("validation", row, fingerprint(row))
    assert index.find(row, fingerprint(row), "validation") is None
    index.add_held("test", replace(row, number=9), fingerprint(row))
    found = index.find(row, fingerprint(row), "validation")
    assert found is not None
    assert (found.split, found.other_split, found.other) == ("validation", "test", "rows.jsonl:9")


def test_rows_held_after_the_first_search_are_found_too() -> None:
    first, second = _text(_prose(6, 200), 1), _text(_prose(7, 200), 2)
    index = OverlapIndex(np.empty(0, np.uint32))
    for row in (first, second):
        near = _text(_changed(row.text, 30), 3)
        assert index.find(near, fingerprint(near)) is None
        index.add_held("test", row, fingerprint(row))
        found = index.find(near, fingerprint(near))
        assert found is not None
        assert (found.kind, found.other) == ("near", row.place)


def test_rows_of_a_split_that_come_in_turn_with_searches_from_it_do_not_rebuild_the_table() -> None:
    index = OverlapIndex(np.empty(0, np.uint32))
    held = _text(_prose(22, 200))
    index.add_held("test", held, fingerprint(held))
    tables = set()
    for i in range(5):
        row = _text(_prose(900 + i, 200), i)
        assert index.find(row, fingerprint(row), "validation") is None
        index.add_held("validation", row, fingerprint(row))
        tables.add(id(index._table))
    assert len(tables) == 1
    near = _text(_changed(_prose(903, 200), 30))
    found = index.find(near, fingerprint(near))
    assert found is not None
    assert (found.other_split, found.other) == ("validation", "rows.jsonl:3")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", "What is the capital of Spain?"),
        ("What is 3 - 5?", "What is 3 * 5?"),
        ("What is 3 / 5?", "What is 3 + 5?"),
        ("What is |-5|?", "What is |5|?"),
        ("Is a < b?", "Is a > b?"),
        ("Compute f'(x).", "Compute f(x)."),
        ("Compute f′(x).", "Compute f(x)."),
        ("What is type([1])?", "What is type((1))?"),
        ("What does echo `date` print?", "What does echo 'date' print?"),
        ("What does print(“a”) show?", "What does print(a) show?"),
        ("「春」是什么？", "《春》是什么？"),
        ("???", "!"),
        ("मेरा नाम", "मेरी नाम"),  # a vowel sign is part of its letter
        ("mẹ tôi nấu cơm", "mẹ tôi nấu canh"),
        ("他在学校读书", "她在学校读书"),
    ],
)
def test_different_questions_stay_different(one: str, other: str) -> None:
    assert _kind(_ask(one), _ask(other)) is None
    assert prompt_key(_ask(one)) != prompt_key(_ask(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who wrote “Emma”?", 'who wrote "EMMA"'),
        ("It’s John‘s «book»", "it's john's \"book\"."),
        ("Is f′(x) > 0?", "is f'(x) > 0"),
        ("Was ist （x） „hier“?", 'was ist (x) "hier"'),
        ("MẸ TÔI NẤU CƠM.", unicodedata.normalize("NFD", "mẹ tôi nấu cơm")),
        ("他读书，她写信。", "他读书,她写信"),
        ("Ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
        ("co\u00adoperate\u200b now\u00a0or — never…", "cooperate now or never"),
        ("Straße", "STRASSE"),
    ],
)
def test_forms_of_the_same_question_are_the_same(one: str, other: str) -> None:
    assert _kind(_ask(one), _ask(other)) == "normalised"
    assert prompt_key(_ask(one)) == prompt_key(_ask(other)) == fingerprint(_ask(one)).prompt


@pytest.mark.parametrize(("num_train", "num_test"), [(5, 1), (1, 5), (5, 5), (50, 20), (700, 3)])
@pytest.mark.parametrize("payload_words", [1, 12])
def test_a_long_template_does_not_make_rows_alike(num_train: int, num_test: int, payload_words: int) -> None:
    template = _prose(8, 60)
    assert len(template) > 300
    rows = [
        _ask(f"{template}\n\n{_prose(100 + i, payload_words)} {i}\n\n{template[:200]}", number=i)
        for i in range(num_train + num_test)
    ]
    assert _overlaps(rows[:num_train], rows[num_train:]) == []
    assert _duplicates(rows)[0]["near"] == 0


@pytest.mark.parametrize(("num_train", "num_held"), [(8, 2), (10, 10), (2, 10), (40, 10), (25, 25)])
@pytest.mark.parametrize("template_bytes", [300, 1200])
def test_a_template_in_all_rows_of_a_small_set_does_not_make_rows_alike(
    num_train: int, num_held: int, template_bytes: int
) -> None:
    for seed in range(20):
        template = _prose(1000 + seed, 300)[:template_bytes]
        rows = [
            _ask(f"{template} {_prose(2000 + 100 * seed + i, 20)[:40]}", number=i) for i in range(num_train + num_held)
        ]
        assert _overlaps(rows[:num_train], rows[num_train:]) == []


@pytest.mark.parametrize("num_copies", [3, 5])
def test_a_few_near_copies_of_a_held_out_prompt_are_no_template(num_copies: int) -> None:
    prompt = _prose(20, 100)[:550]
    others = [_ask(_prose(600 + i, 100), number=100 + i) for i in range(20)]
    copies = [_ask(f"{prompt} {_prose(700 + i, 1)}", number=i) for i in range(num_copies)]
    held = _ask(prompt, source="test.jsonl")
    assert [(o.kind, o.row) for o in _overlaps([*others, *copies], [held])] == [
        ("near", f"rows.jsonl:{i}") for i in range(num_copies)
    ]
    one_copied = _overlaps([held, *others], [replace(row, source="test.jsonl") for row in (*copies, *others)])
    assert [(o.kind, o.row) for o in one_copied][:1] == [("near", "test.jsonl:1")]


def test_many_near_copies_are_found_in_a_larger_set_up_to_twenty() -> None:
    prompt = _prose(21, 100)[:550]
    others = [_ask(_prose(3000 + i, 60), number=100 + i) for i in range(200)]
    for num_copies, num_found in ((20, 20), (21, 0)):
        copies = [_ask(f"{prompt} {_prose(4000 + i, 1)}{i}", number=i) for i in range(num_copies)]
        assert len(_overlaps([*others, *copies], [_ask(prompt)])) == num_found


def test_a_short_payload_under_a_long_template_is_compared_as_a_whole_only() -> None:
    template = _prose(19, 60)
    train = [_ask(f"{template} {_prose(500 + i, 6)} a", number=i) for i in range(20)]
    held = [_ask(f"{template} {_prose(500 + i, 6)} e", number=i) for i in range(5)]
    assert _overlaps(train, held) == []


def test_under_a_template_the_rest_still_tells_a_near_row() -> None:
    template = _prose(9, 120)
    train = [_ask(f"{template} {_prose(200 + i, 120)}", number=i) for i in range(20)]
    held = _ask(_changed(train[4].messages[0].content, 180), number=1, source="test.jsonl")
    assert [(o.kind, o.row) for o in _overlaps(train, [held])] == [("near", "rows.jsonl:4")]


def test_repeated_prompts_are_no_template() -> None:
    text = _prose(15, 200)
    test = [_ask(text, answer, number=i, source="test.jsonl") for i, answer in enumerate("abcd")]
    train = [_ask(_changed(text, 70), answer, number=i) for i, answer in enumerate("efgh")]
    assert [(o.kind, o.row, o.other) for o in _overlaps(train, test)] == [
        ("near", f"rows.jsonl:{i}", "test.jsonl:0") for i in range(4)
    ]


def test_a_short_text_is_compared_as_a_whole_only() -> None:
    text = _prose(16, 16)
    assert 32 < len(text) < 120
    assert _kind(_text(text + "a"), _text(text + "e")) is None
    assert _kind(_text(f"{text} {_prose(17, 200)}"), _text(text)) is None
    assert _duplicates([_text(text + "a", 1), _text(text + "e", 2)])[0]["near"] == 0


@pytest.mark.parametrize(
    "letters",
    [
        "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动",
        "ạảấầẩẫậắằẳẵặẹẻẽếềểễệ   aeiouytnhcg",
    ],
)
def test_a_word_changed_in_a_long_text_of_any_script_is_near(letters: str) -> None:
    text = "".join(random.Random(10).choices(letters, k=600))
    assert _kind(_text(text[:300] + letters[0] * 3 + text[303:]), _text(text)) == "near"
    assert _kind(_text("".join(random.Random(11).choices(letters, k=600))), _text(text)) is None


def test_the_system_message_plays_no_part_unless_it_is_all_there_is() -> None:
    assert _kind(_ask("Who wrote it?", system="Be brief."), _ask("Who wrote it?", system="Be kind.")) == "row"
    alone = [
        Row(source="r", number=1, messages=(Message("system", text), Message("assistant", "yes")))
        for text in ("Say yes.", "Agree.")
    ]
    assert _kind(alone[0], alone[1]) is None
    unasked = [
        Row(source="r", number=1, messages=(Message("assistant", text),)) for text in ("Good day.", "Good night.")
    ]
    assert _kind(unasked[0], unasked[1]) is None
    assert _kind(unasked[0], unasked[0]) == "row"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_question_of_an_earlier_turn_that_is_trained_on_is_found(system: str) -> None:
    peru, chile = "What is the capital of Peru?", "And of Chile?"
    train = _chat(peru, "Lima", chile, "Santiago", "Thanks!", "Welcome.", system=system)
    found = _overlaps([train], [_ask("what is the capital of peru", source="test.jsonl")])
    assert [(o.kind, o.row, o.other, o.how) for o in found] == [
        ("turn", "rows.jsonl:1", "test.jsonl:1", "asks it in an earlier turn")
    ]
    for asked, kind in (
        (_chat(peru, "Lima", chile, "?"), "turn"),  # all before the second answer
        (_chat(chile, "?"), "turn"),  # the user alone
        (_chat("Thanks!", "?"), None),  # the last answer is compared with all before it
        (_chat(peru, "Lima", chile, "Santiago", "Thanks!", "?"), "prompt"),
        (_chat("Lima", "?"), None),
    ):
        assert _kind(train, asked) == kind
    given = len(train.messages) - 1
    assert _kind(replace(train, num_given=given), _chat(peru, "Lima")) is None
    assert _kind(replace(train, num_given=given - 2), _chat(chile, "?")) == "turn"
    assert _kind(replace(train, num_given=given - 2), _chat(peru, "?")) is None
    assert fingerprint(train, turns="last").turns == ()


def test_an_earlier_turn_is_about_its_image_and_its_system_message() -> None:
    train = replace(
        _chat("What is it?", "A cat.", "And its colour?", "Red.", system="Doc A"), images=(Image(data=b"1"),)
    )
    held = _ask("What is it?", system="Doc B")
    assert _kind(train, replace(held, images=(Image(data=b"1"),))) == "turn"
    assert _kind(train, replace(held, images=(Image(data=b"2"),))) is None
    assert _kind(train, held) is None
    same = replace(train, images=())
    assert _kind(same, held) == "turn"
    assert _kind(same, held, with_system=True) is None
    assert (
        _kind(same, _ask("And its colour?", system="doc a"), with_system=True) is None
    )  # asked by the last answer only
    assert _kind(same, _ask("What is it?", system="doc a"), with_system=True) == "turn"


def test_a_row_of_one_turn_has_no_earlier_ones() -> None:
    assert fingerprint(_ask("Who?", system="Be brief.")).turns == ()
    assert fingerprint(_text("Who?")).turns == ()
    assert fingerprint(_chat("Who?")).turns == ()
    greeted = Row(
        source="r",
        number=1,
        messages=(Message("assistant", "Hello."), Message("user", "Who?"), Message("assistant", "Me.")),
    )
    assert fingerprint(greeted).turns == ()


def test_a_system_message_with_content_tells_rows_apart() -> None:
    documents = [_prose(800 + i, 120) for i in range(6)]
    rows = [_ask("Summarise the document.", number=i, system=text) for i, text in enumerate(documents)]
    assert {o.kind for o in _overlaps(rows[:3], rows[3:])} == {"row"}
    assert system_is_content(rows)
    assert _overlaps(rows[:3], rows[3:], with_system=True) == []
    assert len({prompt_key(row, with_system=True) for row in rows}) == 6
    assert len({prompt_key(row) for row in rows}) == 1
    held = [
        _ask("Summarise the document.", "no", system=documents[0]),
        _ask("Summarise the document", system=documents[1].upper()),
        _ask("Summarise the document.", system=_changed(documents[2], 60)),
    ]
    assert [o.kind for o in _overlaps(rows, held, with_system=True)] == ["prompt", "normalised", "near"]


def test_few_system_messages_for_many_rows_are_no_content() -> None:
    def spoken(num_systems: int, num_rows: int) -> list[Row]:
        return [_ask(f"What is {i}?", system=f"You are {i % num_systems}.") for i in range(num_rows)]

    assert not system_is_content([])
    assert not system_is_content(_ask("Who?") for _ in range(9))
    assert not system_is_content(spoken(2, 4))
    assert system_is_content(spoken(3, 29))
    assert not system_is_content(spoken(3, 30))
    assert system_is_content([*spoken(3, 29), *(_ask("Who?") for _ in range(100))])
    assert not system_is_content(_ask("Who?", system=text) for text in ("Be brief.", "be brief", "BE BRIEF!"))


def test_what_belongs_to_an_answer_decides_between_row_and_prompt() -> None:
    pair = Row(
        source="r",
        number=1,
        num_given=1,
        messages=(Message("user", "q"), Message("assistant", "a")),
        rejected=(Message("assistant", "b"),),
    )
    called = replace(
        _ask("q"), messages=(Message("user", "q"), Message("assistant", "", tool_calls=(ToolCall("find", "{}"),)))
    )
    judged = replace(_ask("q"), is_good=True)
    for row, other in (
        (pair, replace(pair, rejected=(Message("assistant", "c"),))),
        (called, _ask("q", "")),
        (judged, replace(judged, is_good=False)),
        (_ask("q"), replace(_ask("q"), messages=(Message("user", "q"), Message("assistant", "yes", reasoning="hm")))),
    ):
        assert _kind(row, row) == "row"
        assert _kind(row, other) == "prompt"


def test_the_same_question_about_another_image_is_another_question() -> None:
    question = _prose(12, 200)

    def about(image: Image, source: str = "a/rows.json") -> Row:
        return replace(_ask(question, source=source), images=(image,))

    assert _kind(about(Image(path="1.png")), about(Image(path="1.png"))) == "row"
    assert _kind(about(Image(data=b"1")), about(Image(data=b"1"), "b/rows.json")) == "row"
    assert _kind(about(Image(path="1.png")), about(Image(path="2.png"))) is None
    assert _kind(about(Image(path="1.png")), about(Image(path="1.png"), "b/rows.json")) is None


def test_lone_surrogates_and_empty_texts_are_compared_like_others() -> None:
    assert _kind(_ask("broken \ud800 text"), _ask("broken \ud800 TEXT")) == "normalised"
    assert _kind(_ask(""), _ask("", "no")) == "prompt"
    assert normalise("") == ""


def test_a_fingerprint_is_the_same_in_another_process_and_small_on_the_way() -> None:
    text = _prose(13, 250)
    fp = fingerprint(_text(text))
    code = (
        "import sys\nfrom finefit.data.fingerprint import fingerprint\nfrom finefit.data.rows import Row\n"
        "fp = fingerprint(Row(source='r', number=1, text=sys.argv[1]))\nprint(fp.exact, fp.asked, fp.prompt, "
        "*fp.windows)"
    )
    printed = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True).stdout
    assert [int(number) for number in printed.split()] == [fp.exact, fp.asked, fp.prompt, *fp.windows.tolist()]
    sent = pickle.dumps(fp)
    assert len(sent) < len(text)
    assert np.array_equal(pickle.loads(sent).windows, fp.windows)


def test_the_measured_similarity_is_near_the_true_one() -> None:
    def true(one: str, other: str) -> float:
        a, b = ({text[i : i + 32] for i in range(len(text) - 31)} for text in (one, other))
        return len(a & b) / len(a | b)

    for seed in range(40):
        text = _prose(300 + seed, 300)
        other = _changed(_changed(text, 50 + seed), 290 - seed)
        (found,) = _overlaps([_text(text)], [_text(other)])
        assert found.similarity == pytest.approx(true(text, other), abs=0.08)


def test_duplicates_inside_train_are_counted_once_each_with_examples() -> None:
    long = [_prose(400 + i, 150) for i in range(10)]
    rows = [
        *(_text(text, i) for i, text in enumerate(long, 1)),
        *(_text(_changed(text, 60), 20 + i) for i, text in enumerate(long[:4])),
        _ask("Who?", "a", number=30),
        _ask("Who?", "a", number=31),
        _ask("Who?", "a", number=32),
        _ask("Who?", "b", number=33),
        _ask("who", "a", number=34),
        replace(_ask("Where?", number=35), part=2),
        replace(_ask("where", number=36), part=1),
    ]
    counts, found = _duplicates(rows)
    assert counts == {"row": 2, "prompt": 1, "normalised": 2, "near": 4}
    examples = [(o.kind, o.row, o.other) for o in found]
    assert examples[:5] == [
        ("row", "rows.jsonl:31", "rows.jsonl:30"),
        ("row", "rows.jsonl:32", "rows.jsonl:31"),
        ("prompt", "rows.jsonl:33", "rows.jsonl:30"),
        ("normalised", "rows.jsonl:34", "rows.jsonl:30"),
        ("normalised", "rows.jsonl:36 (1)", "rows.jsonl:35 (2)"),
    ]
    near = {("near", f"rows.jsonl:{20 + i}", f"rows.jsonl:{1 + i}") for i in range(4)}
    assert len(examples[5:]) == 3
    assert set(examples[5:]) < near
    assert _duplicates([]) == ({}, [])


def test_the_order_does_not_change_how_many_of_many_near_rows_are_counted() -> None:
    texts = [_prose(18, 150)]
    for at in range(0, 150, 2):
        texts.append(_changed(texts[-1], at))
    counts = set()
    for seed in range(5):
        duplicates = TrainDuplicates(np.empty(0, np.uint32))
        for text in random.Random(seed).sample(texts, len(texts)):
            duplicates.add(_text(text), fingerprint(_text(text)))
        counts.add(duplicates.summary()[0]["near"])
    (num_near,) = counts
    assert 60 < num_near < 76


def test_places_are_right_over_many_blocks_and_after_a_first_summary() -> None:
    duplicates = TrainDuplicates(np.empty(0, np.uint32))
    nothing = np.empty(0, np.uint32)
    for i in range(5000):
        duplicates.add(Row(source=f"{i % 3}.jsonl", number=i), Fingerprint(i, i, i, nothing))
        if i == 1500:
            assert duplicates.summary()[0]["row"] == 0
    duplicates.add(Row(source="x.jsonl", number=1), Fingerprint(4321, 4321, 4321, nothing))
    found, examples = duplicates.summary()
    assert (found["row"], found["near"]) == (1, 0)
    assert [(o.row, o.other) for o in examples] == [("x.jsonl:1", "1.jsonl:4321")]


def test_a_million_rows_are_kept_in_less_than_120_bytes_each() -> None:
    duplicates = TrainDuplicates(np.empty(0, np.uint32))
    fp = fingerprint(_text(_prose(14, 250)))
    for i in range(2048):
        duplicates.add(_text("t", i), replace(fp, exact=i, asked=i, prompt=i))
    arrays = [
        getattr(block, name)
        for block in duplicates._blocks
        for name in ("keys", "source", "number", "part", "is_signed", "signatures")
    ]
    assert all(array.base is None for array in arrays)
    assert sum(array.nbytes for array in arrays) < 120 * 2048


ROWS = st.lists(
    st.one_of(
        st.builds(_ask, st.sampled_from(["Who?", "who", "Where?", "mẹ tôi"]), st.sampled_from(["a", "b"])),
        st.builds(
            lambda seed, at: _text(_changed(_prose(seed, 120), at)), st.integers(0, 4), st.sampled_from([20, 60, 100])
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(st.text(), st.text(min_size=1))
def test_a_row_overlaps_with_itself(question: str, text: str) -> None:
    assert _kind(_ask(question), _ask(question)) == "row"
    assert _kind(_text(text), _text(text)) == "row"


@given(
    st.lists(st.one_of(st.text(), st.text("aß.(\u0301\u0345\u200d ，’"), st.just("?!")), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_conversation_asks_in_an_earlier_turn_what_its_beginning_asks(said: list[str], with_system: bool) -> None:
    begun = _chat(*(text for question in said for text in (question, "so")), system="Doc")
    longer = replace(begun, messages=(*begun.messages, Message("user", "and"), Message("assistant", "so")))
    assert fingerprint(begun, with_system=with_system).prompt in fingerprint(longer, with_system=with_system).turns


@given(ROWS, ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_change_what_is_found(train: list[Row], test: list[Row], rng: random.Random) -> None:
    train, test = ([replace(row, number=i) for i, row in enumerate(rows)] for rows in (train, test))
    before = {(o.row, o.other, o.kind, o.similarity) for o in _overlaps(train, test)}
    counts, _ = _duplicates(train)
    rng.shuffle(train)
    rng.shuffle(test)
    assert {(o.row, o.other, o.kind, o.similarity) for o in _overlaps(train, test)} == before
    assert _duplicates(train)[0] == counts


@given(st.one_of(st.text(), st.text("aAß.,\u0301\u0323\u0345\u200d\u00ad，。ᾳİ")))
def test_normalising_twice_is_normalising_once(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_every_letter_of_unicode_is_normalised_once_and_for_all() -> None:
    for start in range(0, sys.maxunicode + 1, 64):
        once = normalise(" x".join(chr(code) for code in range(start, start + 64)))
        assert normalise(once) == once


KEYS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)), min_size=2, max_size=60).filter(
    lambda keys: len(set(keys)) > 1
)


@given(KEYS, st.floats(0.01, 0.99), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_a_share_keeps_equal_prompts_together_whatever_the_order(
    keys: list[int], share: float, seed: int, rng: random.Random
) -> None:
    held = held_share(np.array(keys, np.uint64), share, seed)
    inside = {key for key, is_held in zip(keys, held, strict=True) if is_held}
    assert inside.isdisjoint(key for key, is_held in zip(keys, held, strict=True) if not is_held)
    assert 0 < held.sum() < len(keys)
    target = min(max(round(share * len(keys)), 1), len(keys) - 1)
    assert abs(int(held.sum()) - target) < max(map(keys.count, keys))
    order = rng.sample(range(len(keys)), len(keys))
    assert held_share(np.array([keys[i] for i in order], np.uint64), share, seed).tolist() == held[order].tolist()


def test_a_share_of_different_prompts_is_exact_and_the_seed_chooses() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    held = [held_share(keys, 0.05, seed) for seed in (0, 0, 1)]
    assert [int(h.sum()) for h in held] == [50, 50, 50]
    assert (held[0] == held[1]).all()
    assert (held[0] & held[2]).sum() < 15
    assert int(held_share(keys[:2], 0.001, 0).sum()) == int(held_share(keys[:2], 0.999, 0).sum()) == 1


@pytest.mark.parametrize("keys", [[], [5], [5, 5, 5]])
def test_a_share_of_one_prompt_is_refused(keys: list[int]) -> None:
    with pytest.raises(DataError, match="different prompts") as caught:
        held_share(np.array(keys, np.uint64), 0.5, 0)
    assert "path" in caught.value.remedy


def _graphs(path: Path) -> list[Row]:
    if not path.exists():
        pytest.skip("the shared data are not beside the repository")
    blocks = re.split(r"\n[ \t]*\n", path.read_text("utf-8").strip())
    found = [re.match(r"#\s*::snt (.*)\n([\s\S]*)", block.strip()) for block in blocks]
    return [_ask(match[1], match[2].strip(), number=i, source=path.name) for i, match in enumerate(found, 1) if match]


def test_the_vietnamese_sentences_that_stand_in_train_and_test_are_found() -> None:
    found = _overlaps(
        _graphs(DATA / "seed_shapes" / "vlsp_train.txt"), _graphs(DATA / "seed_shapes" / "vlsp_test_ground_truth.txt")
    )
    assert [(o.kind, o.row.split(":")[1], o.other.split(":")[1]) for o in found] == [
        ("row", "1", "3"),
        ("row", "5", "1"),
        ("row", "6", "2"),
    ]


def test_the_questions_of_qald_that_stand_in_train_and_test_are_found() -> None:
    train, test = (
        _graphs(DATA / "amr_qald9" / "qald-9-amr-train.txt"),
        _graphs(DATA / "amr_qald9" / "qald-9-amr-test.txt"),
    )
    kinds = [o.kind for o in _overlaps(train, test)]
    assert (kinds.count("row"), kinds.count("prompt"), kinds.count("normalised"), len(kinds)) == (5, 3, 1, 9)
    assert _duplicates(train)[0] == {"row": 1, "prompt": 1, "normalised": 2, "near": 0}
