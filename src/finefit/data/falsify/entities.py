"""A term of the answer gives way to another of its kind that the row nowhere speaks of."""

import random
from collections.abc import Iterator

from finefit.data.falsify.corpus import Context
from finefit.data.falsify.falsified import Falsified
from finefit.data.falsify.terms import Term, cased_like, terms_of, with_article

_DRAWS = 40
_ENOUGH = 4
"""Different terms of a kind in the corpus, above which the lists are not asked: their words would all stand on one side."""


def swap_entity(answer: str, context: Context, chance: random.Random) -> Falsified | None:
    for term in _shuffled(terms_of(answer, context.words), chance):
        other = next((other for other in _drawn(term, context, chance) if _fits(other, term, context)), None)
        if other is not None:
            at, before, after = with_article(answer, term.at, term.end, cased_like(other, term.text))
            return Falsified(answer=answer, rule="entity", before=before, after=after, at=at)
    return None


def _shuffled(terms: tuple[Term, ...], chance: random.Random) -> list[Term]:
    return chance.sample(terms, len(terms))


def _drawn(term: Term, context: Context, chance: random.Random) -> Iterator[str]:
    """Terms of the same kind: as often as the rows have them, then each; and the lists' where the rows have few."""
    ours = context.lexicon.terms.get(term.kind, ())
    known = sorted(set(ours))
    if len(known) < _ENOUGH and term.kind in context.words.kinds:
        known = sorted({*known, *context.words.kinds[term.kind].words})
    else:
        yield from (chance.choice(ours) for _ in range(_DRAWS) if ours)
    yield from chance.sample(known, len(known))


def _fits(other: str, term: Term, context: Context) -> bool:
    """Of similar length, and nothing that the row speaks of."""
    return abs(len(other) - len(term.text)) <= max(3, len(term.text) // 2) and not context.source.holds(other)
