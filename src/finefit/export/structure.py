"""What can be said of an exported folder without running it: every tensor of the base is there, in the precision that
was asked for, and holds what base and adapter give; config, tokenizer, template and stop tokens are those of the
training.

What an adapter adds is computed here from its file and its config by the formula alone, apart from peft and from the
code that merged it.
"""

import filecmp
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finefit.data.encode import model_stops, open_tokenizer
from finefit.errors import FinefitError
from finefit.export.merged import GENERATION_CONFIG, TORCH_DTYPES, MergeBase
from finefit.export.subject import ExportSubject
from finefit.facts.files import COMPUTED, find_texts, read_config, read_object
from finefit.model.merged_weights import Merging, empty_model
from finefit.model.quantised import packed_layers
from finefit.model.resolve_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from finefit.model.saved_weights import FileSpan, code_of, spans_in, spans_of

_PEFT = "base_model.model."
_HALF_STEP = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of rounding once, as a share of the value; in fp32 also the order of a sum."""
_NOISE = 2e-6
"""Of the largest value: sums in another order, and values too small for the type."""
_SHOWN = 3
_OWN_KEYS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "transformers_version")
_FLOATS = ("F64", "F32", "F16", "BF16")


def folder_problems(subject: ExportSubject, folder: Path, base: MergeBase, precision: str) -> Iterator[str]:
    """Of a merged model. What cannot be read is one, too."""
    checks = (
        partial(_config_problems, folder, base, precision),
        partial(_text_problems, subject, folder),
        partial(_stop_problems, subject, folder),
        partial(_tensor_problems, subject, folder, base, precision),
    )
    for check in checks:
        try:
            yield from check()
        except FinefitError as error:
            yield error.problem
        except (OSError, ValueError, KeyError) as error:
            yield f"{folder.name} cannot be read: {type(error).__name__} {error}"


def adapter_problems(subject: ExportSubject, folder: Path) -> Iterator[str]:
    """Of a copied adapter."""
    assert subject.adapter is not None
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif not filecmp.cmp(folder / name, subject.adapter / name, shallow=False):
            yield f"{name} is not that of the training"
    try:
        yield from _text_problems(subject, folder)
    except FinefitError as error:
        yield error.problem


def _config_problems(folder: Path, base: MergeBase, precision: str) -> Iterator[str]:
    before, found = _flat(read_config(base.folder)), _flat(read_config(folder))
    for key in sorted(before.keys() | found.keys()):
        if key.rpartition(".")[2] in _OWN_KEYS or "quantization_config" in key:
            continue
        if before.get(key) != found.get(key):
            yield f"config.json has {key} {found.get(key)!r} where the base has {before.get(key)!r}"
    named = found.get("dtype") or found.get("torch_dtype")
    if named != str(TORCH_DTYPES[precision]).removeprefix("torch."):
        yield f"config.json names the precision {named}, and {precision} was asked for"
    if any("quantization_config" in key for key in found):
        yield "config.json has a quantization_config, and the weights are plain"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _text_problems(subject: ExportSubject, folder: Path) -> Iterator[str]:
    wanted = find_texts(subject.tokenizer)
    for name, path in wanted.items():
        if name in ("config.json", GENERATION_CONFIG):
            continue
        if not (folder / name).is_file():
            yield f"{name}, which the training has, is missing"
        elif not filecmp.cmp(folder / name, path, shallow=False):
            yield f"{name} is not that of the training"
    if subject.template is not None:
        found = open_tokenizer(folder).chat_template
        found = found.get("default") if isinstance(found, dict) else found
        if found != subject.template:
            yield "the chat template is not the one that was trained"


def _stop_problems(subject: ExportSubject, folder: Path) -> Iterator[str]:
    found = set(model_stops(folder, "main"))
    if found != set(subject.stop_tokens):
        wanted = ", ".join(map(str, subject.stop_tokens))
        named = ", ".join(map(str, sorted(found))) or "none"
        yield f"{GENERATION_CONFIG} names the stop tokens {named}, and the answers that were trained end with {wanted}"


@dataclass(slots=True)
class _Odd:
    """Names of tensors by what is wrong with them."""

    names: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, name: str) -> None:
        self.names.setdefault(what, []).append(name)

    def problems(self) -> Iterator[str]:
        for what, names in self.names.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{len(names):,} tensors {what}: {', '.join(names[:_SHOWN])}{more}"


def _tensor_problems(subject: ExportSubject, folder: Path, base: MergeBase, precision: str) -> Iterator[str]:
    odd, dtype = _Odd(), TORCH_DTYPES[precision]
    expected = _Expected.of(subject, base)
    spans = spans_in(folder)
    for name in sorted(expected.names - spans.keys()):
        odd.note("of the model are missing", name)
    for name in sorted(spans.keys() - expected.names):
        odd.note("are not the model's", name)
    is_tied = _flat(read_config(folder)).get("tie_word_embeddings")
    if is_tied is not None and bool(is_tied) != expected.is_tied:
        here, there = ("are tied" if tied else "are two tensors" for tied in (bool(is_tied), expected.is_tied))
        yield f"input embeddings and head {here} by config.json, and {there} in training"
    for name in sorted(expected.names & spans.keys()):
        if (what := expected.difference(name, spans[name], dtype)) is not None:
            odd.note(what, name)
    if left := expected.unmerged():
        odd.note("of the adapter belong to no tensor of the model", left[0])
    yield from odd.problems()


@dataclass(slots=True, kw_only=True)
class _Expected:
    """What the tensors of a merged model have to be."""

    merging: Merging | None
    base: dict[str, FileSpan]
    names: set[str]
    formula: "_Formula | None"
    is_tied: bool
    plain: dict[str, str]
    """The tensor in the model by the name that it is stored under, of those that the adapter changes."""
    is_complete: bool = True
    """Whether all of those are known by their stored names. Else only what is computed can show that they are right."""

    @classmethod
    def of(cls, subject: ExportSubject, base: MergeBase) -> "_Expected":
        spans = {name: span for name, span in spans_in(base.folder).items() if not name.endswith(COMPUTED)}
        is_tied = bool(_flat(read_config(base.folder)).get("tie_word_embeddings", False))
        if subject.adapter is None:
            return cls(merging=None, base=spans, names=set(spans), formula=None, is_tied=is_tied, plain={})
        model = empty_model(base.folder)
        changed = {}
        if base.rounded is not None and base.packed is not None:
            changed = {f"{name}.weight": base.rounded for name in packed_layers(model, base.packed)}
        merging = Merging.of(model, base.folder, subject.adapter, changed)
        untied = merging.untied()
        touched = (*merging.touched(), *untied)
        plain = {part: name for name in touched for part in merging.places(name, untied)}
        is_complete = all(merging.places(name, untied) or merging.is_alias(name) for name in touched)
        formula = _Formula.of_adapter(subject.adapter)
        tied = is_tied and not untied and bool(merging.ties)
        names = set(spans) | set(plain)
        is_tied = tied if merging.ties else is_tied
        return cls(
            merging=merging,
            base=spans,
            names=names,
            formula=formula,
            is_tied=is_tied,
            plain=plain,
            is_complete=is_complete,
        )

    def difference(self, name: str, found: FileSpan, dtype: torch.dtype) -> str | None:
        """None where it holds what it should."""
        before = self.base.get(name)
        is_float = found.dtype in _FLOATS and (before is None or before.dtype in _FLOATS)
        if before is not None and before.shape != found.shape:
            return "have another shape than in the base"
        if is_float and found.dtype != code_of(dtype):
            return f"are stored in {found.dtype}, not in {code_of(dtype)}"
        if name not in self.plain:
            assert before is not None
            is_base = not self.is_complete or _holds(before, found)
            return None if is_base else "are not the base's, and the adapter does not change them"
        return self._of_merged(name, found.read().float(), dtype)

    def _of_merged(self, name: str, found: Tensor, dtype: torch.dtype) -> str | None:
        wanted, before = self._wanted(name)
        wanted, before = wanted.reshape(found.shape), before.reshape(found.shape)
        if not torch.isfinite(found).all():
            return "hold values that are not finite"
        allowed = _HALF_STEP[dtype] * wanted.abs() + _NOISE * wanted.abs().max()
        if bool(((found - wanted).abs() <= allowed).all()):
            return None
        return _in_words(found - before, wanted - before)

    def _wanted(self, name: str) -> tuple[Tensor, Tensor]:
        """In fp32: what it should hold, and what the base has in its place."""
        assert self.merging is not None
        plain = self.plain[name]
        before = self.merging.part(plain, name, with_adapter=False)()
        by_formula = self.formula.value(plain, before) if self.formula is not None and plain == name else None
        if by_formula is not None:
            return by_formula, before.float()
        return self.merging.part(plain, name)().float(), before.float()

    def unmerged(self) -> list[str]:
        """Tensors of the adapter without a place in the model."""
        if self.merging is None or self.formula is None:
            return []
        modules = {name.removeprefix(_PEFT).partition(".lora_")[0] for name in self.formula.spans if ".lora_" in name}
        units = self.merging.units
        return sorted(module for module in modules if not any(f"{module}.".startswith(f"{path}.") for path in units))


def _in_words(found: Tensor, wanted: Tensor) -> str:
    """Of the differences to the base: what is there, in multiples of what should be."""
    size = float((wanted * wanted).sum())
    times = float((found * wanted).sum()) / size if size else 0.0
    rest = float((found - times * wanted).norm()) / sqrt(size) if size else float("inf")
    if abs(times) < 0.05 and rest < 0.5:
        return "hold the base's weights: the adapter is not in them"
    if abs(times - 2) < 0.05 and rest < 0.5:
        return "hold the adapter twice"
    if rest < 0.5 and abs(times - 1) > 0.02:
        return f"hold the adapter {times:.2f} times"
    return "do not hold what base and adapter give"


def _holds(before: FileSpan, found: FileSpan) -> bool:
    if before.dtype == found.dtype:
        pairs = zip(before.blocks(), found.blocks(), strict=True)
        return before.num_bytes == found.num_bytes and all(ours == theirs for ours, theirs in pairs)
    value = found.read()
    return torch.equal(before.read().to(value.dtype), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Formula:
    """What a LoRA adapter makes of a weight, by its file and its config: W + s B A, with s = alpha / r or alpha /
    sqrt(r); with DoRA each row of it at its trained length; what was trained whole is itself."""

    config: Mapping[str, Any]
    spans: Mapping[str, FileSpan]

    @classmethod
    def of_adapter(cls, folder: Path) -> "_Formula":
        return cls(config=read_object(folder / ADAPTER_CONFIG), spans=spans_of(folder / ADAPTER_WEIGHTS))

    def value(self, name: str, weight: Tensor) -> Tensor | None:
        """None for what has no formula here, such as embeddings, experts and other kinds of adapters."""
        if (whole := self.spans.get(_PEFT + name)) is not None:
            return whole.read().float()
        module, _, leaf = name.rpartition(".")
        parts = [self.spans.get(f"{_PEFT}{module}.lora_{side}.weight") for side in "AB"]
        if self.config.get("peft_type") != "LORA" or leaf != "weight" or None in parts:
            return None
        a_RI, b_OR = (part.read().float() for part in parts if part is not None)
        if a_RI.ndim != 2 or weight.ndim != 2:
            return None
        delta_OI = self._scale(module, len(a_RI)) * (b_OR @ a_RI)
        summed = weight.float() + (delta_OI.T if self.config.get("fan_in_fan_out") else delta_OI)
        length = self.spans.get(f"{_PEFT}{module}.lora_magnitude_vector")
        if length is None:
            return summed
        scaled: Tensor = summed * (length.read().float() / summed.norm(dim=1))[:, None]
        return scaled

    def _scale(self, module: str, rank: int) -> float:
        patterns: Mapping[str, float] = self.config.get("alpha_pattern") or {}
        own = (alpha for key, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = float(next(own, self.config["lora_alpha"]))
        return alpha / sqrt(rank) if self.config.get("use_rslora") else alpha / rank
