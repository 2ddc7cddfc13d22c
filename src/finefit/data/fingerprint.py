"""What of a row is compared with others: hashes of what is asked, and windows of its text. The same in every process and run."""

import os.path
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from finefit.data.conversations import IMAGE_MARK
from finefit.data.rows import Image, Message, Row
from finefit.errors import DataError

Windows = NDArray[np.uint32]

_WINDOW_BYTES = 32
CHOSEN_BITS = 29
"""Of 32: a window whose hash is below 2**29 is chosen, one in eight."""
_WORD_FACTORS = tuple(
    np.uint64(f) for f in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
_MIX_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
HALF = np.uint64(32)

_PUNCTUATION = b".,;:!?"
"""Of sentences. Operators, brackets and quotes are content: 3 - 5 and 3 * 5, type([1]) and type((1)), f'(x) and f(x) ask for different things."""
_QUOTES = {"'": "‘’‚‛‹›′ʼ", '"': "“”„‟«»"}
"""Forms of the straight ones."""
_NARROWED = tuple((wide, unicodedata.normalize("NFKC", wide)) for wide in "，！？：；（）～　")
_NOTHING = np.uint32(1)
_SEPARATING = {"Pc", "Pd", "Po", "Zs", "Zl", "Zp", "Cc"}
"""Categories of Unicode."""
_LAST_SCRIPT = 0x20000
"""Beyond stand only ideographs and tags."""
_ASCII_FOLD = bytes(32 if c <= 32 or c == 127 or c in _PUNCTUATION else c for c in bytes(range(256)).lower())


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """All that the comparison needs of a row; the same in every process and run."""

    exact: int
    """Of prompt and answer as they stand."""
    asked: int
    """Of the prompt as it stands."""
    prompt: int
    """Of the normalised prompt."""
    windows: Windows
    """Sorted, each once."""
    turns: tuple[int, ...] = ()
    """Of the normalised prompts of earlier answers that are trained on too: all before an answer, and the user's last message alone."""


def fingerprint(row: Row, *, with_system: bool = False, turns: Literal["all", "last"] = "all") -> Fingerprint:
    """With the system message where it is content, not the same few words in all rows: see `system_is_content`. `turns` are those trained on."""
    asked, images = _asked(row, with_system), _images(row)
    digest = blake2b(images, digest_size=8)
    digest.update(asked.encode("utf-8", "surrogatepass"))
    asked_key = _as_int(digest.digest())
    digest.update(_answer(row).encode("utf-8", "surrogatepass"))
    folded = _folded(
        asked.replace(IMAGE_MARK, " ") if images else asked
    )  # with or without a mark it is asked about the same image
    # An image is half of the question, and whether two images are alike is not known here.
    windows = _windows(folded) if not images else np.empty(0, np.uint32)
    earlier = _turns(row, images, with_system) if turns == "all" else ()
    return Fingerprint(_as_int(digest.digest()), asked_key, _key(images + folded), windows, earlier)


def prompt_key(row: Row, *, with_system: bool = False) -> int:
    """Equal for rows that ask the same but for case and sentence punctuation."""
    images, asked = _images(row), _asked(row, with_system)
    return _key(images + _folded(asked.replace(IMAGE_MARK, " ") if images else asked))


def system_is_content(rows: Iterable[Row]) -> bool:
    """Whether the system messages of a sample differ so much that they are part of what is asked: 3 texts or more, for more than a tenth of them."""
    systems = [
        _key(_folded("\n".join(_told(system))))
        for row in rows
        if (system := [m for m in row.messages if m.role == "system"])
    ]
    num_different = len(set(systems))
    return num_different >= 3 and 10 * num_different > len(systems)


def normalise(text: str) -> str:
    """Without case, sentence punctuation and the forms of spaces, quotes and letters; a text of nothing else stays as it is."""
    return _folded(text).decode("utf-8", "surrogatepass")


def _asked(row: Row, with_system: bool) -> str:
    """All before the answer; where nothing stands there, the answer."""
    if row.text:
        return row.text
    given = row.messages[: row.num_given] if row.rejected else row.messages[:-1]
    return "\n".join(_told(given or row.messages, with_system))


def _turns(row: Row, images: bytes, with_system: bool) -> tuple[int, ...]:
    earlier = [i for i in range(max(row.num_given, 1), len(row.messages) - 1) if row.messages[i].role == "assistant"]
    if not earlier:
        return ()
    words = cache(_words)  # a message stands before every later answer
    keys = []
    for told in _told_before(row.messages, earlier, with_system):
        folded = b" ".join(filter(None, map(words, told))) or "\n".join(told).encode("utf-8", "surrogatepass")
        keys.append(_key(images + folded))
    return tuple(dict.fromkeys(keys))


def _told_before(messages: Sequence[Message], answers: Iterable[int], with_system: bool) -> Iterator[list[str]]:
    for i in answers:
        yield _told(messages[:i], with_system)
        if messages[i - 1].role == "user":
            yield _told([*(m for m in messages[:i] if m.role == "system"), messages[i - 1]], with_system)


def _told(messages: Sequence[Message], with_system: bool = True) -> list[str]:
    """A system message that is left out is told where nothing else is."""
    told = messages if with_system else [m for m in messages if m.role != "system"]
    return [_said(message) for message in told or messages]


def _answer(row: Row) -> str:
    if row.text:
        return ""
    answer = row.messages[row.num_given :] if row.rejected else row.messages[-1:]
    return "\x1e".join(["", *map(_said, answer), f"\x1e{row.is_good}", *map(_said, row.rejected)])


def _said(message: Message) -> str:
    if not message.reasoning and not message.tool_calls:
        return message.content
    return "\n".join(
        [message.reasoning, message.content, *(f"{call.name} {call.arguments}" for call in message.tool_calls)]
    )


def _images(row: Row) -> bytes:
    """By content, where they were looked at: one image may lie at several places."""
    if row.pictures:
        return b"".join(bytes.fromhex(picture.sha256)[:8] for picture in row.pictures)
    return b"".join(_image(row.source, image) for image in row.images)


def _image(source: str, image: Image) -> bytes:
    # A path is relative to its root, or to its file: train/1.png and test/1.png are two images.
    root = image.root_name or os.path.dirname(source)  # noqa: PTH120 a name, no path
    content = image.data or os.path.join(root, image.path).encode("utf-8", "surrogatepass")  # noqa: PTH118
    return blake2b(content, digest_size=8).digest()


def _key(content: bytes) -> int:
    return _as_int(blake2b(content, digest_size=8).digest())


def _as_int(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


def _folded(text: str) -> bytes:
    return _words(text) or text.encode("utf-8", "surrogatepass")


def _words(text: str) -> bytes:
    plain = text if text.isascii() else _folded_letters(text)
    return b" ".join(plain.encode("utf-8", "surrogatepass").translate(_ASCII_FOLD).split())


def _folded_letters(text: str) -> str:
    # Wide punctuation alone would send every Chinese text through the slow path of the normal form.
    for wide, narrow in _NARROWED:
        text = text.replace(wide, narrow)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
    instead = _substitutes().take(codes, mode="clip")
    if not instead.any():
        return text
    is_kept = instead != _NOTHING
    text = np.where(instead, instead, codes)[is_kept].tobytes().decode("utf-32-le", "surrogatepass")
    # What stood on both sides of an invisible mark may now be one letter.
    return text if is_kept.all() else _folded_letters(text)


@cache
def _substitutes() -> NDArray[np.uint32]:
    """By code point: a space for punctuation and separators, nothing for invisible marks, a straight quote for its other forms,
    0 where the letter stays, as brackets and the marks that belong to a letter do.
    """
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
    words = np.ndarray(
        (len(content) - 7,), np.dtype("<u8"), content, strides=(1,)
    ).copy()  # aligned, which halves the time
    hashes = words[:num_windows] * _WORD_FACTORS[0]
    for i, factor in enumerate(_WORD_FACTORS[1:], 1):
        hashes += words[8 * i : 8 * i + num_windows] * factor
    hashes ^= hashes >> HALF
    hashes *= _MIX_FACTOR
    mixed = (hashes >> HALF).astype(np.uint32)
    chosen: Windows = mixed.compress(mixed < 2**CHOSEN_BITS)
    chosen.sort()
    return once(chosen)


def once(ordered: Windows) -> Windows:
    is_new = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def held_share(keys: NDArray[np.uint64], share: float, seed: int) -> NDArray[np.bool_]:
    """Which rows are held out: round(share * n) of them, as nearly as whole groups of equal keys allow, whatever the order of the rows."""
    groups, group_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    if groups.size < 2:
        raise DataError(
            f"a share of {share:g} cannot be held out of {keys.size} rows with {groups.size} different prompts: equal prompts stay together",
            "give validation a path of its own",
        )
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


def _fill(sizes: NDArray[np.intp], room: int) -> NDArray[np.bool_]:
    """Takes each in turn that still fits."""
    chosen = np.zeros(sizes.size, np.bool_)
    waiting = np.flatnonzero(sizes <= room)
    while waiting.size:
        filled = np.cumsum(sizes[waiting])
        fits = int(np.searchsorted(filled, room, "right"))
        chosen[waiting[:fits]] = True
        room -= int(filled[fits - 1])
        waiting = waiting[fits:]
        waiting = waiting[sizes[waiting] <= room]
    return chosen
