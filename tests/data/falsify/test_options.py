import pytest

from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.options import is_wrong, options_of, seeded
from finefit.data.falsify.words import Negation, Words
from tests.data.falsify.corpus import context_of

ANSWER = "It was safe."


def _change(before: str, after: str) -> Falsified:
    return Falsified(answer=ANSWER, rule="negation", before=before, after=after, at=ANSWER.index(before))


@pytest.mark.parametrize(
    ("before", "after"), [("safe", "SAFE"), ("safe", " safe"), ("safe.", "safe!"), ("safe", "safe")]
)
def test_what_differs_in_case_space_or_punctuation_alone_is_not_wrong(before: str, after: str) -> None:
    assert not is_wrong(_change(before, after), context_of())


def test_what_is_right_elsewhere_is_not_wrong() -> None:
    assert is_wrong(_change("safe", "unsafe"), context_of())
    assert not is_wrong(_change("safe", "unsafe"), context_of(others=("it was UNSAFE",)))


def test_lists_that_change_nothing_make_no_pair() -> None:
    words = Words(negation=Negation(opposites=(("safe", "Safe"),)))
    assert options_of(ANSWER, context_of(words=words), ("negation",), seed=0, key="") == []


def test_options_are_a_function_of_seed_rule_and_row() -> None:
    drawn = [
        seeded(*parts).random() for parts in ((0, "a", "b"), (1, "a", "b"), (0, "b", "b"), (0, "a", "c"), (0, "ab", ""))
    ]
    assert len(set(drawn)) == 5
    assert seeded(0, "a", "b").random() == drawn[0]
