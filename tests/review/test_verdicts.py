"""Statistics: an item counts once however many judge it, ties and skips are counted, and agreement is on what both have
judged."""

import pytest

from finefit.review.verdicts import (
    JournalEntry,
    ResultsRevealed,
    VerdictChoice,
    VerdictUndone,
    majority_choices,
    results_of,
)
from finefit.stats.comparisons import kappa, preference
from finefit.stats.intervals import wilson
from tests.reviews import MODELS, OPENED, make_review_set, make_single, make_verdict


def _choices(stack_choices: dict[str, str], *, single: bool = False) -> tuple[list[JournalEntry], int]:
    """By rater, a letter for each item: g b 1 2 t s, or . where it is open."""
    meanings: dict[str, VerdictChoice] = {"g": "good", "b": "bad", "1": "first", "2": "second", "t": "tie", "s": "skip"}
    size = len(next(iter(stack_choices.values())))
    review_set = make_single(size) if single else make_review_set(size)
    entries: list[JournalEntry] = [OPENED]
    for rater, letters in stack_choices.items():
        for at, letter in enumerate(letters):
            if letter != ".":
                entries.append(make_verdict(review_set, len(entries), at, meanings[letter], rater=rater))
    return entries, size


def test_the_rate_of_bad_answers_has_wilsons_interval_over_what_is_judged() -> None:
    entries, size = _choices({"ann": "ggbbgs.g"}, single=True)
    found = results_of(make_single(size), entries)
    assert (found.items, found.judged, found.skipped) == (8, 6, 1)
    assert found.faults[0].bad == wilson(2, 6)
    assert found.preference is None


def test_nothing_judged_has_no_rate() -> None:
    found = results_of(make_single(3), [OPENED])
    assert found.faults[0].bad is None
    assert results_of(make_review_set(3), [OPENED]).preference is None


def test_preference_counts_ties_and_leaves_skips_out() -> None:
    entries, size = _choices({"ann": "1112ttss."})
    found = results_of(make_review_set(size), entries)
    assert found.preference == preference(3, 1, 2)
    assert (found.judged, found.skipped) == (6, 2)


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        (("1", "1", "2"), "first"),
        (("1", "2", "."), "split"),
        (("s", "2", "."), "second"),
        (("s", "s", "s"), "skip"),
        (("1", "2", "t"), "split"),
    ],
)
def test_an_item_has_the_choice_of_most_raters(letters: tuple[str, str, str], expected: str) -> None:
    entries, _ = _choices(dict(zip(("ann", "bob", "cleo"), letters, strict=True)))
    assert majority_choices(make_review_set(1), entries) == {"item-0": expected}


def test_a_split_is_a_tie_between_models_and_bad_for_one() -> None:
    entries, _ = _choices({"ann": "11", "bob": "12"})
    found = results_of(make_review_set(2), entries)
    assert found.preference == preference(1, 0, 1)
    assert found.split == 1
    entries, _ = _choices({"ann": "gg", "bob": "gb"}, single=True)
    assert results_of(make_single(2), entries).faults[0].bad == wilson(1, 2)


def test_three_raters_do_not_make_three_items_of_one() -> None:
    entries, size = _choices({"ann": "gbgb", "bob": "gbgb", "cleo": "gbgb"}, single=True)
    assert results_of(make_single(size), entries).faults[0].bad == wilson(2, 4)


def test_reasons_are_counted_by_model_where_half_of_the_raters_marked_them() -> None:
    review_set = make_review_set(2)
    entries: list[JournalEntry] = [
        make_verdict(review_set, 1, 0, "second", reasons=[["fabricated", "other"], []]),
        make_verdict(review_set, 2, 0, "second", rater="bob", reasons=[["fabricated"], []]),
        make_verdict(review_set, 3, 0, "second", rater="cleo", reasons=[[], ["unsupported"]]),
        make_verdict(review_set, 4, 1, "tie"),
    ]
    left, right = results_of(review_set, entries).faults
    assert (left.model, left.bad, {name for name, count in left.reasons.items() if count}) == (
        MODELS[0],
        wilson(1, 2),
        {"fabricated"},
    )
    assert (right.bad, sum(right.reasons.values())) == (wilson(0, 2), 0)


def test_agreement_is_on_what_both_have_judged() -> None:
    entries, size = _choices({"ann": "1122t1s.", "bob": "1112t212", "cleo": "......1."})
    (ann_bob, bob_cleo) = results_of(make_review_set(size), entries).agreement
    shared: list[tuple[VerdictChoice, VerdictChoice]] = [
        ("first", "first"),
        ("first", "first"),
        ("second", "first"),
        ("second", "second"),
        ("tie", "tie"),
        ("first", "second"),
    ]
    assert (ann_bob.raters, ann_bob.agreement) == (("ann", "bob"), kappa(shared))
    assert (bob_cleo.raters, bob_cleo.agreement.observed.n) == (("bob", "cleo"), 1)


def test_each_rater_has_a_line_of_their_own() -> None:
    review_set = make_review_set(5)
    entries: list[JournalEntry] = [
        make_verdict(review_set, 1, 0, "first", shown=(0, 1)),
        make_verdict(review_set, 2, 1, "first", shown=(1, 0)),
        make_verdict(review_set, 3, 2, "skip"),
        make_verdict(review_set, 4, 3, "second", shown=(1, 0)),
        VerdictUndone(at=OPENED.at, rater="ann", number=2),
        ResultsRevealed(at=OPENED.at, rater="ann", open=2),
        make_verdict(review_set, 5, 1, "second", shown=(1, 0)),
        make_verdict(review_set, 6, 0, "tie", rater="bob"),
    ]
    ann, bob = results_of(review_set, entries).raters
    assert (ann.judged, ann.skipped, ann.undone, ann.not_blind, ann.shown_first) == (3, 1, 1, 1, 3)
    assert ann.choices == {"first": 1, "second": 2}
    assert (bob.judged, bob.not_blind) == (1, 0)


def test_verdicts_on_other_texts_are_counted_and_not_mixed_in() -> None:
    foreign = make_review_set(2, models=("other-1:base", "right-1:base"))
    found = results_of(
        make_review_set(2),
        [OPENED, make_verdict(foreign, 1, 0, "first"), make_verdict(make_review_set(2), 2, 1, "second")],
    )
    assert (found.judged, found.other_texts) == (1, 1)
