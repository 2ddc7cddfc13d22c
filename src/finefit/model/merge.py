"""Merges an adapter into its base: a whole model that plain transformers loads, verified to answer as base and adapter
did.

Everything happens on the host. Writing goes tensor by tensor; the base with its adapter and the merged model are then
loaded one after the other, in the dtype that was written.
"""

import gc
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from finefit.errors import FinefitError, ModelError
from finefit.facts.files import find_texts, read_config, read_model_folder
from finefit.model.adapter import load_adapter
from finefit.model.experts import forward_hooks, record_routing, routers_of
from finefit.model.load import load_base
from finefit.model.merged_weights import MergedWeights, without_ties_warned, write_merged
from finefit.objective.losses import Routed
from finefit.vision import auto_class

_ROWS, _TOKENS = 2, 24
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerated difference, as a share of the logits' standard deviation."""
_LOST = 0.5
"""Rounding that takes more than this share of the adapter's effect is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProof:
    """Differences are root mean squares over a probe's logits, as shares of the logits' standard deviation."""

    dtype: str
    parameters: int
    difference: float
    """The difference between the merged model and the base with the adapter."""
    tolerance: float
    effect: float
    """The difference between the base with and without the adapter."""

    @property
    def loses(self) -> bool:
        """Whether rounding lost much of what the adapter has learnt."""
        return self.difference > _LOST * self.effect and self.effect > 0


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: torch.dtype | None = None) -> MergeProof:
    """`dtype` None keeps that of the stored base. Tokenizer and template are taken from beside the adapter if they are
    there."""
    asked, dtype = dtype, dtype or stored_dtype(base)
    if packed := read_config(base).get("quantization_config"):  # rounding to 4 bits would lose what was learnt
        kind = packed.get("quant_method", "quantised")
        problem = f"{base.name} holds packed weights ({kind}), into which no adapter can be merged"
        raise ModelError(problem, "name the model that it was packed from")
    out.mkdir(parents=True, exist_ok=True)
    try:
        written = write_merged(base, adapter, out, dtype=asked)
        proof = _prove(base, adapter, out, dtype, written)
    except FinefitError:
        for path in out.glob("*"):  # nothing that was not proved stays
            path.unlink()
        raise
    for folder in (base, adapter):
        copy_texts(folder, out)
    return proof


def _prove(base: Path, adapter: Path, out: Path, dtype: torch.dtype, written: MergedWeights) -> MergeProof:
    model = load_base(base, device="cpu", dtype=dtype)
    vocabulary = model.config.get_text_config().vocab_size
    probe = torch.randint(vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    alone = _logits(model, probe)
    with without_ties_warned():
        adapted = load_adapter(model, adapter).eval()
    with record_routing(routers_of(adapted).values()) as said:
        wanted = _logits(adapted, probe)
    del model, adapted
    gc.collect()  # two models are never in memory at once
    merged = auto_class(AutoConfig.from_pretrained(out)).from_pretrained(out, dtype=dtype).eval()
    with _routed_as(merged, said) as again:
        held = _logits(merged, probe)
    proof = MergeProof(
        dtype=str(dtype).removeprefix("torch."),
        parameters=written.parameters,
        difference=_apart(held, wanted),
        tolerance=_TOLERANCE[dtype],
        effect=_apart(wanted, alone),
    )
    _require_equal(proof, _moved(again, said))
    return proof


def stored_dtype(folder: Path) -> torch.dtype:
    named = read_model_folder(folder).dtype
    for dtype in _TOLERANCE:
        if str(dtype) == f"torch.{named}":
            return dtype
    problem = f"{folder.name} is stored in {named}, into which no adapter can be merged"
    raise ModelError(problem, "name the precision to write: bf16, fp16 or fp32")


def _logits(model: nn.Module, probe: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=probe).logits.to(torch.float64)
    return logits


@contextmanager
def _routed_as(model: nn.Module, said: Sequence[Routed]) -> Iterator[list[Routed]]:
    """Sends tokens to the same experts as before and returns what the routers choose now. Between two experts of nearly
    equal score, rounding may choose the other one and change everything after it."""
    found: list[Routed] = []

    def answer(_: nn.Module, __: Any, own: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        before = said[len(found)]
        found.append(Routed(*own))
        return own[0], before.weights_NK, before.chosen_NK

    with forward_hooks(routers_of(model).values(), answer):
        yield found


def _moved(found: Sequence[Routed], wanted: Sequence[Routed]) -> float:
    """The mean share of a token's probability that routers shift to other experts, in the layer where it is largest."""
    shares = ([routed.logits_NE.double().softmax(-1) for routed in pair] for pair in zip(found, wanted, strict=True))
    return max((float((ours - theirs).abs().sum(-1).mean()) / 2 for ours, theirs in shares), default=0.0)


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def _require_equal(proof: MergeProof, moved: float) -> None:
    """Refuses NaN differences too."""
    for value, what in (
        (proof.difference, "the merged model differs from base and adapter by {:.2g} of the spread of its logits"),
        (moved, "routers of the merged model send {:.2g} of a token's weight elsewhere than base and adapter do"),
    ):
        if not value <= proof.tolerance:
            raise FinefitError(
                f"{what.format(value)}, and rounding to {proof.dtype} explains {proof.tolerance:g}",
                "nothing was written; please report this with the adapter's adapter_config.json",
            )


def copy_texts(folder: Path, out: Path) -> None:
    """Copies every file that decides a model's answers except the weights and config, and replaces existing ones."""
    for name, path in find_texts(folder).items():
        if name != "config.json":
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)
