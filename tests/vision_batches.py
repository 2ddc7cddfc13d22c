"""Tiny models that see, in memory, with batches that show random pixels: for what is about gradients and memory, not
about images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finefit.model.load import make_trainable
from finefit.objective.batch import Batch
from finefit.spec.models import Lora, Tuning
from finefit.vision import auto_class, geometry_of
from finefit.vision.family import Grid, ImageInput
from tests.vision_models import vlm_config

GRIDS: Mapping[str, tuple[Grid, Grid]] = {
    "qwen2_5_vl": ((1, 4, 8), (1, 8, 4)),
    "qwen3_vl": ((1, 4, 8), (1, 8, 4)),
    "llava": ((1,), (1,)),
}
"""Of two images, by family."""
EVERYWHERE = Lora(
    kind="lora", rank=4, alpha=8, targets={"language": "all-linear", "vision": "all-linear", "projector": "all-linear"}
)


def vision_model(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = vlm_config(family, **changes)
    model: PreTrainedModel = auto_class(config).from_config(config)
    return model.eval()


def trained(family: str, tuning: Tuning = EVERYWHERE, **changes: Any) -> nn.Module:
    """Adapters are moved off their zeros, so that every factor has a gradient."""
    model: nn.Module = make_trainable(vision_model(family, **changes), tuning, name="seeing")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def image_batch(
    family: str, rows: Sequence[int], *, only: Sequence[int] | None = None, tokens: int = 48, seed: int = 0
) -> Batch:
    """`rows`: how many images each has; `only` some of them, as they are among all. The last ten tokens of a row are
    supervised."""
    geometry, draw = geometry_of(vlm_config(family).to_dict()), np.random.default_rng(seed)
    assert geometry is not None
    ids_BT, images = np.full((len(rows), tokens), 7), []
    for at, count in enumerate(rows):
        ids_BT[at] = draw.integers(300, 310, tokens) - 250
        ids_BT[at][ids_BT[at] == geometry.image_token] = 1
        place, own = 1, []
        for grid in GRIDS[family][:count]:
            ids_BT[at, place : place + geometry.num_tokens(grid)] = geometry.image_token
            place += geometry.num_tokens(grid) + 1
            own.append(
                ImageInput(
                    grid,
                    {
                        name: draw.normal(size=blank.shape).astype(blank.dtype)
                        for name, blank in geometry.blank_pixels(grid).items()
                    },
                )
            )
        images.append(own)
    chosen = list(range(len(rows)) if only is None else only)
    ids_BT, images = ids_BT[chosen], [images[at] for at in chosen]
    ids, positions = (
        torch.from_numpy(ids_BT),
        torch.cat([torch.arange(tokens - 11, tokens - 1) + at * tokens for at in range(len(chosen))]),
    )
    return Batch(
        input_ids_BT=ids,
        positions_N=positions,
        targets_N=ids.flatten()[positions + 1],
        num_supervised=positions.numel(),
        num_tokens=ids.numel(),
        lengths=(tokens,) * len(chosen),
        supervised=(10,) * len(chosen),
        extra=geometry.extra(ids_BT, [tokens] * len(chosen), images),
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Which are then gone from the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
