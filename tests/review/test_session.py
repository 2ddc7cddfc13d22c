"""Judging: blind, in each rater's own order, every decision kept before the next item is shown."""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.atomic import read_lines
from finefit.errors import DiskFull, RunError
from finefit.review.items import ReviewSet
from finefit.review.session import Press, Refused, Session, Stale, open_session
from finefit.review.verdicts import (
    JournalEntry,
    ResultsRevealed,
    ReviewOpened,
    Verdict,
    VerdictUndone,
    entries_about,
    read_entries,
    unblinded_verdicts,
    valid_verdicts,
)
from tests.reviews import MODELS, OPENED, in_memory, make_review_set, make_single, make_verdict, on_disk, side_of


def _handle(session: Session, rater: str = "ann") -> str:
    item = session.turn(rater).item
    assert item is not None
    return item.handle


def _press(session: Session, press: Press, rater: str = "ann", **more: Any) -> None:
    session.judge(rater, _handle(session, rater), press, **more)


def _last(entries: list[JournalEntry]) -> Verdict:
    assert isinstance(entries[-1], Verdict)
    return entries[-1]


def _order(session: Session, rater: str) -> Iterator[str]:
    while (item := session.turn(rater).item) is not None:
        yield item.prompt[0].text
        session.judge(rater, item.handle, "tie")


@pytest.mark.parametrize(("model", "choice"), [(MODELS[0], "first"), (MODELS[1], "second")])
def test_a_press_is_kept_as_the_model_that_stood_there(model: str, choice: str) -> None:
    session, written = in_memory(make_review_set(30))
    sides = Counter[int]()
    while (item := session.turn("ann").item) is not None:
        side = side_of(item.answers, model)
        sides[side] += 1
        session.judge("ann", item.handle, "1" if side == 1 else "2")
        assert _last(written).choice == choice
        assert _last(written).models[_last(written).shown[side - 1]] == model
    assert min(sides[1], sides[2]) >= 5


def test_where_an_answer_stands_depends_on_the_rater_and_not_on_the_restart() -> None:
    review_set = make_review_set(40)

    def first_answers(rater: str) -> dict[str, str]:
        session, _ = in_memory(review_set)
        found = {}
        while (item := session.turn(rater).item) is not None:
            found[item.prompt[0].text] = item.answers[0]
            session.judge(rater, item.handle, "tie")
        return found

    ann, bob = first_answers("ann"), first_answers("bob")
    assert first_answers("ann") == ann
    assert 5 <= sum(ann[asked] != bob[asked] for asked in ann) <= 35


def test_raters_have_orders_of_their_own_over_the_same_items() -> None:
    session, _ = in_memory(make_review_set(20))
    ann, bob = list(_order(session, "ann")), list(_order(session, "bob"))
    assert ann != bob
    assert sorted(ann) == sorted(bob) == sorted(f"question {at}" for at in range(20))


def test_a_item_that_is_added_leaves_the_order_of_the_others() -> None:
    few, many = in_memory(make_review_set(10))[0], in_memory(make_review_set(15))[0]
    known = list(_order(few, "ann"))
    assert [asked for asked in _order(many, "ann") if asked in known] == known


def test_a_blind_item_reveals_nothing_about_the_models() -> None:
    review_set = make_review_set(3)
    plain = ReviewSet(
        name=review_set.name, task=review_set.task, models=("secret-a", "secret-b"), items=review_set.items
    )
    session, _ = in_memory(plain)
    assert "secret" not in repr(session.turn("ann"))


@pytest.mark.parametrize(("press", "choice"), [("1", "good"), ("2", "bad"), ("skip", "skip")])
def test_one_answer_is_good_or_bad(press: Press, choice: str) -> None:
    session, written = in_memory(make_single())
    _press(session, press)
    assert _last(written).choice == choice


@pytest.mark.parametrize(
    ("press", "more", "reason"),
    [
        ("tie", {}, "there is no tie"),
        ("1", {"reasons": [["fabricated"]]}, "judged good"),
        ("2", {"reasons": [["rude"]]}, "rude is not a reason"),
        ("2", {"reasons": [["other"], []]}, "reasons for 2 answers"),
        ("2", {"note": "x" * 4001}, "4001 characters"),
    ],
)
def test_what_means_nothing_is_refused_and_not_kept(press: Press, more: dict[str, Any], reason: str) -> None:
    session, written = in_memory(make_single())
    with pytest.raises(Refused, match=reason):
        _press(session, press, **more)
    assert written == [OPENED]


def test_reasons_are_kept_by_model_and_not_by_side() -> None:
    session, written = in_memory(make_review_set(12))
    while (item := session.turn("ann").item) is not None:
        marks: list[list[str]] = [[], []]
        marks[side_of(item.answers, MODELS[1]) - 1] = ["other", "fabricated"]
        session.judge("ann", item.handle, "tie", reasons=marks)
        assert _last(written).reasons == ((), ("fabricated", "other"))


def test_a_second_press_on_the_same_item_is_stale() -> None:
    session, written = in_memory(make_review_set())
    handle = _handle(session)
    session.judge("ann", handle, "1")
    with pytest.raises(Stale):
        session.judge("ann", handle, "2")
    assert len(written) == 2


def test_undo_is_an_entry_and_brings_the_item_back_as_it_was_marked() -> None:
    session, written = in_memory(make_review_set(8))
    _press(session, "1")
    handle = _handle(session)
    session.judge("ann", handle, "2", reasons=[["unsupported"], []], note=" see line 3 ")
    turn = session.undo("ann")
    assert turn.item is not None
    assert (turn.item.handle, turn.draft.reasons, turn.draft.note) == (handle, (("unsupported",), ()), "see line 3")
    assert [entry.kind for entry in written] == ["opened", "verdict", "verdict", "undone"]
    assert turn.judged == 1


def test_undo_reaches_back_to_the_first_verdict_and_no_further() -> None:
    session, _ = in_memory(make_review_set())
    handles = []
    for _ in range(3):
        handles.append(_handle(session))
        _press(session, "tie")
    back = []
    for _ in range(3):
        session.undo("ann")
        back.append(_handle(session))
    assert back == handles[::-1]
    with pytest.raises(Refused, match="no verdict to undo"):
        session.undo("ann")


def test_what_is_taken_back_comes_next_whatever_the_overlap_is_by_then() -> None:
    review_set = make_review_set(12)
    for rater in ("ann", "bob", "cleo", "dan", "eve", "fay"):
        before, written = in_memory(review_set)
        for _ in range(4):
            handle = _handle(before, rater)
            _press(before, "tie", rater)
        after, _ = in_memory(review_set, written[1:], overlap=3)
        after.undo(rater)
        assert _handle(after, rater) == handle


def test_undo_takes_back_nobody_elses_verdict() -> None:
    session, _ = in_memory(make_review_set())
    _press(session, "1", "ann")
    _press(session, "1", "bob")
    session.undo("ann")
    assert session.turn("bob").judged == 1
    assert session.turn("ann").judged == 0


def test_the_journal_holds_the_verdict_when_judge_returns(tmp_path: Path) -> None:
    with on_disk(make_review_set(), tmp_path) as session:
        _press(session, "1", note="ok")
        lines = list(read_lines(tmp_path / "reviews" / "review.jsonl"))
    assert [line["kind"] for line in lines] == ["opened", "verdict"]
    assert lines[1]["note"] == "ok"
    assert lines[1]["rater"] == "ann"


def test_every_entry_is_synced_before_the_next_item_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    path = tmp_path / "reviews" / "review.jsonl"
    with on_disk(make_review_set(), tmp_path) as session:
        for act in (lambda: _press(session, "1"), lambda: session.undo("ann"), lambda: session.reveal("ann")):
            act()
            assert synced[-1] == path.stat().st_size


def test_a_restart_goes_on_at_the_next_open_item(tmp_path: Path) -> None:
    review_set = make_review_set(9)
    whole = list(_order(in_memory(review_set)[0], "ann"))
    seen = []
    for _ in range(9):
        with on_disk(review_set, tmp_path) as session:
            item = session.turn("ann").item
            assert item is not None
            seen.append(item.prompt[0].text)
            session.judge("ann", item.handle, "tie")
    assert seen == whole
    with on_disk(review_set, tmp_path) as session:
        turn = session.turn("ann")
        assert (turn.item, turn.judged, turn.total) == (None, 9, 9)


def test_an_undo_survives_a_restart_with_its_draft(tmp_path: Path) -> None:
    with on_disk(make_review_set(), tmp_path) as session:
        handle = _handle(session)
        _press(session, "1", note="why")
        session.undo("ann")
    with on_disk(make_review_set(), tmp_path) as session:
        turn = session.turn("ann")
        assert turn.item is not None
        assert (turn.item.handle, turn.draft.note, turn.can_undo) == (handle, "why", False)


def test_a_torn_last_line_is_passed_over_and_its_item_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "reviews" / "review.jsonl"
    with on_disk(make_review_set(), tmp_path) as session:
        _press(session, "1")
        handle = _handle(session)
        _press(session, "1")
    path.write_bytes(path.read_bytes()[:-20])
    with on_disk(make_review_set(), tmp_path) as session:
        assert _handle(session) == handle
        _press(session, "2")
    assert [entry.kind for entry in read_entries(path)] == ["opened", "verdict", "verdict"]


def test_a_full_disk_leaves_the_item_where_it_is() -> None:
    def no_room(_: JournalEntry) -> None:
        raise DiskFull("the disk is full")

    session = Session(make_review_set(), [OPENED], no_room)
    handle = _handle(session)
    with pytest.raises(DiskFull):
        _press(session, "1")
    assert (_handle(session), session.turn("ann").judged) == (handle, 0)


def test_a_verdict_after_one_that_a_full_disk_tore_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "reviews" / "review.jsonl"
    with on_disk(make_review_set(), tmp_path) as session:
        with path.open("a") as torn:
            torn.write('{"kind": "verd')
        _press(session, "1")
    assert [entry.kind for entry in read_entries(path)] == ["opened", "verdict"]


def test_an_unknown_entry_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "review.jsonl"
    path.write_text(json.dumps({"kind": "verdict", "version": 9}) + "\n")
    with pytest.raises(RunError, match=r"review.jsonl: entry 1 "):
        read_entries(path)


def _hold(folder: Path, entered: object, leave: object) -> None:
    with on_disk(make_review_set(), folder):
        entered.set()  # type: ignore[attr-defined]
        leave.wait(60)  # type: ignore[attr-defined]


def test_there_is_one_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, entered, leave))
    other.start()
    try:
        assert entered.wait(60)
        with (
            pytest.raises(RunError, match=rf"already open in process {other.pid}"),
            on_disk(make_review_set(), tmp_path),
        ):
            pass
    finally:
        leave.set()
        other.join()
    with on_disk(make_review_set(), tmp_path) as session:
        assert session.turn("ann").total == 6


def test_the_seed_is_drawn_once_and_kept(tmp_path: Path) -> None:
    draws = iter([11, 12])
    for _ in range(2):
        with open_session(make_review_set(), tmp_path, draw=lambda: next(draws)) as session:
            assert [entry.seed for entry in session.entries if isinstance(entry, ReviewOpened)] == [11]
    with pytest.raises(RunError, match="seed 11"), open_session(make_review_set(), tmp_path, seed=3):
        pass


def test_a_limit_is_the_same_sample_for_every_rater(tmp_path: Path) -> None:
    with on_disk(make_review_set(30), tmp_path, limit=5) as session:
        ann, bob = set(_order(session, "ann")), set(_order(session, "bob"))
    assert len(ann) == 5
    assert ann == bob
    assert ann != {f"question {at}" for at in range(5)}


def test_with_an_overlap_shared_items_come_first_and_the_others_are_divided() -> None:
    session, _ = in_memory(make_review_set(20), overlap=4)
    ann = [_next(session, "ann") for _ in range(10)]
    bob = list(_order(session, "bob"))
    assert set(ann[:4]) == set(bob[:4])
    assert not set(ann[4:]) & set(bob)
    assert len(bob) == 14


def _next(session: Session, rater: str) -> str:
    item = session.turn(rater).item
    assert item is not None
    session.judge(rater, item.handle, "tie")
    return item.prompt[0].text


def test_a_item_that_the_other_rater_skipped_is_still_offered() -> None:
    session, _ = in_memory(make_review_set(3), overlap=0)
    for _ in range(3):
        _press(session, "skip", "ann")
    assert session.turn("bob").total == 3


def test_what_is_judged_after_the_results_is_known_as_such() -> None:
    session, written = in_memory(make_review_set())
    _press(session, "1", "ann")
    session.reveal("ann")
    session.reveal("ann")
    _press(session, "1", "ann")
    _press(session, "1", "bob")
    assert [entry.open for entry in written if isinstance(entry, ResultsRevealed)] == [5]
    assert unblinded_verdicts(written) == {2}
    assert session.turn("ann").has_seen_results
    assert not session.turn("bob").has_seen_results


def test_a_verdict_on_a_text_that_was_replaced_does_not_count() -> None:
    old = make_review_set(2)
    verdicts: list[JournalEntry] = [
        make_verdict(old, 1, 0, "first"),
        make_verdict(old, 2, 1, "second"),
        VerdictUndone(at=OPENED.at, rater="ann", number=1),
    ]
    changed = make_review_set(2)
    items = (
        changed.items[0],
        type(changed.items[1])(key="item-1", prompt=changed.items[1].prompt, answers=("new", "right answers 1")),
    )
    new = ReviewSet(name="review", task="summary", models=MODELS, items=items)
    assert valid_verdicts(entries_about(verdicts, old)) == [verdicts[1]]
    assert valid_verdicts(entries_about(verdicts, new)) == []
    assert in_memory(new, verdicts)[0].turn("ann").total == 2


@pytest.mark.parametrize("name", ["", "   ", "x" * 41, "a\nb", "\x1b[2J"])
def test_a_rater_has_a_name(name: str) -> None:
    with pytest.raises(Refused, match="1 to 40 printable characters"):
        in_memory(make_review_set())[0].turn(name)


def test_the_reference_can_be_kept_away() -> None:
    session, _ = in_memory(make_review_set(), shows_reference=False)
    item = session.turn("ann").item
    assert item is not None
    assert item.reference is None
