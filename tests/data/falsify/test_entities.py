import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.entities import swap_entity
from finefit.data.falsify.sentences import words_of
from finefit.data.falsify.terms import sounds_like_a_vowel, terms_of
from finefit.data.falsify.words import KindOfTerm, Words, shipped_words
from tests.data.falsify.corpus import context_of, make_row, make_rows

OTHERS = tuple(row.answer for row in make_rows(40))


def _swapped(answer: str, *, source: str = "", others: tuple[str, ...] = (), words: Words | None = None) -> set[str]:
    context = context_of(answer, source, others=others, words=words)
    return {change.text for seed in range(100) if (change := swap_entity(answer, context, random.Random(seed)))}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Gastritis in men after appendectomy", ["condition", "people", "operation"]),
        ("the MCVs and the MRI", ["acronyms", "acronym"]),
        ("people in Norway, Japanese ones and the World Bank", ["name", "adjective of a name", "name"]),
        ("a diagnosis. Norway began. It is cheap", []),
        ("metformin or atorvastatin", ["drug", "drug"]),
    ],
)
def test_terms_are_known_by_lists_endings_and_capitals(text: str, kinds: list[str]) -> None:
    assert [term.kind for term in terms_of(text, shipped_words())] == kinds


def test_a_term_gives_way_to_another_of_its_kind_from_the_other_rows() -> None:
    others = ("It helps HBO.", "It helps CBT.", "Also PCR.", "Also LOS.", "Also ICU.")
    assert _swapped("We used MRI here.", others=others) == {
        f"We used {term} here." for term in ("HBO", "CBT", "PCR", "LOS", "ICU")
    }


def test_a_term_of_the_rows_own_source_is_never_put_in_nor_its_plural() -> None:
    words = Words(kinds={"organ": KindOfTerm(words=("liver", "kidney", "lung"))})
    assert _swapped("The liver was small.", source="Both kidneys and the LUNG were normal.", words=words) == set()
    assert _swapped("The liver was small.", source="The lung was normal.", words=words) == {"The kidney was small."}


def test_the_lists_serve_where_the_rows_have_too_few_terms_of_a_kind() -> None:
    words = Words(kinds={"drug": KindOfTerm(words=("aspirin", "heparin", "insulin"))})
    assert _swapped("We gave aspirin.", words=words) == {"We gave heparin.", "We gave insulin."}


def test_the_lists_are_silent_where_the_rows_have_enough() -> None:
    words = Words(
        kinds={"drug": KindOfTerm(words=("aspirin", "heparin", "insulin", "morphine", "warfarin", "digoxin"))}
    )
    others = ("heparin", "insulin", "morphine", "warfarin")
    assert _swapped("We gave aspirin.", others=others, words=words) == {f"We gave {drug}." for drug in others}


def test_article_and_capital_fit_the_new_term() -> None:
    words = Words(kinds={"organ": KindOfTerm(words=("liver", "eye"))})
    assert _swapped("It is a liver.", words=words) == {"It is an eye."}
    assert _swapped("Eye and hand.", words=words) == {"Liver and hand."}
    assert _swapped("We saw an MRI.", others=("a CT scan", "an MRI")) == {"We saw a CT."}
    assert [sounds_like_a_vowel(word) for word in ("hour", "union", "ulcer", "HBO", "PCR", "unit")] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_term_of_quite_another_length_is_not_taken() -> None:
    words = Words(kinds={"thing": KindOfTerm(words=("gout", "a very long name for something"))})
    assert _swapped("It was gout.", words=words) == set()


@given(st.integers(1, 10_000), st.integers(0, 99))
def test_a_swap_never_returns_its_input_and_never_a_term_of_the_row(number: int, seed: int) -> None:
    row = make_row(number, seed=1)
    context = context_of(*(message.content for message in row.messages), others=OTHERS)
    change = swap_entity(row.answer, context, random.Random(seed))
    assert change is not None
    assert change.text != row.answer
    assert row.answer[change.at : change.at + len(change.before)] == change.before
    assert not context.source.holds(change.after)
    assert not set(words_of(change.after)) & set(words_of(row.messages[0].content))
