"""Answers, batched by the room that the plan found: the likeliest, or drawn by chance. Prompts come from the renderer that made the training rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import nn

from finefit.artifacts.forecasts import Room
from finefit.data.pictures import Picture
from finefit.data.render import Renderer
from finefit.evaluate.batches import Ahead, Warn, in_batches
from finefit.evaluate.decoding import Choose, Look, causal_of, decode, likeliest
from finefit.evaluate.gallery import Gallery
from finefit.model.attention import turns_by_longest
from finefit.objective.batch import Extra

Pictures = Sequence[Sequence[Picture]]
"""What each row shows."""


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
    gallery: Gallery | None = None,
    pictures: Pictures = (),
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every prompt. Which others an answer was generated with makes no difference to it, but for what kernels round.
    `choose`: how the tokens of a batch are chosen, by the indices of its prompts. `gallery`: of a model that sees, with `pictures` of all prompts."""
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
            look=None if gallery is None else looking(gallery, [pictures[at] for at in chosen]),
        )
        return [_answer(renderer, tokens) for tokens in written]

    return in_batches(lengths, room_for(model, lengths, room), compute, warn=warn, ahead=hanging(gallery, pictures))


def looking(gallery: Gallery, pictures: Pictures) -> Look:
    """At what these prompts show."""

    def look(input_ids_BT: NDArray[np.int64], lengths: Sequence[int]) -> Extra:
        return gallery.lens.extra(
            input_ids_BT, lengths, [[gallery.show(picture) for picture in row] for row in pictures]
        )

    return look


def hanging(gallery: Gallery | None, pictures: Pictures) -> Ahead:
    """What the next rows show is decoded while those before them are computed."""

    def ahead(now: Sequence[int], then: Sequence[int]) -> None:
        if gallery is not None:
            gallery.ahead(*(chain.from_iterable(pictures[at] for at in indices) for indices in (now, then)))

    return ahead


def room_for(model: nn.Module, lengths: Sequence[int], room: Room) -> Room:
    """One by one where a long row would change the others beside it."""
    return replace(room, rows=1) if turns_by_longest(causal_of(model).config, max(lengths, default=0)) else room


def _answer(renderer: Renderer, tokens: list[int]) -> Answer:
    return Answer(
        text=renderer.decode_answer(tokens), new_tokens=len(tokens), is_cut=tokens[-1] not in renderer.stop_tokens
    )
