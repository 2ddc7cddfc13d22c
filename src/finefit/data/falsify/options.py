"""All that the rules can make of one row's answer: a pure function of seed, row and lexicon."""

import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from finefit.data.falsify.corpus import Context
from finefit.data.falsify.entities import swap_entity
from finefit.data.falsify.fabrication import fabricate
from finefit.data.falsify.falsified import Falsified, Rule, RuleName
from finefit.data.falsify.negation import invert
from finefit.data.falsify.numbers import change_number
from finefit.data.fingerprint import normalise

RULES: Final[Mapping[RuleName, Rule]] = {
    "entity": swap_entity,
    "number": change_number,
    "negation": invert,
    "fabrication": fabricate,
}
_DRAWS = 12
"""Of each rule: what balances is chosen among them."""


def options_of(answer: str, context: Context, rules: tuple[RuleName, ...], *, seed: int, key: str) -> list[Falsified]:
    """Each once. `key` is the row's content."""
    found: dict[tuple[str, str, int], Falsified] = {}
    for name in rules:
        chance = seeded(seed, name, key)
        for _ in range(_DRAWS):
            option = RULES[name](answer, context, chance)
            if option is None:
                break
            if is_wrong(option, context):
                found.setdefault((option.before, option.after, option.at), option)
    return list(found.values())


def is_wrong(option: Falsified, context: Context) -> bool:
    """It reads differently, not only in white space, case or punctuation, and is no answer that is right somewhere."""
    text = normalise(option.text)
    return (
        normalise(option.before) != normalise(option.after)
        and text != normalise(option.answer)
        and text not in context.lexicon.right
    )


def seeded(seed: int, *parts: str) -> random.Random:
    digest = blake2b("\x1f".join((str(seed), *parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))
