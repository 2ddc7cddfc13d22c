"""Rows of ours that read like findings, and the context that a rule is given."""

import random

from finefit.data.rows import Message, Row
from finefit.negatives.lexicon import RowText, RuleContext, Words, make_lexicon, shipped_words

_WHO = ("men", "women", "children", "adults", "infants", "smokers")
_WHAT = ("asthma", "arthritis", "migraine", "sepsis", "gastritis", "anemia", "neuropathy", "thrombosis")
_HOW = ("aspirin", "metformin", "warfarin", "atorvastatin", "lisinopril", "metoprolol", "CBT", "HBO", "MRI", "PCR")
_CLAIM = (
    "{how} was associated with a lower rate of {what} in {who}.",
    "{how} was not associated with {what} in {who}.",
    "The risk of {what} increased by {n}% in {who} after {how}.",
    "We found no difference between {how} and usual care for {who} with {what}.",
    "Results suggest that {how} is safe for {who}, and {n} of {m} improved.",
    "{how} did not reduce {what} in {who} within {k} months.",
    "Early use of {how} may prevent {what} in {who} from Norway.",
    "Recurrence of {what} was higher among {who} who received {how} in {y}.",
)


def make_row(number: int, *, seed: int = 0) -> Row:
    chance = random.Random(f"{seed} {number}")
    claims = [_claim(text, chance) for text in chance.sample(_CLAIM, chance.randint(1, 4))]
    return row_of(" ".join(claims), number=number, asked=f"Study {number}. {claims[0]} What was found?")


def make_rows(count: int, *, seed: int = 0) -> list[Row]:
    return [make_row(number, seed=seed) for number in range(1, count + 1)]


def row_of(answer: str, *, number: int = 1, asked: str = "What was found?", references: tuple[str, ...] = ()) -> Row:
    messages = (Message("user", asked), Message("assistant", answer))
    return Row(source="rows.jsonl", number=number, messages=messages, num_given=1, references=references)


def context_of(*texts: str, others: tuple[str, ...] = (), words: Words | None = None) -> RuleContext:
    """Of a row that says these texts, among others with these answers."""
    words = words or shipped_words()
    return RuleContext(RowText.of(*texts), make_lexicon(others, (), words), words)


def _claim(text: str, chance: random.Random) -> str:
    named = {
        "how": chance.choice(_HOW),
        "what": chance.choice(_WHAT),
        "who": chance.choice(_WHO),
        "y": chance.randint(1998, 2019),
    }
    said = text.format(**named, n=chance.randint(11, 89), m=chance.randint(90, 400), k=chance.randint(2, 24))
    return said[0].upper() + said[1:]
