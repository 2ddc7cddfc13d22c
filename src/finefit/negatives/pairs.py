"""Preference pairs from factual rows: by rules, balanced over all rows and audited; or from sampled answers that a task
has scored, the best against the worst. Every row is used, or unused with a reason."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, get_args

from finefit.data.fingerprint import normalise
from finefit.data.rows import BadRow, Message, Row
from finefit.errors import DataError
from finefit.negatives.balance import Audit, Counts, Measure, Sides, audit, balance, length_counts, take_evenly
from finefit.negatives.lexicon import Lexicon, RowText, RuleContext, Words, make_lexicon, shipped_words, words_of
from finefit.negatives.rules import Falsified, RuleName, options_of, seeded

ALL_RULES: tuple[RuleName, ...] = get_args(RuleName)
EVEN: Mapping[RuleName, float] = dict.fromkeys(ALL_RULES, 1.0)
LENGTHS: Mapping[str, Measure] = {"characters": len, "words": lambda text: len(words_of(text))}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePair:
    row: Row
    change: Falsified


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedRow:
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
class RulePairs:
    read: int
    """Rows; each is either used or among the unused."""
    used: int
    pairs: tuple[MadePair, ...]
    unused: tuple[UnusedRow, ...]
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
) -> RulePairs:
    """At most `per_row` pairs of a row, each by another rule. `shares` of the rules are met as nearly as rows and
    balance allow; 0 leaves a rule out. `lengths`: measures by which the sides must not be told apart, such as a
    tokenizer's count."""
    rules = _rules_of(shares, per_row)
    words = words or shipped_words()
    every = list(rows)
    kept, unused = usable_rows(every, _unfit)
    lexicon = make_lexicon(
        (row.answer for row in kept.values()), chain.from_iterable(row.references for row in kept.values()), words
    )
    options = {key: _row_options(row, lexicon, words, rules, seed) for key, row in kept.items()}
    taken = take_evenly(options, shares=shares, per_row=per_row, lengths=lengths, seed=seed)
    nothing = f"has an answer that no rule can change: {', '.join(rules)}"
    unused += [UnusedRow(place=row.place, reason=nothing) for key, row in kept.items() if key not in taken]
    pairs = tuple(MadePair(row=row, change=change) for key, row in kept.items() for change in taken.get(key, ()))
    sides = [Sides(row=content_key(pair.row), chosen=pair.row.answer, rejected=pair.change.text) for pair in pairs]
    return RulePairs(
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
        problem = f"the shares of rules are {dict(shares)}: all are 0, or one is negative"
        raise DataError(problem, "give one rule a share above 0")
    if not 1 <= per_row <= len(rules):
        problem = f"{per_row} pairs of each row are asked for, and {len(rules)} rules make one each"
        raise DataError(problem, f"ask for 1 to {len(rules)}")
    return rules


def usable_rows(
    rows: Iterable[Row | BadRow], unfit: Callable[[Row], str | None]
) -> tuple[dict[str, Row], list[UnusedRow]]:
    """Rows that pairs can be made of, by their content; and the others. `unfit`: a further reason against a row."""
    kept: dict[str, Row] = {}
    unused: list[UnusedRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            reason: str | None = row.reason
        elif row.kind == "text":
            reason = "is plain text, without a prompt and an answer"
        elif row.is_good is False:
            reason = "has an answer that is judged wrong"
        elif not (reason := unfit(row)):
            key = content_key(row)
            reason = f"says the same as {kept[key].place}" if key in kept else None
            kept.setdefault(key, row)
        if reason:
            unused.append(UnusedRow(place=row.place, reason=reason))
    return kept, unused


def _unfit(row: Row) -> str | None:
    if row.kind == "pair":
        return "is a preference pair already"
    if row.images:
        return "has images, which the rules cannot see"
    answer = row.messages[-1]
    if answer.tool_calls or answer.reasoning:
        return "has an answer with tool calls or reasoning, which the rules cannot change"
    return None if answer.content.strip() else "has an empty answer"


def _row_options(row: Row, lexicon: Lexicon, words: Words, rules: tuple[RuleName, ...], seed: int) -> list[Falsified]:
    source = RowText.of(*(message.content for message in row.messages), *row.references)
    return options_of(row.answer, RuleContext(source, lexicon, words), rules, seed=seed, key=content_key(row))


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
    impossible = {rule: sum(rule not in row for row in found) for rule in rules}
    shares = {rule: made[rule] / len(pairs) if pairs else 0.0 for rule in rules}
    return {rule: RuleCount(made=made[rule], impossible=impossible[rule], share=shares[rule]) for rule in rules}


# Scored answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    answer: str
    score: float
    """More is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    row: Row
    chosen: ScoredAnswer
    rejected: ScoredAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairs:
    pairs: tuple[ScoredPair, ...]
    unused: tuple[UnusedRow, ...]
    audit: Audit | None


def from_scored(
    scored: Iterable[tuple[Row, Sequence[ScoredAnswer]]],
    *,
    seed: int,
    margin: float = 0.0,
    lengths: Mapping[str, Measure] = LENGTHS,
) -> ScoredPairs:
    """Of rows with different content. The scores of a pair differ by more than `margin`; of equally good answers those
    are taken that keep lengths even."""
    options: dict[str, list[ScoredPair]] = {}
    unused: list[UnusedRow] = []
    for row, samples in scored:
        reason = _unpairable(row.place, samples, margin)
        if reason:
            unused.append(UnusedRow(place=row.place, reason=reason))
        else:
            couples = _couples(samples)
            options[content_key(row)] = [ScoredPair(row=row, chosen=one, rejected=other) for one, other in couples]
    pairs = _even(options, lengths, seed)
    sides = [
        Sides(row=content_key(pair.row), chosen=pair.chosen.answer, rejected=pair.rejected.answer) for pair in pairs
    ]
    return ScoredPairs(pairs=tuple(pairs), unused=tuple(unused), audit=audit(sides, lengths))


def _unpairable(place: str, samples: Sequence[ScoredAnswer], margin: float) -> str | None:
    if any(not math.isfinite(sample.score) for sample in samples):
        problem = f"{place} has an answer whose score is not a finite number, so there is no best one"
        raise DataError(problem, "score every answer; a failed one counts zero")
    if len(samples) < 2:
        return f"has {len(samples)} sampled answers, and a pair needs two"
    best, worst = (pick(sample.score for sample in samples) for pick in (max, min))
    if best - worst <= margin:
        return f"has scores from {worst:g} to {best:g}, which differ by no more than {margin:g}"
    return None if _couples(samples) else "has a best and a worst answer that read the same, or one that is empty"


def _couples(samples: Sequence[ScoredAnswer]) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Every best one with every worst one that reads differently."""
    best, worst = (pick(sample.score for sample in samples) for pick in (max, min))
    sides = (
        [sample for sample in samples if sample.score == score and sample.answer.strip()] for score in (best, worst)
    )
    couples = product(*(sorted(side, key=lambda sample: sample.answer) for side in sides))
    return [(one, other) for one, other in couples if normalise(one.answer) != normalise(other.answer)]


def _even(options: Mapping[str, Sequence[ScoredPair]], lengths: Mapping[str, Measure], seed: int) -> list[ScoredPair]:
    order = sorted(options)
    choices: list[list[Counts]] = [
        [length_counts(pair.chosen.answer, pair.rejected.answer, lengths) for pair in options[key]] for key in order
    ]
    weights = {name: 1.0 for row in choices for option in row for name in option}
    taken = dict(zip(order, balance(choices, targets={}, weights=weights, chance=seeded(seed, "scored")), strict=True))
    return [options[key][taken[key]] for key in options]


# Pairs as the lines of a file that objective dpo reads: prompt, chosen, rejected, and what was changed in which row


def pair_record(pair: MadePair | ScoredPair) -> dict[str, Any]:
    if isinstance(pair, MadePair):
        change = pair.change
        sides = {"chosen": change.answer, "rejected": change.text}
        about: dict[str, Any] = {
            "rule": change.rule,
            "change": {"before": change.before, "after": change.after, "at": change.at},
        }
    else:
        sides = {"chosen": pair.chosen.answer, "rejected": pair.rejected.answer}
        about = {"rule": "scored", "scores": {"chosen": pair.chosen.score, "rejected": pair.rejected.score}}
    prompt = messages_record(pair.row.prompt)
    return {"prompt": prompt, **sides, **tools_record(pair.row), **about, "row": pair.row.place}


def tools_record(row: Row) -> dict[str, Any]:
    """Empty where the prompt offers no tools."""
    return {"tools": json.loads(row.tools)} if row.tools else {}


def messages_record(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """With an assistant's reasoning and tool calls, as the reader of conversations expects them."""
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return written
