"""Factual rows -> preference pairs: what the rules can make of each, balanced over all, audited, with every row accounted for."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import get_args

from finefit.data.falsify.audit import Audit, Measure, Sides, audit
from finefit.data.falsify.corpus import Context, Lexicon, Source, make_lexicon
from finefit.data.falsify.even import take_evenly
from finefit.data.falsify.falsified import Falsified, RuleName
from finefit.data.falsify.options import options_of
from finefit.data.falsify.sentences import words_of
from finefit.data.falsify.words import Words, shipped_words
from finefit.data.rows import BadRow, Message, Row
from finefit.errors import DataError

ALL_RULES: tuple[RuleName, ...] = get_args(RuleName)
EVEN: Mapping[RuleName, float] = dict.fromkeys(ALL_RULES, 1.0)
LENGTHS: Mapping[str, Measure] = {"characters": len, "words": lambda text: len(words_of(text))}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePair:
    row: Row
    change: Falsified


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCount:
    made: int
    impossible: int
    """Rows in which the rule found nothing to change."""
    share: float
    """Of all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    read: int
    """Rows; each is used or among the unused."""
    used: int
    pairs: tuple[MadePair, ...]
    unused: tuple[Unused, ...]
    rules: Mapping[RuleName, RuleCount]
    audit: Audit | None


def make_pairs(
    rows: Iterable[Row | BadRow],
    *,
    seed: int,
    per_row: int = 1,
    shares: Mapping[RuleName, float] = EVEN,
    words: Words | None = None,
    lengths: Mapping[str, Measure] = LENGTHS,
) -> Made:
    """At most `per_row` pairs of a row, each by another rule. `shares` are wanted as nearly as the rows and the balance allow; 0 leaves a rule out.
    `lengths` are the measures that no side is to be known by; a tokenizer's count can be added."""
    rules = _rules_of(shares, per_row)
    words = words or shipped_words()
    every = list(rows)
    kept, unused = _sorted_out(every)
    lexicon = make_lexicon(
        (row.answer for row in kept.values()), chain.from_iterable(row.references for row in kept.values()), words
    )
    options = {key: _options(row, lexicon, words, rules, seed) for key, row in kept.items()}
    taken = take_evenly(options, shares=shares, per_row=per_row, lengths=lengths, seed=seed)
    nothing = f"has an answer that no rule can change: {', '.join(rules)}"
    unused += [Unused(place=row.place, reason=nothing) for key, row in kept.items() if key not in taken]
    pairs = tuple(MadePair(row=row, change=change) for key, row in kept.items() for change in taken.get(key, ()))
    sides = [Sides(row=content_key(pair.row), chosen=pair.row.answer, rejected=pair.change.text) for pair in pairs]
    return Made(
        read=len(every),
        used=len(taken),
        pairs=pairs,
        unused=tuple(unused),
        rules=_counted(rules, pairs, options.values()),
        audit=audit(sides, lengths),
    )


def _rules_of(shares: Mapping[RuleName, float], per_row: int) -> tuple[RuleName, ...]:
    rules = tuple(rule for rule in ALL_RULES if shares.get(rule, 0) > 0)
    if min(shares.values(), default=-1) < 0 or not rules:
        raise DataError(
            f"the shares of rules are {dict(shares)}: none is left to make pairs by, or one is negative",
            "give one rule a share above 0",
        )
    if not 1 <= per_row <= len(rules):
        raise DataError(
            f"{per_row} pairs of each row are asked for, by {len(rules)} rules that each make one",
            f"ask for 1 to {len(rules)}",
        )
    return rules


def _sorted_out(rows: Sequence[Row | BadRow]) -> tuple[dict[str, Row], list[Unused]]:
    """Rows that have an answer to falsify, by their content."""
    kept: dict[str, Row] = {}
    unused: list[Unused] = []
    for row in rows:
        reason = _unfit(row)
        key = "" if isinstance(row, BadRow) or reason else content_key(row)
        if key in kept:
            reason = f"says the same as {kept[key].place}"
        if reason:
            unused.append(Unused(place=row.place, reason=reason))
        elif isinstance(row, Row):
            kept[key] = row
    return kept, unused


def _unfit(row: Row | BadRow) -> str | None:
    if isinstance(row, BadRow):
        return row.reason
    if row.kind == "text":
        return "is plain text, without a prompt and an answer"
    if row.kind == "pair":
        return "is a preference pair already"
    if row.is_good is False:
        return "has an answer that is judged wrong"
    if row.images:
        return "has images, which the rules cannot see"
    answer = row.messages[-1]
    if answer.tool_calls or answer.reasoning:
        return "has an answer with tool calls or reasoning, which the rules cannot change"
    return None if answer.content.strip() else "has an empty answer"


def _options(row: Row, lexicon: Lexicon, words: Words, rules: tuple[RuleName, ...], seed: int) -> list[Falsified]:
    source = Source.of(*(message.content for message in row.messages), *row.references)
    return options_of(row.answer, Context(source, lexicon, words), rules, seed=seed, key=content_key(row))


def content_key(row: Row) -> str:
    """Equal for rows that say the same to a model."""
    return "\x1e".join(
        [*(part for message in row.messages for part in _said(message)), *([row.tools] if row.tools else [])]
    )


def _said(message: Message) -> Iterator[str]:
    yield from (message.role, message.content)
    if message.reasoning:
        yield message.reasoning
    for call in message.tool_calls:
        yield f"{call.name}({call.arguments})"


def _counted(
    rules: Sequence[RuleName], pairs: Sequence[MadePair], options: Iterable[Sequence[Falsified]]
) -> dict[RuleName, RuleCount]:
    made = Counter(pair.change.rule for pair in pairs)
    found = [{change.rule for change in row} for row in options]
    return {
        rule: RuleCount(
            made=made[rule],
            impossible=sum(rule not in row for row in found),
            share=made[rule] / len(pairs) if pairs else 0.0,
        )
        for rule in rules
    }
