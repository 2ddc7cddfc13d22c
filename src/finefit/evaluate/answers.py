"""Answers, batched by the room that the plan found: the likeliest, or drawn by chance. Prompts come from the renderer that made the training rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from finefit.artifacts.records import Room
from finefit.data.render import Renderer
from finefit.evaluate.batches import Warn, in_batches
from finefit.evaluate.decoding import Choose, causal_of, decode, likeliest
from finefit.model.attention import turns_by_longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    new_tokens: int
    """With the one that ended it."""
    is_cut: bool
    """It had not ended after max_new_tokens."""


def answers(
    model: nn.Module,
    renderer: Renderer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    room: Room,
    device: str,
    warn: Warn,
    choose: Callable[[Sequence[int]], Choose] = lambda _: likeliest,
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every prompt. Which others an answer was generated with makes no difference to it, but for what kernels round.
    `choose`: how the tokens of a batch are chosen, by the indices of its prompts."""
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]

    def compute(chosen: list[int]) -> list[Answer]:
        written = decode(
            model,
            [prompts[at] for at in chosen],
            max_new_tokens=max_new_tokens,
            stops=renderer.stop_tokens,
            pad=renderer.pad,
            device=device,
            choose=choose(chosen),
        )
        return [_answer(renderer, tokens) for tokens in written]

    return in_batches(lengths, room_for(model, lengths, room), compute, warn=warn)


def room_for(model: nn.Module, lengths: Sequence[int], room: Room) -> Room:
    """One by one where a long row would change the others beside it."""
    return replace(room, rows=1) if turns_by_longest(causal_of(model).config, max(lengths, default=0)) else room


def _answer(renderer: Renderer, tokens: list[int]) -> Answer:
    return Answer(text=renderer.decode_answer(tokens), new_tokens=len(tokens), is_cut=tokens[-1] not in renderer.stop_tokens)
