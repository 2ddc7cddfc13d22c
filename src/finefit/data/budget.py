"""How long a row may be, and how a longer prompt is made to fit: out of the middle of its longest text, at the borders of tokens. A message is one
text, or where images stand in it, what stands between them; the images stay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from finefit.data.rows import Message

Span = tuple[int, int]
"""The characters of a token: from, to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    max_tokens: int
    too_long: Literal["error", "drop", "cut_prompt"]
    turns: Literal["all", "last"]


def fitted(
    messages: Sequence[Message],
    *,
    length: Callable[[Sequence[Message]], int],
    spans: Callable[[str], Sequence[Span]],
    max_tokens: int,
    mark: str | None = None,
) -> tuple[Message, ...] | None:
    """The messages with as much taken out as `length` asks for; None where even one token of each given text is too much. `mark`: stands for an image
    wherever it is found.

    The length is measured anew after every cut: the tokens beside a cut may join differently. Each cut takes characters away, so this ends.
    """
    kept, texts = list(messages), [message.content.split(mark) if mark else [message.content] for message in messages]
    while (excess := length(kept) - max_tokens) > 0:
        found = _longest(kept, texts, spans)
        if found is None:
            return None
        at, part = found
        texts[at][part] = without_middle(texts[at][part], spans(texts[at][part]), excess)
        kept[at] = replace(kept[at], content=(mark or "").join(texts[at]))
    return tuple(kept)


def _longest(
    messages: Sequence[Message], texts: Sequence[Sequence[str]], spans: Callable[[str], Sequence[Span]]
) -> tuple[int, int] | None:
    """Message and part of what is asked or given by a tool; an instruction of the system only where that is used up. An answer never."""
    for roles in (("user", "tool"), ("system",)):
        parts = [
            (at, part, text)
            for at, m in enumerate(messages)
            if m.role in roles
            for part, text in enumerate(texts[at])
            if len(text) > 1
        ]
        sizes = [(len(spans(text)), -at, -part) for at, part, text in parts]
        sizes = [size for size in sizes if size[0] > 1]
        if sizes:
            _, at, part = max(sizes)
            return -at, -part
    return None


def without_middle(text: str, spans: Sequence[Span], excess: int) -> str:
    """Less `excess` tokens, but for one that always stays. `spans` are those of `text`."""
    num_kept = max(len(spans) - excess, 1)
    num_head = (num_kept + 1) // 2
    tail_at = len(spans) - (num_kept - num_head)
    head_end = _border(spans, num_head, inner=0)
    tail_start = _border(spans, tail_at, inner=1) if tail_at < len(spans) else len(text)
    shorter = text[:head_end] + text[tail_start:] or text[:1]
    middle = len(text) // 2
    return shorter if len(shorter) < len(text) else text[:middle] + text[middle + 1 :]


def _border(spans: Sequence[Span], at: int, *, inner: int) -> int:
    """The character between token at - 1 and token at; one that both share goes as a whole, so the border moves to its outer side."""
    left, right = spans[at - 1], spans[at]
    if left[1] <= right[0]:
        return left[1] if inner == 0 else right[0]
    return left[0] if inner == 0 else right[1]
