"""Binds a model into the `Forward` that objectives call: logits at the supervised positions only.

A hook before the head drops the other positions, so the model's own code (scaling, soft-capping) still makes the logits, and
prompt tokens never meet the vocabulary. N supervised positions of B x T, H hidden, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from finefit.objective.batch import Forward


def bind(model: nn.Module, *, autocast: AbstractContextManager[Any] | None = None) -> Forward:
    head = model.get_output_embeddings()  # type: ignore[operator]
    context = autocast or nullcontext()

    def forward(input_ids_BT: Tensor, positions_N: Tensor) -> Tensor:
        def supervised_only(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            hidden_BTH = args[0]
            return (hidden_BTH.flatten(0, 1).index_select(0, positions_N).unsqueeze(0),)

        hook = head.register_forward_pre_hook(supervised_only)
        try:
            with context:
                logits_1NV: Tensor = model(input_ids=input_ids_BT, use_cache=False).logits
        finally:
            hook.remove()
        return logits_1NV.squeeze(0)

    return forward


def autocast_for(device: str, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
