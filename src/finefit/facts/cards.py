"""Cards by name: the card that a user asks to plan for, and the card that the driver names."""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from finefit.errors import UserError
from finefit.facts.card_table import CARD_KINDS, CardKind

ACCEPTED = (
    "a card (RTX 4090, A100-80GB), a memory size (24GiB, 24GB), several (8xA100-40GB, 2x24GiB), cpu or auto; a "
    "price may follow: RTX 4090@1.10/h"
)
MAX_COUNT = 1024
NUM_NEAREST = 4
SIZE_RANGE_BYTES = (2**20, 2**42)
UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}

_MAKERS_WORDS = {"nvidia", "geforce", "tesla", "gpu", "generation", "edition"}
"""Words that nvidia-smi adds and people omit; no two cards differ only in them."""
_COUNT = re.compile(r"([+-]?[0-9.]+)\s*[x×*]\s*(.*)", re.IGNORECASE | re.DOTALL)
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE)
_PRICE = re.compile(rf"({_NUMBER})\s*(?:/\s*h)?", re.IGNORECASE)
_STATED_SIZE = re.compile(r"(?<![a-z0-9])([0-9]{1,4})\s*gi?b(?![a-z0-9])")
_STATED_SHARE = 0.88
"""A card reports at least this share of the size on its box: ECC takes 1/16, old drivers up to 2 % more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRequest:
    text: str
    """As the user wrote it."""
    kind: CardKind | None
    """None for a bare size, `cpu` and `auto`: without known rates there is no prediction of time."""
    count: int
    """1 for `cpu` and `auto`."""
    memory_bytes: int | None
    """Of one card; None for `cpu` and `auto`, which are read from the machine."""
    is_cpu: bool
    is_auto: bool
    price_per_hour: float | None
    """As written after the @, in the user's currency."""


def parse_card(text: str) -> CardRequest:
    """Reads `[COUNT x] (CARD | SIZE | cpu | auto) [@ PRICE [/h]]`. GiB and MiB are binary, GB and MB decimal: 24GB is
    22.35 GiB."""
    wanted, at, price = text.partition("@")
    count, name = _split_count(wanted.strip(), text)
    price_per_hour = _read_price(price.strip(), text) if at else None
    kind, memory_bytes = None, None
    word = name.casefold()
    if word not in ("cpu", "auto"):
        kind, memory_bytes = _read_card(name, text)
    elif count is not None:
        raise UserError(f"card {text!r} counts {name}, which means all of this machine", f"write {word} alone")
    return CardRequest(
        text=text,
        kind=kind,
        count=count or 1,
        memory_bytes=memory_bytes,
        is_cpu=word == "cpu",
        is_auto=word == "auto",
        price_per_hour=price_per_hour,
    )


def find_kind(driver_name: str, memory_bytes: int | None) -> CardKind | None:
    """The only card of that name with about that memory, of which ECC and old drivers take some; None if the table has
    none or several."""
    kinds = _kinds_named(driver_name)
    if memory_bytes is not None:
        kinds = tuple(kind for kind in kinds if _STATED_SHARE <= memory_bytes / kind.memory_bytes <= 1 / _STATED_SHARE)
    return kinds[0] if len(kinds) == 1 else None


def _split_count(wanted: str, text: str) -> tuple[int | None, str]:
    """The count, if one is written, and what it counts."""
    match = _COUNT.fullmatch(wanted)
    if match is None:
        return None, wanted
    digits, name = match[1], match[2].strip()
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= MAX_COUNT:
        problem = f"card {text!r} asks for {digits} cards; a count is a whole number from 1 to {MAX_COUNT}"
        raise UserError(problem, "write it as in 2x24GiB")
    return int(digits), name


def _read_price(price: str, text: str) -> float:
    match = _PRICE.fullmatch(price)
    per_hour = float(match[1]) if match else math.nan
    if not (math.isfinite(per_hour) and per_hour > 0):
        problem = f"card {text!r} has the price {price!r}, which is not an amount above 0 per hour"
        raise UserError(problem, "write it as in RTX 4090@1.10/h, or leave it out")
    return per_hour


def _read_card(name: str, text: str) -> tuple[CardKind | None, int]:
    if not name:
        raise UserError(f"card {text!r} names no card", f"give {ACCEPTED}")
    kinds = _kinds_named(name)
    if len(kinds) == 1:
        return kinds[0], kinds[0].memory_bytes
    if kinds:
        names = ", ".join(kind.name for kind in kinds)
        problem = f"card {text!r} may be any of {len(kinds)} cards that differ in memory or speed"
        raise UserError(problem, f"say which: {names}")
    size = _SIZE.fullmatch(name)
    if size is None:
        raise UserError(f"card {text!r} is not known", f"nearest known: {_nearest(name)}; give {ACCEPTED}")
    return None, _read_size(size[1], size[2], text)


def _read_size(number: str, unit: str, text: str) -> int:
    if not unit:
        problem = f"card {text!r} is neither a known card nor a size: {number} has no unit"
        raise UserError(problem, f"nearest known: {_nearest(number)}; a size is 24GiB or 24GB")
    if unit.casefold() not in UNITS:
        problem = f"card {text!r} has a size in {unit!r}, which is not a known unit"
        raise UserError(problem, f"write {number}GiB (binary) or {number}GB (decimal)")
    num_bytes = float(number) * UNITS[unit.casefold()]
    lowest, highest = SIZE_RANGE_BYTES
    if not lowest <= num_bytes <= highest:
        problem = f"card {text!r} has {number} {unit} of memory; a card has between 1 MiB and 4096 GiB"
        raise UserError(problem, "write the memory of one card, such as 24GiB")
    return int(num_bytes)


def _nearest(name: str) -> str:
    """Cards with the same model number first (RTX 6000 is part of three names), then by similarity."""
    wanted = _key(name)[:40]
    numbers = set(re.findall(r"[0-9]{2,}", wanted))
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(kind: CardKind) -> tuple[bool, float]:
        matcher.set_seq1(_key(kind.name))
        return not numbers.isdisjoint(re.findall(r"[0-9]{2,}", kind.name)), matcher.ratio()

    return ", ".join(kind.name for kind in sorted(CARD_KINDS, key=likeness, reverse=True)[:NUM_NEAREST])


def _kinds_named(name: str) -> tuple[CardKind, ...]:
    """Cards of exactly that name, else those that it abbreviates, narrowed by a stated size: RTX 3080 is two cards, RTX
    3080 12GB one."""
    exact = _EXACT.get(_key(name))
    if exact is not None:
        return (exact,)
    stated = _STATED_SIZE.search(name.casefold())
    kinds = _SHORT.get(_key(_without_size(name)), ())
    if stated is None:
        return kinds
    box_bytes = int(stated[1]) * 2**30
    return tuple(kind for kind in kinds if _STATED_SHARE * box_bytes <= kind.memory_bytes <= box_bytes)


def _key(name: str) -> str:
    """NVIDIA GeForce RTX 4090, RTX-4090 and rtx4090 are one."""
    return "".join(word for word in re.split(r"[^a-z0-9]+", name.casefold()) if word not in _MAKERS_WORDS)


def _without_size(name: str) -> str:
    return _STATED_SIZE.sub(" ", name.casefold())


def _short_names(kind: CardKind) -> Iterable[str]:
    """What people omit: the size, RTX at the front, the slot."""
    for name in (kind.name, *kind.spellings):
        bare = _without_size(name)
        slotless = re.sub(r"\b(pcie|nvl|sxm2|blackwell)\b", " ", bare)
        for short in (bare, slotless):
            yield short
            yield re.sub(r"^\s*rtx\b", " ", short)
    yield re.sub(r"^RTX\b", " ", kind.name)


def _index_short_names() -> dict[str, tuple[CardKind, ...]]:
    index: dict[str, tuple[CardKind, ...]] = {}
    for kind in CARD_KINDS:
        for key in {_key(short) for short in _short_names(kind)}:
            index[key] = (*index.get(key, ()), kind)
    return index


_EXACT = {_key(name): kind for kind in CARD_KINDS for name in (kind.name, *kind.spellings)}
_SHORT = _index_short_names()
