"""VQA accuracy: an answer is right as far as people gave it, three of them being enough; each person's own answer is left out in turn.

Answers are made alike first by the rules of the VQA evaluation: punctuation, number words, articles, contractions without their apostrophe.
References are too, as the challenge's server does it; its older script leaves them as they are where all people agree.
"""

import re
from collections.abc import Mapping
from typing import Final

from finefit.data.rows import Row
from finefit.data.tasks.match import stripped
from finefit.data.tasks.task import NoResult, Reading, Reply, Task
from finefit.stats.metrics import mean

_ENOUGH: Final = 3
_PUNCTUATION: Final = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS: Final = re.compile(r"\d,\d")
_FULL_STOP: Final = re.compile(r"\.(?!\d)")
_NUMBERS: Final = {
    "none": "0",
    **{
        word: str(number)
        for number, word in enumerate(
            ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
        )
    },
}
_ARTICLES: Final = frozenset({"a", "an", "the"})
_CONTRACTIONS: Final = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's how'd how'll how's "
    "isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've "
    "shouldn't shouldn't've somebody'd somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've "
    "something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll "
    "what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't "
    "wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"
)
"""Those of the evaluation: not `she'd` or `we'll`, which are other words without it."""
_WHOLE: Final = {
    word[:at] + word[at + 1 :]: word
    for word in _CONTRACTIONS.split()
    for at, character in enumerate(word)
    if character == "'"
}
"""Each with one apostrophe missing."""


def vqa_accuracy(name: str) -> Task:
    return Task(
        name=name,
        metrics=(mean("vqa"),),
        read=_read,
        nothing=lambda _: {"vqa": 0.0},
        require=_require_people,
        signature={
            "vqa": "min(1, agreeing / 3), each person left out in turn; answers and references made alike by the rules of the VQA evaluation"
        },
    )


def _read(reply: Reply, row: Row) -> Reading:
    found = alike(stripped(reply.text))
    agreeing = sum(
        votes for reference, votes in zip(row.references, row.votes, strict=True) if alike(reference) == found
    )
    return Reading(extracted=found, counts=_counts(agreeing, sum(row.votes)))


def _counts(agreeing: int, people: int) -> Mapping[str, float]:
    """Whoever agrees is left out as one that agrees less, whoever does not leaves all that do."""
    left_out = agreeing * min(1.0, (agreeing - 1) / _ENOUGH) + (people - agreeing) * min(1.0, agreeing / _ENOUGH)
    return {"vqa": left_out / people}


def _require_people(row: Row) -> None:
    people = sum(row.votes)
    if people <= _ENOUGH:
        raise NoResult(
            f"it has the answers of {people} people, and of {_ENOUGH} or fewer none can be wholly right: "
            "VQA accuracy needs a list with the answer of each person, ten in VQAv2 and TextVQA; take anls or exact_match"
        )


def alike(answer: str) -> str:
    """What is compared of an answer."""
    words = (_NUMBERS.get(word, word) for word in _without_punctuation(" ".join(answer.split())).lower().split())
    return " ".join(_WHOLE.get(word, word) for word in words if word not in _ARTICLES)


def _without_punctuation(text: str) -> str:
    """A mark beside a space is taken out, one between letters leaves a space; where a number has a thousands separator, all are taken out."""
    is_grouped, plain = _THOUSANDS.search(text), text
    for mark in _PUNCTUATION:
        plain = plain.replace(mark, "" if is_grouped or f"{mark} " in text or f" {mark}" in text else " ")
    return _FULL_STOP.sub("", plain)
