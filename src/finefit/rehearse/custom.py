"""A model of the user's own on fake tensors: built on the meta device by its own code, and given what its own `inputs` make of blank rows."""

from collections.abc import Sequence

import torch
from torch import nn

from finefit.model.custom import build
from finefit.model.custom_files import Written
from finefit.model.load import make_trainable
from finefit.objective.batch import Extra
from finefit.spec.models import Lora, Tuning
from finefit.step.custom import Compose, blank_rows, twin_of

UNKNOWN_SIZE = (512, 512)
"""Of an image that nothing is known of."""


def own_on_meta(found: Written, tuning: Tuning, dtype: torch.dtype, *, answers: bool) -> nn.Module:
    """With what is trained of it; `answers`: as an evaluation loads it."""
    with torch.device("meta"):
        model = build(found, device="meta")
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if answers and not isinstance(tuning, Lora):
            return model.requires_grad_(False)
        trained: nn.Module = make_trainable(model, tuning, name="rehearsed")
    return trained.requires_grad_(False) if answers else trained


def blank_extra(found: Written, *, rows: int, tokens: int, supervised: int, sizes: Sequence[tuple[int, ...]]) -> Extra:
    """On the meta device. Not to be called among fake tensors. Where no row is there to tell, there are as many images as the model asks for."""
    sizes = sizes or [UNKNOWN_SIZE] * (twin_of(found).views or 0)
    blank = blank_rows(rows, tokens=tokens, supervised=supervised, sizes=sizes)
    return Compose(found=found, pad=0).extra(blank).moved(lambda tensor: torch.empty_like(tensor, device="meta"))


def num_layers(found: Written) -> int:
    """That may be computed again."""
    return len(twin_of(found).layers)
