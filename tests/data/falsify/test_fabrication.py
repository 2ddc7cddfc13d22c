import random

from hypothesis import given
from hypothesis import strategies as st

from finefit.data.falsify.fabrication import fabricate
from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.sentences import sentences_of, words_of
from finefit.data.falsify.words import shipped_words
from tests.data.falsify.corpus import context_of, make_row, make_rows

ANSWER = "First came rain. Then came snow. Last came wind."
FOREIGN = "Metformin lowered glucose within several months."


def _changes(answer: str, others: tuple[str, ...], *source: str) -> list[Falsified]:
    context = context_of(answer, *source, others=others)
    return [change for seed in range(200) if (change := fabricate(answer, context, random.Random(seed)))]


def test_a_foreign_sentence_stands_at_any_place_or_in_place_of_any() -> None:
    texts = {change.text for change in _changes(ANSWER, (FOREIGN,))}
    first, second, third = "First came rain.", "Then came snow.", "Last came wind."
    inserted = {
        " ".join(parts)
        for parts in (
            (FOREIGN, first, second, third),
            (first, FOREIGN, second, third),
            (first, second, FOREIGN, third),
            (first, second, third, FOREIGN),
        )
    }
    replaced = {
        " ".join(parts) for parts in ((FOREIGN, second, third), (first, FOREIGN, third), (first, second, FOREIGN))
    }
    assert texts == inserted | replaced


def test_a_single_sentence_is_kept_and_one_without_an_end_stays_last() -> None:
    assert {change.text for change in _changes("Only rain came", (FOREIGN,))} == {f"{FOREIGN} Only rain came"}


def test_lines_stay_lines() -> None:
    assert f"A line.\n{FOREIGN}\nAnother line." in {
        change.text for change in _changes("A line.\nAnother line.", (FOREIGN,))
    }


def test_a_sentence_that_the_row_may_support_is_not_taken() -> None:
    assert _changes(ANSWER, (FOREIGN,), "Within several months metformin lowered all glucose values.") == []
    assert _changes(ANSWER, (ANSWER,)) == []


def test_without_another_answer_nothing_is_made_up() -> None:
    assert _changes(ANSWER, ()) == []
    assert _changes(ANSWER, ("too short.", "no capital and no end of this sentence at all")) == []


def test_names_of_the_foreign_sentence_become_those_of_the_row_each_once() -> None:
    changes = _changes("Then HBO came.", ("Afterwards CBT lowered glucose more than PCR within several months.",))
    assert {change.after.strip() for change in changes} == {
        "Afterwards HBO lowered glucose more than PCR within several months.",
    }


@given(st.integers(1, 10_000), st.integers(0, 99))
def test_the_answer_is_never_returned_as_it_was(number: int, seed: int) -> None:
    row = make_row(number, seed=1)
    context = context_of(
        *(message.content for message in row.messages), others=tuple(other.answer for other in make_rows(30))
    )
    change = fabricate(row.answer, context, random.Random(seed))
    if change is not None:
        assert change.text != row.answer
        assert row.answer[change.at : change.at + len(change.before)] == change.before


def test_sentences_end_at_full_stops_and_not_at_abbreviations_initials_and_decimals() -> None:
    text = 'He (e.g. Dr. Smith et al.) saw S. aureus in 1.5 ml. "Yes." Was it so? It was\n- one\n- two'
    found = [span.text for span in sentences_of(text, shipped_words())]
    assert found == [
        "He (e.g. Dr. Smith et al.) saw S. aureus in 1.5 ml.",
        '"Yes."',
        "Was it so?",
        "It was",
        "- one",
        "- two",
    ]


@given(st.text(alphabet="aA1.?! \n\"'(", max_size=60))
def test_sentences_cover_the_text_but_for_white_space(text: str) -> None:
    spans = sentences_of(text, shipped_words())
    assert all(text[span.start : span.end] == span.text for span in spans)
    assert "".join("".join(span.text.split()) for span in spans) == "".join(text.split())
    assert sorted(span.start for span in spans) == [span.start for span in spans]


def test_words_keep_numbers_whole() -> None:
    assert words_of("It's 1,842 (61.4%) of follow-up, HER2.") == ["it's", "1,842", "61.4%", "of", "follow-up", "her2"]
