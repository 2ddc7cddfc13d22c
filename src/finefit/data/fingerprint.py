"""Fingerprints identify rows across processes and runs: hashes of the prompt, and of windows of its text."""

import os.path
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from finefit.data.rows import IMAGE_PLACEHOLDER, Message, Row
from finefit.errors import DataError

Windows = NDArray[np.uint32]

_WINDOW_BYTES = 32
CHOSEN_BITS = 29
"""Bits of a 32-bit hash: a window whose hash is below 2**29 is kept, which is one in eight."""
_WORD_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_MIX_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
HALF = np.uint64(32)

_PUNCTUATION = b".,;:!?"
"""Sentence punctuation. Operators, brackets and quotes are content: 3 - 5 and 3 * 5, type([1]) and type((1)), f'(x) and
f(x) ask for different things."""
_QUOTES = {"'": "‘’‚‛‹›′ʼ", '"': "“”„‟«»"}
"""Variants of the straight quotes."""
_NARROWED = tuple((wide, unicodedata.normalize("NFKC", wide)) for wide in "，！？：；（）～　")
_NOTHING = np.uint32(1)
_SEPARATING = {"Pc", "Pd", "Po", "Zs", "Zl", "Zp", "Cc"}
"""Unicode categories that separate words."""
_LAST_SCRIPT = 0x20000
"""Code points beyond this one are only ideographs and tags."""
_ASCII_FOLD = bytes(32 if c <= 32 or c == 127 or c in _PUNCTUATION else c for c in bytes(range(256)).lower())


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    exact: int
    """Hash of prompt and answer, unchanged."""
    asked: int
    """Hash of the prompt, unchanged."""
    prompt: int
    """Hash of the normalised prompt."""
    windows: Windows
    """Sorted and unique."""
    turns: tuple[int, ...] = ()
    """Hashes of the normalised prompts of earlier answers that are trained on: all messages before each answer, and the
    last message alone."""


def fingerprint(row: Row, *, with_system: bool = False, turns: Literal["all", "last"] = "all") -> Fingerprint:
    """`with_system`: see `system_is_content`. `turns`: the turns that are trained on."""
    asked, images = _asked(row, with_system), _images(row)
    digest = blake2b(images, digest_size=8)
    digest.update(asked.encode("utf-8", "surrogatepass"))
    asked_key = int.from_bytes(digest.digest(), "little")
    if not row.text:
        answer = row.messages[row.num_given :] if row.rejected else row.messages[-1:]
        texts = ["", *map(_text, answer), f"\x1e{row.is_good}", *map(_text, row.rejected)]
        digest.update("\x1e".join(texts).encode("utf-8", "surrogatepass"))
    folded = _folded_prompt(asked, images)
    # An image is half of the question, and this code does not know whether two images are alike.
    windows = _windows(folded) if not images else np.empty(0, np.uint32)
    earlier = _turns(row, images, with_system) if turns == "all" else ()
    exact = int.from_bytes(digest.digest(), "little")
    return Fingerprint(exact, asked_key, _key(images + folded), windows, earlier)


def prompt_key(row: Row, *, with_system: bool = False) -> int:
    """The key is equal for rows whose prompts differ only in case and sentence punctuation."""
    images = _images(row)
    return _key(images + _folded_prompt(_asked(row, with_system), images))


def _folded_prompt(asked: str, images: bytes) -> bytes:
    """Placeholders are removed: the question about an image is the same with or without one."""
    return _folded(asked.replace(IMAGE_PLACEHOLDER, " ") if images else asked)


def system_is_content(rows: Iterable[Row]) -> bool:
    """Returns whether the system messages of a sample differ so much that they are part of the prompt: at least 3
    distinct texts, and more than one per ten messages."""
    messages = ([m for m in row.messages if m.role == "system"] for row in rows)
    systems = [_key(_folded("\n".join(_texts(system)))) for system in messages if system]
    num_different = len(set(systems))
    return num_different >= 3 and 10 * num_different > len(systems)


def normalise(text: str) -> str:
    """Removes case, sentence punctuation and variant letter forms; a text that consists of nothing else is
    unchanged."""
    return _folded(text).decode("utf-8", "surrogatepass")


def _asked(row: Row, with_system: bool) -> str:
    """Returns everything before the answer, or the answer if nothing comes before it."""
    if row.text:
        return row.text
    given = row.messages[: row.num_given] if row.rejected else row.messages[:-1]
    return "\n".join(_texts(given or row.messages, with_system))


def _turns(row: Row, images: bytes, with_system: bool) -> tuple[int, ...]:
    messages, words = row.messages, cache(_words)  # cached, because a message comes before every later answer
    keys: list[int] = []
    for at in range(max(row.num_given, 1), len(messages) - 1):
        if messages[at].role != "assistant":
            continue
        prompts = [_texts(messages[:at], with_system)]
        if messages[at - 1].role == "user":
            system = (m for m in messages[:at] if m.role == "system")
            prompts.append(_texts([*system, messages[at - 1]], with_system))
        for texts in prompts:
            folded = b" ".join(filter(None, map(words, texts))) or "\n".join(texts).encode("utf-8", "surrogatepass")
            keys.append(_key(images + folded))
    return tuple(dict.fromkeys(keys))


def _texts(messages: Sequence[Message], with_system: bool = True) -> list[str]:
    """A system message counts if there is no other message."""
    chosen = messages if with_system else [m for m in messages if m.role != "system"]
    return [_text(message) for message in chosen or messages]


def _text(message: Message) -> str:
    if not message.reasoning and not message.tool_calls:
        return message.content
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    return "\n".join([message.reasoning, message.content, *calls])


def _images(row: Row) -> bytes:
    """Checked images are identified by content, because one image may be at several paths."""
    if row.image_refs:
        return b"".join(bytes.fromhex(ref.sha256)[:8] for ref in row.image_refs)
    contents: list[bytes] = []
    for image in row.images:
        # A path is relative to its root, or to its file: train/1.png and test/1.png are two images.
        path = os.path.join(image.root_name or os.path.dirname(row.source), image.path)  # noqa: PTH118, PTH120
        contents.append(image.data or path.encode("utf-8", "surrogatepass"))
    return b"".join(blake2b(content, digest_size=8).digest() for content in contents)


def _key(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def _folded(text: str) -> bytes:
    return _words(text) or text.encode("utf-8", "surrogatepass")


def _words(text: str) -> bytes:
    plain = text if text.isascii() else _folded_letters(text)
    return b" ".join(plain.encode("utf-8", "surrogatepass").translate(_ASCII_FOLD).split())


def _folded_letters(text: str) -> str:
    # Wide punctuation alone would send every Chinese text through the slow normalisation.
    for wide, narrow in _NARROWED:
        text = text.replace(wide, narrow)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
    instead = _substitutes().take(codes, mode="clip")
    if not instead.any():
        return text
    is_kept = instead != _NOTHING
    text = np.where(instead, instead, codes)[is_kept].tobytes().decode("utf-32-le", "surrogatepass")
    # The characters on both sides of an invisible mark may now combine into one letter.
    return text if is_kept.all() else _folded_letters(text)


@cache
def _substitutes() -> NDArray[np.uint32]:
    """Maps each code point to a space for punctuation and separators, to nothing for invisible marks, to a straight
    quote for its variants, and to 0 if the character stays, as brackets and combining marks do."""
    table = np.zeros(_LAST_SCRIPT + 1, np.uint32)
    for code in range(128, _LAST_SCRIPT):
        category = unicodedata.category(chr(code))
        if category == "Cf":
            table[code] = _NOTHING
        elif category in _SEPARATING:
            table[code] = ord(" ")
    for straight, forms in _QUOTES.items():
        for form in forms:
            table[ord(form)] = ord(straight)
    return table


def _windows(content: bytes) -> Windows:
    num_windows = len(content) - _WINDOW_BYTES + 1
    if num_windows < 1:
        return np.empty(0, np.uint32)
    words = np.ndarray((len(content) - 7,), np.dtype("<u8"), content, strides=(1,)).copy()  # aligned: half the time
    hashes = words[:num_windows] * _WORD_FACTORS[0]
    for i, factor in enumerate(_WORD_FACTORS[1:], 1):
        hashes += words[8 * i : 8 * i + num_windows] * factor
    hashes ^= hashes >> HALF
    hashes *= _MIX_FACTOR
    mixed = (hashes >> HALF).astype(np.uint32)
    return once(mixed.compress(mixed < 2**CHOSEN_BITS))


def once(windows: Windows) -> Windows:
    """Returns the sorted unique values; `np.unique` takes several times as long."""
    ordered = np.sort(windows)
    is_new = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def held_share(keys: NDArray[np.uint64], share: float, seed: int) -> NDArray[np.bool_]:
    """Selects the rows to hold out: round(share * n) as nearly as groups of equal keys allow, independent of row
    order."""
    groups, group_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    if groups.size < 2:
        rows = f"{keys.size} rows with {groups.size} different prompts: equal prompts stay together"
        raise DataError(f"a share of {share:g} cannot be held out of {rows}", "give validation a path of its own")
    target = min(max(round(share * keys.size), 1), keys.size - 1)
    order = np.argsort(_mixed(groups ^ _mixed(np.array([seed % 2**64], np.uint64))))
    chosen = _fill(sizes[order], target)
    if not chosen.any():
        chosen[np.argmin(sizes[order])] = True
    is_held = np.zeros(groups.size, np.bool_)
    is_held[order[chosen]] = True
    return is_held[group_of]


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of all 64-bit numbers: the finaliser of splitmix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _fill(sizes: NDArray[np.intp], space: int) -> NDArray[np.bool_]:
    """Takes, in order, each group that still fits."""
    chosen = np.zeros(sizes.size, np.bool_)
    waiting = np.flatnonzero(sizes <= space)
    while waiting.size:
        filled = np.cumsum(sizes[waiting])
        fits = int(np.searchsorted(filled, space, "right"))
        chosen[waiting[:fits]] = True
        space -= int(filled[fits - 1])
        waiting = waiting[fits:]
        waiting = waiting[sizes[waiting] <= space]
    return chosen
