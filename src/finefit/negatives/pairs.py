"""Preference pairs from factual rows, by rules, balanced over all rows and audited; or from sampled answers that a task
has scored, the best against the worst. Every row is used, or is unused with a reason."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, get_args

from finefit.data.fingerprint import normalise
from finefit.data.rows import BadRow, Message, Row
from finefit.errors import DataError
from finefit.negatives.balance import Measure, PairAudit, Sides, audit, balance, length_counts, take_evenly
from finefit.negatives.lexicon import RowText, RuleContext, Words, make_lexicon, shipped_words, words_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePairs:
    read: int
    """The number of rows; each is either used or unused."""
    used: int
    pairs: tuple[MadePair, ...]
    unused: tuple[UnusedRow, ...]
    rules: Mapping[RuleName, RuleCount]
    audit: PairAudit | None


def make_pairs(
    rows: Iterable[Row | BadRow],
    *,
    seed: int,
    per_row: int = 1,
    shares: Mapping[RuleName, float] = EVEN,
    words: Words | None = None,
) -> RulePairs:
    """At most `per_row` pairs for each row, each by another rule. `shares` are met as nearly as rows and balance allow;
    a share of 0 leaves a rule out."""
    rules = tuple(rule for rule in ALL_RULES if shares.get(rule, 0) > 0)
    if min(shares.values(), default=-1) < 0 or not rules:
        problem = f"the shares of rules are {dict(shares)}: all are 0, or one is negative"
        raise DataError(problem, "give one rule a share above 0")
    if not 1 <= per_row <= len(rules):
        problem = f"{per_row} pairs of each row are requested, but {len(rules)} rules make one each"
        raise DataError(problem, f"request 1 to {len(rules)}")
    words = words or shipped_words()
    every = list(rows)
    kept, unused = usable_rows(every, _unfit)
    lexicon = make_lexicon(
        (row.answer for row in kept.values()), chain.from_iterable(row.references for row in kept.values()), words
    )
    options = {}
    for key, row in kept.items():
        source = RowText.of(*(message.content for message in row.messages), *row.references)
        options[key] = options_of(row.answer, RuleContext(source, lexicon, words), rules, seed=seed, key=key)
    taken = take_evenly(options, shares=shares, per_row=per_row, lengths=LENGTHS, seed=seed)
    nothing = f"has an answer that no rule can change: {', '.join(rules)}"
    unused += [UnusedRow(place=row.place, reason=nothing) for key, row in kept.items() if key not in taken]
    pairs = tuple(MadePair(row=row, change=change) for key, row in kept.items() for change in taken.get(key, ()))
    sides = [Sides(row=content_key(pair.row), chosen=pair.row.answer, rejected=pair.change.text) for pair in pairs]
    made = Counter(pair.change.rule for pair in pairs)
    counts = {
        rule: RuleCount(
            made=made[rule],
            impossible=sum(all(change.rule != rule for change in found) for found in options.values()),
            share=made[rule] / len(pairs) if pairs else 0.0,
        )
        for rule in rules
    }
    return RulePairs(
        read=len(every), used=len(taken), pairs=pairs, unused=tuple(unused), rules=counts, audit=audit(sides, LENGTHS)
    )


def usable_rows(
    rows: Iterable[Row | BadRow], unfit: Callable[[Row], str | None]
) -> tuple[dict[str, Row], list[UnusedRow]]:
    """The rows that pairs can be made of, by their content, and the unusable ones. `unfit` gives a further reason
    against a row."""
    kept, unused = dict[str, Row](), list[UnusedRow]()
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


def content_key(row: Row) -> str:
    """The same key for rows that say the same to a model."""
    said: list[str] = []
    for message in row.messages:
        said += [message.role, message.content, *([message.reasoning] if message.reasoning else [])]
        said += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\x1e".join([*said, *([row.tools] if row.tools else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    answer: str
    score: float
    """Higher is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    row: Row
    chosen: ScoredAnswer
    rejected: ScoredAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairs:
    pairs: tuple[ScoredPair, ...]
    unused: tuple[UnusedRow, ...]
    audit: PairAudit | None


def from_scored(scored: Iterable[tuple[Row, Sequence[ScoredAnswer]]], *, seed: int, margin: float = 0.0) -> ScoredPairs:
    """Pairs of best and worst answers whose scores differ by more than `margin`, one for each row; ties are broken by
    length balance."""
    options, unused = dict[str, list[ScoredPair]](), list[UnusedRow]()
    for row, samples in scored:
        couples = _couples(row.place, samples, margin)
        if isinstance(couples, str):
            unused.append(UnusedRow(place=row.place, reason=couples))
        else:
            options[content_key(row)] = [ScoredPair(row=row, chosen=one, rejected=other) for one, other in couples]
    sides = {
        key: [Sides(row=key, chosen=pair.chosen.answer, rejected=pair.rejected.answer) for pair in options[key]]
        for key in sorted(options)
    }
    choices = [[length_counts(one.chosen, one.rejected, LENGTHS) for one in some] for some in sides.values()]
    weights = {name: 1.0 for row in choices for option in row for name in option}
    taken = dict(zip(sides, balance(choices, targets={}, weights=weights, chance=seeded(seed, "scored")), strict=True))
    pairs = tuple(options[key][taken[key]] for key in options)
    found = audit([sides[key][taken[key]] for key in options], LENGTHS)
    return ScoredPairs(pairs=pairs, unused=tuple(unused), audit=found)


def _couples(
    place: str, samples: Sequence[ScoredAnswer], margin: float
) -> list[tuple[ScoredAnswer, ScoredAnswer]] | str:
    """Every best answer with every worst one that reads differently, or why there is no pair."""
    if any(not math.isfinite(sample.score) for sample in samples):
        problem = f"{place} has an answer whose score is not a finite number, so there is no best one"
        raise DataError(problem, "score every answer; a failed one counts zero")
    if len(samples) < 2:
        return f"has {len(samples)} sampled answers, and a pair needs two"
    best, worst = (pick(sample.score for sample in samples) for pick in (max, min))
    if best - worst <= margin:
        return f"has scores from {worst:g} to {best:g}, which differ by no more than {margin:g}"
    sides = (
        [sample for sample in samples if sample.score == score and sample.answer.strip()] for score in (best, worst)
    )
    couples = product(*(sorted(side, key=lambda sample: sample.answer) for side in sides))
    different = [(one, other) for one, other in couples if normalise(one.answer) != normalise(other.answer)]
    return different or "has a best and a worst answer that read the same, or one that is empty"


def pair_record(pair: MadePair | ScoredPair) -> dict[str, Any]:
    """One line of a file that objective dpo reads."""
    if isinstance(pair, MadePair):
        change = pair.change
        sides = {"chosen": change.answer, "rejected": change.text}
        made: Any = {"before": change.before, "after": change.after, "at": change.at}
        about = {"rule": change.rule, "change": made}
    else:
        sides = {"chosen": pair.chosen.answer, "rejected": pair.rejected.answer}
        about = {"rule": "scored", "scores": {"chosen": pair.chosen.score, "rejected": pair.rejected.score}}
    asked = {"prompt": messages_record(pair.row.prompt)}
    return {**asked, **sides, **tools_record(pair.row), **about, "row": pair.row.place}


def tools_record(row: Row) -> dict[str, Any]:
    return {"tools": json.loads(row.tools)} if row.tools else {}


def messages_record(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Includes an assistant's reasoning and tool calls, as the reader of conversations expects them."""
    records = []
    for message in messages:
        written: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if calls := [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]:
            written["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        records.append(written)
    return records
