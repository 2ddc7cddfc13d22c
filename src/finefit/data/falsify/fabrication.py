"""A sentence that the row does not support: another answer's, made to speak of this row's terms, put between its sentences or in place of one."""

import random
import re

from finefit.data.falsify.corpus import Context, Sentence
from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.sentences import Span, gap_before, sentences_of
from finefit.data.falsify.terms import terms_of

_DRAWS = 24
_NEAREST = 6
_LEAST_NEW = 1 / 3
"""Share of the longer words that the row's source lacks: below, the sentence may well be true of the row."""


def fabricate(answer: str, context: Context, chance: random.Random) -> Falsified | None:
    spans = sentences_of(answer, context.words)
    sentence = _foreign_sentence(context, chance)
    if sentence is None or not spans:
        return None
    sentence = _about_this_row(sentence, answer, context, chance)
    if len(spans) > 1 and chance.random() < 0.5:
        span = chance.choice(spans)
        return Falsified(answer=answer, rule="fabrication", before=span.text, after=sentence, at=span.start)
    # nothing can follow a last sentence that has no end
    return _inserted(answer, spans, sentence, chance.randint(0, len(spans) - (spans[-1].text[-1] not in ".!?")))


def _inserted(answer: str, spans: tuple[Span, ...], sentence: str, place: int) -> Falsified:
    """Before the sentence of that place; the last place is the end."""
    gap = gap_before(answer, spans)
    if place == len(spans):
        return Falsified(answer=answer, rule="fabrication", before="", after=gap + sentence, at=spans[-1].end)
    return Falsified(answer=answer, rule="fabrication", before="", after=sentence + gap, at=spans[place].start)


def _foreign_sentence(context: Context, chance: random.Random) -> str | None:
    """One of those that are nearest to what the row speaks of, so that it is not out of place."""
    every = context.lexicon.sentences
    drawn = {sentence.text: sentence for sentence in (chance.choice(every) for _ in range(_DRAWS) if every)}
    fitting = [sentence for sentence in drawn.values() if _is_new(sentence, context)]
    nearest = sorted(fitting, key=lambda sentence: (-_nearness(sentence, context), sentence.text))[:_NEAREST]
    return chance.choice(nearest).text if nearest else None


def _is_new(sentence: Sentence, context: Context) -> bool:
    new = sentence.content - context.source.words
    return len(new) >= 2 and len(new) >= _LEAST_NEW * len(sentence.content)


def _nearness(sentence: Sentence, context: Context) -> float:
    return len(sentence.content & context.source.words) / len(sentence.content)


def _about_this_row(sentence: str, answer: str, context: Context, chance: random.Random) -> str:
    """With the answer's own names and acronyms in place of the sentence's; each of them once, so that they do not pile up."""
    own = {kind: chance.sample(found, len(found)) for kind, found in _names(answer, context).items()}
    instead = {
        name: own[kind].pop() for kind, found in _names(sentence, context).items() for name in found if own.get(kind)
    }
    if not instead:
        return sentence
    pattern = "|".join(map(re.escape, sorted(instead, key=lambda text: (-len(text), text))))
    return re.sub(rf"(?<![\w-])(?:{pattern})(?![\w-])", lambda found: instead[found[0]], sentence)


def _names(text: str, context: Context) -> dict[str, list[str]]:
    """By kind, each once, without the words of the lists."""
    found: dict[str, list[str]] = {}
    for term in terms_of(text, context.words):
        if term.kind not in context.words.kinds and term.text not in found.setdefault(term.kind, []):
            found[term.kind].append(term.text)
    return found
