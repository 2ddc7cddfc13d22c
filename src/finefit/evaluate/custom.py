"""Answers of a custom model: by its `generate`, from the inputs that its `inputs` makes of prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.custom.inputs import meta_twin
from finefit.custom.model import CustomFamily
from finefit.data.image_check import load_image
from finefit.data.render import Renderer
from finefit.data.rows import ImageRef
from finefit.errors import ModelError
from finefit.evaluate.batches import Answer, Warn, in_batches
from finefit.evaluate.decoding import until_stop
from finefit.objective.custom import CustomRow, seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomPrompt:
    """A prompt with its images."""

    at: int
    """Its number among the items, which makes its random numbers the same in every run."""
    tokens: Sequence[int]
    image_refs: Sequence[ImageRef] = ()


def require_custom_answers(own: CustomFamily, task: str, *, weighs: bool) -> None:
    """`weighs`: the task asks for likelihoods of given answers."""
    if weighs:
        raise ModelError(
            f"{task} asks for likelihoods of given answers, which {own.name} does not compute",
            "evaluate a task that reads an answer",
        )
    if not own.generates:
        raise ModelError(
            f"{task} needs answers, and {own.name} has no generate",
            "give the model a generate(inputs, *, max_new_tokens, stops)",
        )


def custom_answers(
    own: CustomFamily,
    renderer: Renderer,
    prompts: Sequence[CustomPrompt],
    *,
    max_new_tokens: int,
    batch_limit: EvalBatchLimit,
    device: str,
    warn: Warn,
) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every prompt."""
    stops = frozenset(renderer.stop_tokens)

    def compute(chosen: list[int]) -> list[Answer]:
        inputs = meta_twin(own.source).inputs([_row(prompts[at]) for at in chosen])
        with torch.inference_mode():
            here = {name: tensor.to(device) for name, tensor in inputs.items()}
            written = own.generate(here, rows=len(chosen), max_new_tokens=max_new_tokens, stops=stops)
        return [_answer(renderer, until_stop(tokens, stops), stops, max_new_tokens) for tokens in written]

    return in_batches([len(prompt.tokens) + max_new_tokens for prompt in prompts], batch_limit, compute, warn=warn)


def _row(prompt: CustomPrompt) -> CustomRow:
    tokens = np.asarray(prompt.tokens, dtype=np.int64)
    images = tuple(load_image(picture) for picture in prompt.image_refs)
    return CustomRow(
        tokens=tokens,
        supervised=np.zeros(len(tokens), np.bool_),
        images=images,
        seed=seed_of(0, "answer", prompt.at),
        is_prompt=True,
    )


def _answer(renderer: Renderer, tokens: list[int], stops: frozenset[int], most: int) -> Answer:
    """An answer below the limit has ended, with a stop token or without."""
    is_cut = len(tokens) >= most and tokens[-1] not in stops
    return Answer(text=renderer.decode_answer(tokens) if tokens else "", new_tokens=len(tokens), is_cut=is_cut)
