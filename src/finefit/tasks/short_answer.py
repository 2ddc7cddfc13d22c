"""Metrics of short answers: exact match, JSON fields, relaxed accuracy (ChartQA), ANLS (DocVQA) and VQA accuracy."""

import json
import re
from typing import Any, Final

from rapidfuzz.distance import Levenshtein

from finefit.data.rows import Row
from finefit.spec.tasks import Anls, RelaxedAccuracy
from finefit.stats.metrics import mean, rate
from finefit.tasks import NoResult, Reply, ScoredReply, Task, against_references


def stripped(answer: str) -> str:
    if not answer.strip():
        raise NoResult("the answer is empty")
    return answer.strip()


def exact_match(name: str = "exact_match") -> Task:
    return against_references(
        name,
        metrics=(rate("exact"),),
        extract=stripped,
        compare=lambda found, reference: {"exact": float(found == reference)},
    )


def json_match(name: str = "json_match") -> Task:
    def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
        """Compares values as they are written; to Python, true equals 1 and 7.0 equals 7."""
        mine, theirs = (
            {key: json.dumps(value, sort_keys=True) for key, value in fields.items()} for fields in (found, reference)
        )
        keys, right = mine.keys() | theirs.keys(), len(mine.items() & theirs.items())
        return {"all_fields": float(right == len(keys)), "fields": right / len(keys) if keys else 1.0}

    return against_references(name, metrics=(rate("all_fields"), mean("fields")), extract=_json_object, compare=compare)


def _json_object(answer: str) -> dict[str, Any]:
    try:
        value = json.loads(answer)
        # Python reads NaN, infinities and lone surrogates, which a record cannot hold
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise NoResult(f"the answer is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise NoResult(f"the answer is a JSON {type(value).__name__}, not an object")
    return value


def relaxed_accuracy(name: str, settings: RelaxedAccuracy) -> Task:
    """A number may differ from the reference by a share of it; any other answer must equal the reference except for
    case. As in the published code (pix2struct's), a number is what Python reads as one, and a per cent sign divides it
    by 100. So "1,000" is not a number and is compared as text, only zero as it is written equals zero, and a year is a
    number."""
    words = f"numbers within {settings.tolerance:g} of the reference, else equal but for case; thousands separators make no number"  # noqa: E501

    def compare(answer: str, reference: str) -> dict[str, float]:
        found, wanted = _number(answer), _number(reference)
        if found is None or not wanted:
            return {"relaxed": float(answer.lower() == reference.lower())}
        return {"relaxed": float(abs(found - wanted) / abs(wanted) <= settings.tolerance)}

    metrics, signature = (rate("relaxed"),), {"relaxed": words}
    return against_references(name, metrics=metrics, extract=stripped, compare=compare, signature=signature)


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(name: str, settings: Anls) -> Task:
    """Average normalised Levenshtein similarity: one minus the edits to the nearest reference divided by the length,
    and 0 below a threshold. As in the evaluator of the DocVQA challenge, case and the width of spaces are ignored,
    lengths are those of the texts as they are written, and a similarity equal to the threshold counts."""
    words = f"similarity below {settings.threshold:g} is 0; case and the width of spaces ignored; the nearest reference"

    def compare(answer: str, reference: str) -> dict[str, float]:
        left, right = (" ".join(text.lower().split()) for text in (answer, reference))
        length, found = max(len(answer), len(reference)), 0.0
        if 1 - abs(len(left) - len(right)) / length >= settings.threshold:  # the fewest edits: skips very long answers
            found = 1 - Levenshtein.distance(left, right) / length
        return {"anls": found if found >= settings.threshold else 0.0}

    metrics, signature = (mean("anls"),), {"anls": words}
    return against_references(name, metrics=metrics, extract=stripped, compare=compare, signature=signature)


_ENOUGH: Final = 3
_PUNCTUATION: Final = ';/[]"{}()=+\\_-><@`,?!'
_THOUSANDS: Final = re.compile(r"\d,\d")
_FULL_STOP: Final = re.compile(r"\.(?!\d)")
_DIGITS: Final = "zero one two three four five six seven eight nine ten"
_NUMBERS: Final = {"none": "0"} | {word: str(number) for number, word in enumerate(_DIGITS.split())}
_ARTICLES: Final = frozenset({"a", "an", "the"})
_CONTRACTIONS: Final = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd "
    "somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've "
    "something'll that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't "
    "we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's "
    "who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll "
    "you're you've"
)
"""The contractions of the published evaluation. It excludes `she'd` and `we'll`, which are other words without the
apostrophe."""
_RESTORED: Final = {
    word[:at] + word[at + 1 :]: word
    for word in _CONTRACTIONS.split()
    for at, character in enumerate(word)
    if character == "'"
}
"""Each contraction, keyed by its spelling with one apostrophe missing."""


def vqa_accuracy(name: str) -> Task:
    """An answer is fully right if at least three people gave it; each person is left out in turn. Answers and
    references are normalised as by the challenge's server; its older script leaves references as they are where all
    people agree."""

    def read(reply: Reply, row: Row) -> ScoredReply:
        found, people = normalise_answer(stripped(reply.text)), sum(row.votes)
        votes = zip(row.references, row.votes, strict=True)
        agreeing = sum(count for reference, count in votes if normalise_answer(reference) == found)
        # leaving out a person who agrees leaves one fewer, leaving out any other leaves all of them
        left_out = agreeing * min(1.0, (agreeing - 1) / _ENOUGH) + (people - agreeing) * min(1.0, agreeing / _ENOUGH)
        return ScoredReply(extracted=found, counts={"vqa": left_out / people})

    def require(row: Row) -> None:
        if (people := sum(row.votes)) <= _ENOUGH:
            problem = f"it has the answers of {people} people, and with {_ENOUGH} or fewer no answer can be fully right"
            needed = "VQA accuracy needs a list with the answer of each person, ten in VQAv2 and TextVQA"
            raise NoResult(f"{problem}: {needed}; use anls or exact_match")

    words = "min(1, agreeing / 3), each person left out in turn; answers and references made alike by the rules of the VQA evaluation"  # noqa: E501
    metrics, signature = (mean("vqa"),), {"vqa": words}
    return Task(
        name=name, metrics=metrics, read=read, nothing=lambda _: {"vqa": 0.0}, require=require, signature=signature
    )


def normalise_answer(answer: str) -> str:
    text = " ".join(answer.split())
    # a mark beside a space is removed, one between letters becomes a space; a thousands separator removes them all
    is_grouped, plain = _THOUSANDS.search(text), text
    for mark in _PUNCTUATION:
        plain = plain.replace(mark, "" if is_grouped or f"{mark} " in text or f" {mark}" in text else " ")
    words = (_NUMBERS.get(word, word) for word in _FULL_STOP.sub("", plain).lower().split())
    return " ".join(_RESTORED.get(word, word) for word in words if word not in _ARTICLES)
