"""An adapter becomes one with its base: a whole model that plain transformers loads, proved to answer as the two did.

All on the host: the base is loaded once in what it is written in, and read back once when it is written.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from finefit.artifacts.atomic import full_disk_named
from finefit.errors import FinefitError, ModelError
from finefit.facts.model import read_config, read_model_folder
from finefit.model.foreign import with_adapter
from finefit.model.load import load_base
from finefit.model.moe import copy_texts
from finefit.model.routers import heard, hooked, routers_of
from finefit.model.sight import auto_class
from finefit.objective.router import Routed

_SHARD = "4GB"
_ROWS, _TOKENS = 2, 24
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the spread of the logits; what rounding every weight once may amount to."""
_LOST = 0.5
"""Of the adapter's effect: rounding that takes more is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Differences are root mean squares over the logits of a probe, as shares of their standard deviation."""

    dtype: str
    parameters: int
    difference: float
    """Of the merged model to base and adapter."""
    tolerance: float
    effect: float
    """Of the adapter: base with it to base without."""

    @property
    def loses(self) -> bool:
        """Whether rounding has taken much of what the adapter has learnt."""
        return self.difference > _LOST * self.effect and self.effect > 0


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: torch.dtype | None = None) -> Merged:
    """`dtype`: None, as the base is stored. Tokenizer and template are those beside the adapter, where it has them."""
    dtype = dtype or stored_dtype(base)
    _require_unpacked(base)
    model = load_base(base, device="cpu", dtype=dtype)
    probe = _probe(model.config.get_text_config().vocab_size)
    alone = _logits(model, probe)
    adapted = with_adapter(model, adapter).eval()
    with heard(routers_of(adapted).values()) as said:
        wanted = _logits(adapted, probe)
    merged = _unloaded(adapted, adapter)
    with _sent_as(merged, said) as again:
        held = _logits(merged, probe)
    found, size = _logits(merged, probe), sum(p.numel() * p.element_size() for p in merged.parameters())
    proof = Merged(
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in merged.parameters()),
        difference=_apart(held, wanted),
        tolerance=_TOLERANCE[dtype],
        effect=_apart(wanted, alone),
    )
    _require_equal(proof)
    _require_same_routers(_moved(again, said), proof)
    with full_disk_named(out, size):
        _save(merged, base, adapter, out)
    del model, adapted, merged
    gc.collect()  # so that two models are never in memory at once
    _require_same_again(out, probe, found)
    return proof


def stored_dtype(folder: Path) -> torch.dtype:
    named = read_model_folder(folder).dtype
    for dtype in _TOLERANCE:
        if str(dtype) == f"torch.{named}":
            return dtype
    raise ModelError(
        f"{folder.name} is stored in {named}, which no adapter can be merged into",
        "name the precision to write: bf16, fp16 or fp32",
    )


def _require_unpacked(base: Path) -> None:
    """peft would merge into weights of 4 bits and round what was learnt away."""
    packed = read_config(base).get("quantization_config")
    if packed:
        how = packed.get("quant_method", "quantised")
        raise ModelError(
            f"{base.name} holds packed weights ({how}), which no adapter can be merged into",
            "name the model that it was packed from",
        )


def _unloaded(adapted: peft.PeftModel, adapter: Path) -> PreTrainedModel:
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # weights that are not finite
        raise ModelError(
            f"the adapter in {adapter.name} cannot be merged: {error}",
            "take another checkpoint: its weights have diverged",
        ) from None
    assert isinstance(merged, PreTrainedModel)
    return merged


def _probe(vocabulary: int) -> Tensor:
    """Seeded tokens: an adapter changes what follows any of them."""
    return torch.randint(vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, probe: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=probe).logits.to(torch.float64)
    return logits


@contextmanager
def _sent_as(model: nn.Module, said: Sequence[Routed]) -> Iterator[list[Routed]]:
    """Tokens go to the experts that they went to before, whatever the routers say now, which is handed back: between two experts that are nearly as
    good rounding may choose the other one, and all that follows is another's answer."""
    found: list[Routed] = []

    def answer(_: nn.Module, __: Any, own: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        before = said[len(found)]
        found.append(Routed(*own))
        return own[0], before.weights_NK, before.chosen_NK

    with hooked(routers_of(model).values(), answer):
        yield found


def _moved(found: Sequence[Routed], wanted: Sequence[Routed]) -> float:
    """Of a token's probability, the share that routers give to other experts: the mean over tokens, in the layer where it is the largest."""

    def shares(routed: Routed) -> Tensor:
        return routed.logits_NE.double().softmax(-1)

    return max(
        (float((shares(a) - shares(b)).abs().sum(-1).mean()) / 2 for a, b in zip(found, wanted, strict=True)),
        default=0.0,
    )


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def _require_equal(proof: Merged) -> None:
    if not proof.difference <= proof.tolerance:  # also where it is no number
        raise FinefitError(
            f"the merged model differs from base and adapter by {proof.difference:.2g} of the spread of its logits, "
            f"and {proof.tolerance:g} is what {proof.dtype} may round",
            "nothing was written; please report this with the adapter's adapter_config.json",
        )


def _require_same_routers(moved: float, proof: Merged) -> None:
    if not moved <= proof.tolerance:
        raise FinefitError(
            f"routers of the merged model send {moved:.2g} of a token's weight elsewhere than base and adapter do, "
            f"and {proof.tolerance:g} is what {proof.dtype} may round",
            "nothing was written; please report this with the adapter's adapter_config.json",
        )


def _save(model: PreTrainedModel, base: Path, adapter: Path, out: Path) -> None:
    model.generation_config = (
        GenerationConfig()
    )  # the base's own file goes along as it is: some cannot be saved by transformers
    model.save_pretrained(out, max_shard_size=_SHARD)
    (out / "generation_config.json").unlink(missing_ok=True)
    for folder in (base, adapter):
        copy_texts(folder, out)


def _require_same_again(out: Path, probe: Tensor, found: Tensor) -> None:
    again = _logits(auto_class(AutoConfig.from_pretrained(out)).from_pretrained(out, dtype="auto").eval(), probe)
    if not torch.equal(again, found):
        raise FinefitError(
            f"the merged model in {out} does not read back as it was written: its logits differ by {_apart(again, found):.2g} of their spread",
            "the disk may be faulty; give the same command again",
        )
