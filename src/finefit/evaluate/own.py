"""Answers of a model of the user's own: by its `generate`, from what its `inputs` make of prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finefit.artifacts.forecasts import Room
from finefit.data.looking import opened
from finefit.data.pictures import Picture
from finefit.data.render import Renderer
from finefit.errors import ModelError
from finefit.evaluate.answers import Answer
from finefit.evaluate.batches import Warn, in_batches
from finefit.evaluate.decoding import ended
from finefit.model.custom import Own
from finefit.objective.custom import CustomRow, seed_of
from finefit.step.custom import twin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, with what it shows."""

    at: int
    """Its number among the items, by which its random numbers are the same in every run."""
    tokens: Sequence[int]
    pictures: Sequence[Picture] = ()


def require_own_answers(own: Own, task: str, *, weighs: bool) -> None:
    """`weighs`: the task asks how likely given answers are."""
    if weighs:
        raise ModelError(
            f"{task} asks how likely given answers are, which {own.file.name} does not say",
            "evaluate a task that reads an answer",
        )
    if not own.generates:
        raise ModelError(
            f"{task} needs answers, and {own.file.name} has no generate",
            "give the model a generate(inputs, *, max_new_tokens, stops)",
        )


def own_answers(
    own: Own, renderer: Renderer, prompts: Sequence[Asked], *, max_new_tokens: int, room: Room, device: str, warn: Warn
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every prompt."""
    stops = frozenset(renderer.stop_tokens)

    def compute(chosen: list[int]) -> list[Answer]:
        inputs = twin_of(own.written).inputs([_row(prompts[at]) for at in chosen])
        with torch.inference_mode():
            here = {name: tensor.to(device) for name, tensor in inputs.items()}
            written = own.generate(here, rows=len(chosen), max_new_tokens=max_new_tokens, stops=stops)
        return [_answer(renderer, ended(tokens, stops), stops, max_new_tokens) for tokens in written]

    return in_batches([len(prompt.tokens) + max_new_tokens for prompt in prompts], room, compute, warn=warn)


def _row(prompt: Asked) -> CustomRow:
    tokens = np.asarray(prompt.tokens, dtype=np.int64)
    images = tuple(opened(picture) for picture in prompt.pictures)
    return CustomRow(
        tokens=tokens,
        supervised=np.zeros(len(tokens), np.bool_),
        images=images,
        seed=seed_of(0, "answer", prompt.at),
        is_prompt=True,
    )


def _answer(renderer: Renderer, tokens: list[int], stops: frozenset[int], most: int) -> Answer:
    """One that stops short of the most has ended, with a stop token or without."""
    is_cut = len(tokens) >= most and tokens[-1] not in stops
    return Answer(text=renderer.decode_answer(tokens) if tokens else "", new_tokens=len(tokens), is_cut=is_cut)
