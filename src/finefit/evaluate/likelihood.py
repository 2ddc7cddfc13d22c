"""How likely given answers are to the model. They are rendered as training rows are, and the tokens that count are the supervised ones: the answer
with its end. Plain text counts whole, window by window."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from finefit.artifacts.forecasts import Room
from finefit.data.budget import Budget
from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.data.render import Renderer
from finefit.data.rows import Message, Row
from finefit.errors import DataError
from finefit.evaluate.answers import hanging, room_for
from finefit.evaluate.batches import Warn, in_batches
from finefit.evaluate.decoding import causal_of
from finefit.evaluate.gallery import Gallery
from finefit.objective.batch import Batch
from finefit.step.forward import bind

LOGITS_AT_ONCE = 256
"""Tokens whose logits exist at once."""


def examples_of(
    renderer: Renderer, row: Row, text: str, *, prompt: Sequence[Message], window: int
) -> tuple[Example, ...]:
    """Of one text behind the prompt of a row: one example, or for plain text its windows."""
    budget = Budget(max_tokens=window if row.text else sys.maxsize, too_long="error", turns="last")
    (rendered,) = renderer.render([_written(row, text, prompt)], budget)
    if rendered.problem:
        raise DataError(
            f"{row.place} has an answer whose likelihood cannot be asked for: {rendered.problem}", rendered.remedy
        )
    return rendered.examples


def _written(row: Row, text: str, prompt: Sequence[Message]) -> Row:
    """The row's own answer keeps what else its message holds; plain text is all that its row has."""
    if row.text:
        return row
    answer = row.messages[-1] if text == row.answer else Message("assistant", text)
    return replace(row, messages=(*prompt, answer), num_given=len(prompt), rejected=())


def logprobs(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    pad: int,
    room: Room,
    device: str,
    warn: Warn,
    gallery: Gallery | None = None,
) -> Iterator[tuple[int, float]]:
    """(index, summed log-probability of the supervised tokens) of every example. `gallery`: of a model that sees."""
    sight: dict[str, Any] = {} if gallery is None else {"lens": gallery.lens, "show": gallery.show}
    forward, lengths = bind(model, loss_chunk=LOGITS_AT_ONCE), [len(example.tokens) for example in examples]
    at_the_end = _last_device(model)

    def compute(chosen: list[int]) -> list[float]:
        batch = collate([examples[at] for at in chosen], pad=pad, **sight)
        with torch.inference_mode():
            found_N = forward(_moved(batch, device, at_the_end)).to("cpu", torch.float64)
        parts: Sequence[Tensor] = torch.split(found_N, [num_counted(examples[at]) for at in chosen])
        return [float(part.sum()) for part in parts]

    ahead = hanging(gallery, [example.images for example in examples])
    return in_batches(lengths, room_for(model, lengths, room), compute, warn=warn, ahead=ahead)


def num_counted(example: Example) -> int:
    """Nothing stands before a first token that could predict it."""
    return sum(example.supervised[1:])


def _moved(batch: Batch, device: str, at_the_end: torch.device) -> Batch:
    """A model that is spread over cards reads tokens on its first and answers on its last."""
    on_first = batch.moved(lambda tensor: tensor.to(device))
    return replace(on_first, positions_N=batch.positions_N.to(at_the_end), targets_N=batch.targets_N.to(at_the_end))


def _last_device(model: nn.Module) -> torch.device:
    """Of the backbone's last tensor, which is that of its last norm."""
    *_, last = causal_of(model).base_model.parameters()
    return torch.device(last.device)
