"""How long a row may be, and how a longer prompt is made to fit: out of the middle of its longest message, at the borders of tokens."""

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
    messages: Sequence[Message], *, length: Callable[[Sequence[Message]], int], spans: Callable[[str], Sequence[Span]], max_tokens: int
) -> tuple[Message, ...] | None:
    """The messages with as much taken out as `length` asks for; None where even one token of each given message is too much.

    The length is measured anew after every cut: the tokens beside a cut may join differently. Each cut takes characters away, so this ends.
    """
    kept = list(messages)
    while (excess := length(kept) - max_tokens) > 0:
        at = _longest(kept, spans)
        if at is None:
            return None
        kept[at] = replace(kept[at], content=without_middle(kept[at].content, spans(kept[at].content), excess))
    return tuple(kept)


def _longest(messages: Sequence[Message], spans: Callable[[str], Sequence[Span]]) -> int | None:
    """Of what is asked or given by a tool; an instruction of the system only where that is used up. An answer never."""
    for roles in (("user", "tool"), ("system",)):
        sizes = [(len(spans(m.content)), -at) for at, m in enumerate(messages) if m.role in roles and len(m.content) > 1]
        sizes = [size for size in sizes if size[0] > 1]
        if sizes:
            return -max(sizes)[1]
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
