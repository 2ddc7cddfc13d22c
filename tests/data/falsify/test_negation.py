import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.negation import inversions_of, invert
from finefit.data.falsify.words import Negation, Words, shipped_words
from tests.data.falsify.corpus import context_of, make_row


def _inverted(text: str, words: Words | None = None) -> set[str]:
    found = inversions_of(text, words or shipped_words())
    return {text[: one.at] + one.after + text[one.at + len(one.before) :] for one in found}


@pytest.mark.parametrize(
    ("affirmed", "denied"),
    [
        ("It was associated with death.", "It was not associated with death."),
        ("This method can be used.", "This method cannot be used."),
        ("They have been treated.", "They have not been treated."),
        ("These results suggest otherwise.", "These results do not suggest otherwise."),
        ("Our study found evidence.", "Our study did not find evidence."),
        ("Aspirin appears to help.", "Aspirin does not appear to help."),
        ("There was a difference in age.", "There was no difference in age."),
        ("The patient reports pain.", "The patient denies pain."),
        ("Patients with asthma were few.", "Patients without asthma were few."),
        ("An increase in weight.", "A decrease in weight."),
        ("Higher doses.", "Lower doses."),
        ("It is a safe drug.", "It is an unsafe drug."),
    ],
)
def test_a_claim_is_inverted_in_both_directions(affirmed: str, denied: str) -> None:
    assert denied in _inverted(affirmed)
    assert affirmed in _inverted(denied)


@pytest.mark.parametrize(
    ("denied", "affirmed"),
    [
        ("It did not significantly reduce pain.", "It significantly reduced pain."),
        ("It does not carry risk.", "It carries risk."),
        ("It didn't occur.", "It occurred."),
        ("It can't fail.", "It can fail."),
        ("No change occurred.", "A change occurred."),
        ("There were no differences.", "There were differences."),
        ("There is no additional benefit of it.", "There is an additional benefit of it."),
        ("We saw no evidence of harm.", "We saw evidence of harm."),
    ],
)
def test_a_denial_becomes_a_sentence_that_still_reads_well(denied: str, affirmed: str) -> None:
    assert affirmed in _inverted(denied)


@pytest.mark.parametrize(
    "text", ["It is not only cheap.", "It no longer holds.", "Is it so?", "A case-control follow-up.", "Plain words."]
)
def test_what_would_read_badly_is_left_alone(text: str) -> None:
    assert _inverted(text) == set()


def test_a_sentence_is_not_denied_twice() -> None:
    assert _inverted("It was not seen that it is so.") == {"It was seen that it is so."}


def test_an_answer_without_a_claim_that_the_lists_know_gives_nothing() -> None:
    assert invert("Plain words.", context_of(), random.Random(0)) is None


def test_the_lists_can_be_replaced() -> None:
    words = Words(negation=Negation(auxiliaries=("ist",), opposites=(("gut", "schlecht"),)))
    assert _inverted("Das ist gut.", words) == {"Das ist not gut.", "Das ist schlecht."}
    assert _inverted("It was safe.", words) == set()
    assert _inverted("It was not safe, was better, had a cold.", Words()) == set()


@given(st.integers(1, 10_000), st.integers(0, 99))
def test_what_is_recorded_is_what_was_changed(number: int, seed: int) -> None:
    answer = make_row(number).answer
    change = invert(answer, context_of(answer), random.Random(seed))
    assert change is not None
    assert answer[change.at : change.at + len(change.before)] == change.before
    assert change.text.replace(change.after, "", 1) != answer
    assert change.text != answer
