"""An adapter merged into its base: a whole model that plain transformers loads, verified to answer as the two did.

All on the host: the base is loaded once in the dtype that it is written in, and read back once after writing.
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
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from finefit.artifacts.atomic import report_disk_full
from finefit.errors import FinefitError, ModelError
from finefit.facts.files import find_texts, read_config, read_model_folder
from finefit.model.adapter import load_adapter
from finefit.model.experts import forward_hooks, record_routing, routers_of
from finefit.model.load import load_base
from finefit.objective.losses import Routed
from finefit.vision import auto_class

_SHARD = "4GB"
_ROWS, _TOKENS = 2, 24
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the spread of the logits; what rounding every weight once may amount to."""
_LOST = 0.5
"""Of the adapter's effect: rounding that takes more is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProof:
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


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: torch.dtype | None = None) -> MergeProof:
    """`dtype`: None, as the base is stored. Tokenizer and template are those beside the adapter, where it has them."""
    dtype = dtype or stored_dtype(base)
    if packed := read_config(base).get("quantization_config"):  # rounding to 4 bits would lose what was learnt
        kind = packed.get("quant_method", "quantised")
        problem = f"{base.name} holds packed weights ({kind}), into which no adapter can be merged"
        raise ModelError(problem, "name the model that it was packed from")
    model = load_base(base, device="cpu", dtype=dtype)
    vocabulary = model.config.get_text_config().vocab_size
    probe = torch.randint(vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    alone = _logits(model, probe)
    adapted = load_adapter(model, adapter).eval()
    with record_routing(routers_of(adapted).values()) as said:
        wanted = _logits(adapted, probe)
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # weights that are not finite
        problem = f"the adapter in {adapter.name} cannot be merged: {error}"
        raise ModelError(problem, "take another checkpoint: its weights have diverged") from None
    assert isinstance(merged, PreTrainedModel)
    with _routed_as(merged, said) as again:
        held = _logits(merged, probe)
    found, size = _logits(merged, probe), sum(p.numel() * p.element_size() for p in merged.parameters())
    proof = MergeProof(
        dtype=str(dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in merged.parameters()),
        difference=_apart(held, wanted),
        tolerance=_TOLERANCE[dtype],
        effect=_apart(wanted, alone),
    )
    _require_equal(proof, _moved(again, said))
    with report_disk_full(out, size):
        merged.generation_config = GenerationConfig()  # the base's file is copied: transformers refuses to save some
        merged.save_pretrained(out, max_shard_size=_SHARD)
        (out / "generation_config.json").unlink(missing_ok=True)
        for folder in (base, adapter):
            copy_texts(folder, out)
    del model, adapted, merged
    gc.collect()  # two models are never in memory at once
    again_model = auto_class(AutoConfig.from_pretrained(out)).from_pretrained(out, dtype="auto").eval()
    read_back = _logits(again_model, probe)
    if not torch.equal(read_back, found):
        raise FinefitError(
            f"the merged model in {out} does not read back as it was written: its logits differ by "
            f"{_apart(read_back, found):.2g} of their spread",
            "the disk may be faulty; give the same command again",
        )
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
    """Tokens go to the same experts as before, whatever the routers say now, which is returned: between two experts
    that are nearly as good, rounding may choose the other one and change all that follows."""
    found: list[Routed] = []

    def answer(_: nn.Module, __: Any, own: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        before = said[len(found)]
        found.append(Routed(*own))
        return own[0], before.weights_NK, before.chosen_NK

    with forward_hooks(routers_of(model).values(), answer):
        yield found


def _moved(found: Sequence[Routed], wanted: Sequence[Routed]) -> float:
    """The mean share of a token's probability that routers give to other experts, in the layer where it is largest."""
    shares = ([routed.logits_NE.double().softmax(-1) for routed in pair] for pair in zip(found, wanted, strict=True))
    return max((float((ours - theirs).abs().sum(-1).mean()) / 2 for ours, theirs in shares), default=0.0)


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def _require_equal(proof: MergeProof, moved: float) -> None:
    """Also refuses differences that are NaN."""
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
    """Copies all that decides a model's answers beside its weights and their config; replaces what is there."""
    for name, path in find_texts(folder).items():
        if name != "config.json":
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)
