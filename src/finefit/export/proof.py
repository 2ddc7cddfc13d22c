"""Whether an export is the model that was trained. Another program loads it in a process of its own and answers the
probe; what it says is compared with the trained model, and the difference with a bound that is stated here."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from finefit.artifacts.export_records import Answers, Bound, Distance
from finefit.errors import ModelError
from finefit.export import transformers_outputs
from finefit.export.child import failure, run_child
from finefit.export.outputs import Outputs, Probe, read_outputs, write_probe
from finefit.export.subject import ExportSubject
from finefit.facts.machine import MEMORY_LIMITS, read_free_memory_bytes
from finefit.model.adapter import load_adapter
from finefit.model.load import load_base, load_for_answers
from finefit.model.merged_weights import without_ties_warned
from finefit.model.quantised import packed_layers
from finefit.model.unpacked import packed_as_loaded, requantised
from finefit.spec.exports import ExportFormat
from finefit.stats.metrics import Metric, interval_of

_EXACT = Bound(kl=1e-6, agreement=0.999, logits=1e-4)
BOUNDS: dict[str, Bound] = {
    "adapter": _EXACT,
    "merged:fp32": _EXACT,
    "merged:fp16": Bound(kl=1e-3, agreement=0.95),
    "merged:bf16": Bound(kl=2e-2, agreement=0.9),
    "gguf:f32": Bound(kl=1e-3, agreement=0.98),
    "gguf:f16": Bound(kl=1e-3, agreement=0.95),
    "gguf:bf16": Bound(kl=1e-3, agreement=0.9),
    "gguf:q8_0": Bound(kl=5e-2, agreement=0.9),
    "gguf:q6_k": Bound(kl=0.1, agreement=0.85),
    "gguf:q5": Bound(kl=0.2, agreement=0.8),
    "gguf:q4": Bound(kl=0.5, agreement=0.7),
    "gguf:q3": Bound(kl=1.0, agreement=0.6),
    "gguf:q2": Bound(kl=2.0, agreement=0.4),
    "gguf-lora": Bound(kl=2e-2, agreement=0.9),
}
"""By format; several widths of GGUF share the bound of their bits. docs/export.md has what was measured."""
_IN_BF16 = Bound(kl=2e-2, agreement=0.9)
"""The least that is asked where the comparison itself computes in bf16, whose rounding is in every difference."""
_KL = Metric(name="kl", aggregate="ratio", counts=("kl", "tokens"), unit="number", better="lower")
_AGREEMENT = Metric(name="agreement", aggregate="ratio", counts=("agreed", "tokens"))
_SHOWN_PROMPT = 400
_ROOM = 0.8
"""Share of the free memory that a model may take."""
_LARGEST_SUM = 50.0
"""Of a divergence per token: beyond that the tokens of one distribution are impossible in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """In which the trained model and exports of transformers are compared: the same for both, so that what differs is
    what was written."""

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device} {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16


def bound_of(form: ExportFormat, compute: Compute | None) -> Bound:
    name, bits = str(form), (form.precision or "").lstrip("it")[:2]  # iq4_xs, tq2_0
    found = BOUNDS.get(name) or BOUNDS.get(f"gguf:{bits}", BOUNDS["gguf:q2"])
    if compute is None or compute.dtype == "fp32":
        return found
    return Bound(kl=max(found.kl, _IN_BF16.kl), agreement=min(found.agreement, _IN_BF16.agreement))


def compute_for(parameters: int) -> Compute | None:
    """fp32 where the model fits in it, else bf16; on a card where it fits there. None: it fits nowhere."""
    places = {"cpu": read_free_memory_bytes(MEMORY_LIMITS)}
    if torch.cuda.is_available():
        places = {"cuda": torch.cuda.mem_get_info()[0], **places}
    for device, free in places.items():
        for dtype, width in (("fp32", 4), ("bf16", 2)):
            if parameters * width < _ROOM * free:
                return Compute(device=device, dtype=dtype)
    return None


def trained_outputs(subject: ExportSubject, probe: Probe, compute: Compute) -> Outputs:
    """Of base and adapter as they were trained: on a base in 4 or 8 bits, of that."""
    with without_ties_warned():
        model = load_for_answers(
            subject.base, subject.adapter, device=compute.device, dtype=compute.torch_dtype, bits=subject.bits
        )
    return transformers_outputs.outputs_of(model, probe, device=compute.device, stops=probe.stop_tokens)


def outputs_onto(subject: ExportSubject, probe: Probe, compute: Compute, onto: str) -> Outputs:
    """Of the adapter, not merged, over a base in plain weights."""
    assert subject.adapter is not None
    assert subject.bits is not None
    model = load_base(subject.base, device=compute.device, dtype=compute.torch_dtype)
    if onto == "trained":
        rounded = requantised(subject.bits, _precision(subject))
        for layer in packed_layers(model, packed_as_loaded(subject.bits, subject.base)).values():
            layer.weight.data = rounded(layer.weight.data).to(layer.weight.dtype)
    with without_ties_warned():
        adapted: nn.Module = load_adapter(model, subject.adapter).eval()
    return transformers_outputs.outputs_of(adapted, probe, device=compute.device, stops=probe.stop_tokens)


def _precision(subject: ExportSubject) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[subject.precision]


def ask_transformers(
    folder: Path, probe: Probe, place: Path, compute: Compute, *, base: Path | None = None, bits: int | None = None
) -> Outputs:
    """What transformers says of a folder, in a process of its own. `place`: an empty folder for question and answer;
    `base`: that of an adapter."""
    place.mkdir()
    write_probe(place, probe)
    arguments = [str(folder), str(place), "--device", compute.device, "--dtype", compute.dtype]
    arguments += ["--threads", str(torch.get_num_threads())]
    arguments += ["--base", str(base)] if base is not None else []
    arguments += ["--bits", str(bits)] if bits is not None else []
    ended = run_child(transformers_outputs.MODULE, arguments)
    if ended.code != 0:
        problem = f"transformers could not load {folder.name}"
        raise failure(ended, problem, "see the lines above, and export it again", path=place)
    return read_outputs(place)


def measure(trained: Outputs, exported: Outputs) -> Distance:
    """Vocabularies that are padded to different sizes are compared on the tokens that both have; others are refused."""
    rows, largest, size = [], 0.0, 0.0
    for theirs, ours in zip(exported.logits, trained.logits, strict=True):
        wanted, found = _same_width(ours.astype(np.float64), theirs.astype(np.float64))
        p, q = _log_softmax(wanted), _log_softmax(found)
        kl = np.minimum((np.exp(p) * (p - q)).sum(axis=-1).clip(min=0.0), _LARGEST_SUM)
        agreed = wanted.argmax(axis=-1) == found.argmax(axis=-1)
        rows.append((float(np.nan_to_num(kl, nan=_LARGEST_SUM).sum()), float(agreed.sum()), float(len(kl))))
        largest = max(largest, float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max()))
        size = max(size, float(np.abs(wanted).max()))
    table = np.array(rows)
    kl = interval_of(_KL, table[:, [0, 2]])
    return Distance(
        kl=replace(kl, high=min(kl.high, _LARGEST_SUM)),  # one item alone says nothing of the others
        agreement=interval_of(_AGREEMENT, table[:, [1, 2]]),
        logits=min(largest / size, sys.float_info.max),
        tokens=int(table[:, 2].sum()),
    )


def _same_width(wanted: NDArray[np.float64], found: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    if len(wanted) != len(found):
        raise ModelError(f"the export answered {len(found)} tokens where {len(wanted)} were asked")
    width = min(wanted.shape[-1], found.shape[-1])
    return wanted[:, :width], found[:, :width]


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def lost_tokens(subject: ExportSubject, trained: Outputs, exported: Outputs) -> list[str]:
    """A converter may pad the vocabulary, and must not lose a token that the tokenizer knows."""
    known = len(subject.renderer.tokenizer)
    ours, theirs = trained.logits[0].shape[-1], exported.logits[0].shape[-1]
    if theirs != ours and theirs < known:
        return [f"it has logits for {theirs:,} tokens, and the tokenizer knows {known:,}"]
    return []


def beyond(distance: Distance, bound: Bound) -> list[str]:
    """What is worse than the bound. Agreement counts as worse only where chance does not explain it."""
    found = []
    if not distance.kl.value <= bound.kl:
        found.append(f"KL per token is {distance.kl.value:.2g}, more than {bound.kl:g}")
    if not distance.agreement.high >= bound.agreement:
        agreed = f"{distance.agreement.value:.1%} of the tokens are the same, at most {distance.agreement.high:.1%}"
        found.append(f"{agreed} by its interval, and {bound.agreement:.1%} are asked for")
    if bound.logits is not None and not distance.logits <= bound.logits:
        found.append(f"logits differ by {distance.logits:.2g} of the largest, more than {bound.logits:g}")
    return found


def side_by_side(subject: ExportSubject, probe: Probe, trained: Outputs, exported: Outputs) -> tuple[Answers, ...]:
    renderer = subject.renderer
    return tuple(
        Answers(
            prompt=renderer.tokenizer.decode(prompt)[-_SHOWN_PROMPT:],
            trained=renderer.decode_answer(ours) if ours else "",
            exported=renderer.decode_answer(theirs) if theirs else "",
        )
        for prompt, ours, theirs in zip(probe.prompts, trained.greedy, exported.greedy, strict=True)
    )


def resident_bytes() -> int:
    """Of this process and the programs that it has started."""
    own, held = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            held += process.memory_info().rss
    return int(held)
