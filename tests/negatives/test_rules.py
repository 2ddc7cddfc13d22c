import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finefit.negatives.lexicon import (
    KindOfTerm,
    Negation,
    Words,
    sentences_of,
    shipped_words,
    sounds_like_a_vowel,
    terms_of,
    words_of,
)
from finefit.negatives.rules import (
    Falsified,
    change_number,
    fabricate,
    inversions_of,
    invert,
    is_wrong,
    numbers_of,
    options_of,
    seeded,
    swap_entity,
)
from tests.negatives.corpus import context_of, make_row, make_rows

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
    assert all(map(sounds_like_a_vowel, ("hour", "ulcer", "HBO")))
    assert not any(map(sounds_like_a_vowel, ("union", "PCR", "unit")))


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


WHOLE = st.integers(0, 10**9).map(str)
DECIMAL = st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 5)).map(
    lambda n: f"{n[0]}.{n[1]:0{n[2]}d}"
)
GROUPED = st.integers(1000, 10**9).map(lambda n: f"{n:,}")
NUMBERS = WHOLE | DECIMAL | GROUPED
BEHIND = st.sampled_from(("", "%", " %", " mg", "mg", "-fold", " patients"))


def _change(answer: str, seed: int = 0) -> Falsified | None:
    return change_number(answer, context_of(answer), random.Random(seed))


def _changes(answer: str) -> set[str]:
    return {change.text for seed in range(200) if (change := _change(answer, seed))}


@given(NUMBERS, BEHIND, st.integers(0, 99))
def test_a_changed_number_keeps_its_digits_decimals_separators_and_unit(number: str, behind: str, seed: int) -> None:
    answer = f"It was {number}{behind} in all."
    change = _change(answer, seed)
    if change is not None:
        assert change.text != answer
        assert float(change.after.replace(",", "")) != float(number.replace(",", ""))
        assert re.sub(r"\d", "9", change.text) == re.sub(r"\d", "9", answer)


@given(st.integers(1, 9999).map(str) | st.integers(1000, 10**7).map(lambda n: f"{n:,}"), st.integers(0, 99))
def test_a_number_stays_as_round_as_it_is(number: str, seed: int) -> None:
    change = _change(f"There were {number} of them.", seed)
    if change is not None and not 1900 <= int(number.replace(",", "")) <= 2050:
        assert len(change.after) - len(change.after.rstrip("0,")) == len(number) - len(number.rstrip("0,"))


def test_a_last_five_stays_one() -> None:
    changed = _changes("There were 45 of them.")
    assert changed == {f"There were {tens}5 of them." for tens in (1, 2, 3, 5, 6, 7, 8, 9)}


def test_nearly_every_number_can_be_changed() -> None:
    assert all(_change(f"There were {number} of them.") for number in range(1, 1000) if number not in (100,))


@given(st.integers(1900, 2050), st.integers(0, 99))
def test_a_year_stays_a_year(year: int, seed: int) -> None:
    change = _change(f"It began in {year}.", seed)
    assert change is not None
    assert 0 < abs(int(change.after) - year) <= 12
    assert 1900 <= int(change.after) <= 2050


@given(st.integers(1, 99), st.integers(0, 99))
def test_a_share_stays_at_most_a_hundred_percent(share: int, seed: int) -> None:
    change = _change(f"In {share}% it worked.", seed)
    assert change is None or 0 < int(change.after) < 100


def test_all_is_not_more_than_all() -> None:
    assert _changes("In 100% it worked.") == set()
    assert _changes("It was 140% of that.") != set()


@pytest.mark.parametrize("written", ["p<0.05", "P = 0.032", "p-value of 0.8", "p ≤ .001"])
def test_a_probability_stays_below_one(written: str) -> None:
    changed = _changes(f"It differed ({written}).")
    assert changed
    assert all(0 < float(re.findall(r"[\d.]*\d", text)[0]) < 1 for text in changed)


def test_the_ends_of_a_range_stay_in_order() -> None:
    for text in _changes("The age was 8 - 90 years."):
        low, high = map(int, re.findall(r"\d+", text))
        assert low < high
    ends = {tuple(re.findall(r"\d+\.\d", text)) for text in _changes("It was 58.2-64.6 there.")}
    assert {end[1] for end in ends} > {"64.6"}
    assert all(float(low) < float(high) for low, high in ends)


DATES = ("on 2011-05-03", "at 10:30", "120/80", "version 1.2.3", "as shown [12]", "21st")
NAMES = ("L3 and HER2 and COVID-19", "95% CI", "a 95 % confidence interval", "no number")


@pytest.mark.parametrize("text", [*DATES, *NAMES])
def test_names_dates_ratios_and_conventions_are_left_alone(text: str) -> None:
    assert numbers_of(text, shipped_words()) == ()


def test_a_number_that_stands_in_the_source_is_never_put_in() -> None:
    source = " ".join(f"{number}%" if number % 2 else str(number) for number in range(1, 10) if number != 6)
    changed = {change_number("It took 4 days.", context_of(source), random.Random(seed)) for seed in range(50)}
    assert {change.after for change in changed if change} == {"6"}


def test_a_number_moves_far_enough_to_matter_and_stays_plausible() -> None:
    values = [int(re.findall(r"\d+", text)[0]) for text in _changes("There were 423 of them.")]
    assert len(values) > 50
    assert all(141 <= value <= 1269 and abs(value - 423) >= 63 for value in values)


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


ANSWER = "First came rain. Then came snow. Last came wind."
FOREIGN = "Metformin lowered glucose within several months."


def _fabrications(answer: str, others: tuple[str, ...], *source: str) -> list[Falsified]:
    context = context_of(answer, *source, others=others)
    return [change for seed in range(200) if (change := fabricate(answer, context, random.Random(seed)))]


def test_a_foreign_sentence_stands_at_any_place_or_in_place_of_any() -> None:
    texts = {change.text for change in _fabrications(ANSWER, (FOREIGN,))}
    own = ["First came rain.", "Then came snow.", "Last came wind."]
    inserted = {" ".join([*own[:at], FOREIGN, *own[at:]]) for at in range(4)}
    replaced = {" ".join([*own[:at], FOREIGN, *own[at + 1 :]]) for at in range(3)}
    assert texts == inserted | replaced


def test_a_single_sentence_is_kept_and_one_without_an_end_stays_last() -> None:
    assert {change.text for change in _fabrications("Only rain came", (FOREIGN,))} == {f"{FOREIGN} Only rain came"}


def test_lines_stay_lines() -> None:
    assert f"A line.\n{FOREIGN}\nAnother line." in {
        change.text for change in _fabrications("A line.\nAnother line.", (FOREIGN,))
    }


def test_a_sentence_that_the_row_may_support_is_not_taken() -> None:
    assert _fabrications(ANSWER, (FOREIGN,), "Within several months metformin lowered all glucose values.") == []
    assert _fabrications(ANSWER, (ANSWER,)) == []


def test_without_another_answer_nothing_is_made_up() -> None:
    assert _fabrications(ANSWER, ()) == []
    assert _fabrications(ANSWER, ("too short.", "no capital and no end of this sentence at all")) == []


def test_names_of_the_foreign_sentence_become_those_of_the_row_each_once() -> None:
    changes = _fabrications("Then HBO came.", ("Afterwards CBT lowered glucose more than PCR within several months.",))
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


WHOLE_ANSWER = "It was safe."


def _falsified(before: str, after: str) -> Falsified:
    return Falsified(answer=WHOLE_ANSWER, rule="negation", before=before, after=after, at=WHOLE_ANSWER.index(before))


@pytest.mark.parametrize(
    ("before", "after"), [("safe", "SAFE"), ("safe", " safe"), ("safe.", "safe!"), ("safe", "safe")]
)
def test_what_differs_in_case_space_or_punctuation_alone_is_not_wrong(before: str, after: str) -> None:
    assert not is_wrong(_falsified(before, after), context_of())


def test_what_is_right_elsewhere_is_not_wrong() -> None:
    assert is_wrong(_falsified("safe", "unsafe"), context_of())
    assert not is_wrong(_falsified("safe", "unsafe"), context_of(others=("it was UNSAFE",)))


def test_lists_that_change_nothing_make_no_pair() -> None:
    words = Words(negation=Negation(opposites=(("safe", "Safe"),)))
    assert options_of(WHOLE_ANSWER, context_of(words=words), ("negation",), seed=0, key="") == []


def test_options_are_a_function_of_seed_rule_and_row() -> None:
    drawn = [
        seeded(*parts).random() for parts in ((0, "a", "b"), (1, "a", "b"), (0, "b", "b"), (0, "a", "c"), (0, "ab", ""))
    ]
    assert len(set(drawn)) == 5
    assert seeded(0, "a", "b").random() == drawn[0]
