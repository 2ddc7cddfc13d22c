"""A model of the user's own in the step: rows become what it takes, its loss becomes the `Forward` that the objective calls, and its layers are
computed again where a lever asks for it.

Inputs are made by a twin of the model on the meta device, so they can depend on no weight, and any process can make them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from finefit.artifacts.records import Levers
from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.data.looking import opened
from finefit.errors import FinefitError, ModelError, SpecError
from finefit.model.custom import Inputs, Own, build, own_of
from finefit.model.custom_files import Written
from finefit.objective.batch import Batch, Extra, Forward
from finefit.objective.custom import COUNT, CustomRow, own_loss
from finefit.step.fused import Lever, release
from finefit.step.shortage import is_shortage

_TWINS: dict[str, Own] = {}


def twin_of(found: Written) -> Own:
    """Built once in a process."""
    key = json.dumps(found.as_config(), sort_keys=True)
    if key not in _TWINS:
        own = own_of(build(found, device="meta"))
        assert own is not None
        _TWINS[key] = own
    return _TWINS[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """Rows -> a batch, in whatever process. Its tokens are there as in any batch, by which it is counted; the model is given its `extra`."""

    found: Written
    pad: int

    def __call__(self, examples: Sequence[Example], seeds: Sequence[int]) -> Batch:
        rows = [row_of(example, seed) for example, seed in zip(examples, seeds, strict=True)]
        return replace(collate(examples, pad=self.pad), extra=self.extra(rows))

    def extra(self, rows: Sequence[CustomRow]) -> Extra:
        twin = twin_of(self.found)
        inputs = twin.inputs(rows)
        return Extra(tensors=inputs, host={COUNT: twin.count(inputs)}, identity=_identity(inputs))


def row_of(example: Example, seed: int, *, is_prompt: bool = False) -> CustomRow:
    return CustomRow(
        tokens=np.asarray(example.tokens, dtype=np.int64),
        supervised=np.asarray(example.supervised, dtype=np.bool_),
        images=tuple(opened(picture) for picture in example.images),
        seed=seed,
        is_prompt=is_prompt,
    )


def blank_rows(count: int, *, tokens: int, supervised: int, sizes: Sequence[tuple[int, ...]] = ()) -> list[CustomRow]:
    """As large as the largest that there are, with nothing in them; what is supervised stands at the end. `sizes`: width and height of the images."""
    images = tuple(PIL.Image.new("RGB", (size[0], size[1])) for size in sizes)
    marks = np.arange(tokens) >= tokens - supervised
    return [
        CustomRow(tokens=np.zeros(tokens, np.int64), supervised=marks, images=images, seed=at) for at in range(count)
    ]


def _identity(inputs: Inputs) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


Loss = Callable[[Inputs], Tensor]


def bind_own(
    own: Own, *, autocast: AbstractContextManager[Any] | None = None, watch: Callable[[Loss], Loss] = lambda loss: loss
) -> Forward:
    """Answers with the sum of the model's loss: a scalar, and nothing else that the model returns. `watch`: may stand around the call."""
    context, loss = autocast or nullcontext(), watch(own.loss)

    def forward(batch: Batch) -> Tensor:
        if batch.extra is None:
            raise FinefitError("a batch for a model of the user's own holds nothing that the model made")
        try:
            with context:
                return loss(dict(batch.extra.tensors))
        except FinefitError:
            raise
        except Exception as error:
            if is_shortage(error):
                raise
            raise own.told("loss", error) from None

    return forward


# levers


def pull_own(own: Own, levers: Levers) -> None:
    """The first of its layers are computed again in backward; no other lever is known to leave the gradient of such a model as it is."""
    layers = own.layers
    if levers.recompute > len(layers):
        raise ModelError(
            f"levers.recompute is {levers.recompute}, but {own.file.name} names {len(layers)} layers that can be computed again",
            "lower it, or name more modules in `layers`",
        )
    if odd := odd_levers(levers):
        raise SpecError(
            f"{', '.join(odd)} cannot be had for a model of your own",
            "leave them at auto: micro_batch and recompute are there",
        )
    release(own.module)
    for layer in layers[: levers.recompute]:
        layer.forward = Lever(_again, layer.forward)


def odd_levers(levers: Levers) -> list[str]:
    """Names of levers that act on what a language model has and another model need not have."""
    plain = Levers(micro_batch=levers.micro_batch)
    names = ("keep_attention", "loss_chunk", "offload", "mlp_tiles", "packing", "kernels", "compile")
    return [f"levers.{name} {getattr(levers, name)}" for name in names if getattr(levers, name) != getattr(plain, name)]


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


# proof


def require_sum(own: Own, forward: Forward, both: Batch, parts: Sequence[Batch], *, tolerance: float) -> None:
    """Sum and count of rows together must be what they are of each alone, else the cut into micro-batches would change what is trained. To be asked
    without gradients and dropout, of rows with the same seeds."""
    together, apart = own_loss.count(both), sum(own_loss.count(part) for part in parts)
    if together != apart:
        raise own.fault(
            f"counts {together} for {both.num_rows} rows together and {apart} for each alone: the cut into micro-batches would show"
        )
    whole, alone = forward(both).item(), sum(forward(part).item() for part in parts)
    if abs(whole - alone) > tolerance * max(abs(whole), abs(alone)):
        raise own.fault(
            f"has a loss of {whole:.6g} for {both.num_rows} rows together and of {alone:.6g} for each alone: give the sum over what count counts, "
            "never a mean, and let no row see another"
        )
