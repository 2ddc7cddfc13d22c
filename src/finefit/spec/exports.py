"""The formats that a model is exported to, by the names that a command or a spec gives them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["adapter", "merged", "gguf", "gguf-lora"]
PRECISIONS = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}
"""Bits of a weight of a merged model."""
GGUF_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q6_k": 6.6,
    "q5_k_m": 5.7,
    "q5_k_s": 5.6,
    "q5_1": 6.0,
    "q5_0": 5.6,
    "q4_k_m": 4.9,
    "q4_k_s": 4.6,
    "q4_1": 5.1,
    "q4_0": 4.6,
    "iq4_nl": 4.6,
    "iq4_xs": 4.4,
    "q3_k_l": 4.3,
    "q3_k_m": 3.9,
    "q3_k_s": 3.5,
    "q2_k": 3.2,
    "tq2_0": 2.4,
    "tq1_0": 2.0,
}
"""Bits of a weight by llama.cpp's name of the type, with the scales and the tensors that stay wider."""
WIDE = frozenset(("f32", "f16"))
"""Of GGUF, converted from a model that is merged in fp32; all others from one in bf16."""
_DEFAULTS: dict[str, str] = {"gguf": "q8_0"}
FORMS = "adapter, merged[:bf16|fp16|fp32], gguf[:q8_0|q4_k_m|bf16|...], gguf-lora"
_FORM = re.compile(r"(adapter|merged|gguf|gguf-lora)(?::([A-Za-z0-9_]+))?")


@dataclass(frozen=True, slots=True)
class ExportFormat:
    kind: Kind
    precision: str | None = None
    """None: of a merged model, as the base has it; an adapter is copied as it is."""

    def __str__(self) -> str:
        return self.kind if self.precision is None else f"{self.kind}:{self.precision}"

    @property
    def folder(self) -> str | None:
        """Where it lies in an export of several formats; None for a format of one file."""
        if self.kind.startswith("gguf"):
            return None
        return str(self).replace(":", "-")


def parse_format(text: str) -> ExportFormat:
    """A ValueError says what is wrong with it."""
    found = _FORM.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a format; there are {FORMS}")
    kind, precision = found[1], found[2] or _DEFAULTS.get(found[1])
    known: dict[str, float] = {"merged": PRECISIONS, "gguf": GGUF_BITS}.get(kind, {})
    if precision is not None and precision not in known:
        as_trained = "it is written as it was trained; leave the part after the colon out"
        there = f"there are {', '.join(known)}" if known else as_trained
        raise ValueError(f"{text!r}: {kind} has no precision {precision}; {there}")
    return ExportFormat(kind, precision)  # type: ignore[arg-type]


def parse_formats(texts: tuple[str, ...] | list[str]) -> tuple[ExportFormat, ...]:
    """Each may name several, with commas between them. A format that is named twice counts once."""
    named = [part for text in texts for part in text.split(",") if part.strip()]
    if not named:
        raise ValueError(f"no format is named; there are {FORMS}")
    return tuple(dict.fromkeys(map(parse_format, named)))


def bits_of(form: ExportFormat, stored_bits: float) -> float:
    """Of a weight of a whole model. `stored_bits`: of the base's own."""
    if form.precision is None:
        return stored_bits
    return PRECISIONS.get(form.precision) or GGUF_BITS[form.precision]


def export_bytes(formats: Sequence[ExportFormat], parameters: int, *, stored_bits: float) -> int:
    """On disk while they are made: all formats, and what conversions start from."""
    bits, has = 0.0, {form.precision for form in formats if form.kind == "merged"}
    bits += sum(bits_of(form, stored_bits) for form in formats if form.kind in ("merged", "gguf"))
    kinds = {form.precision for form in formats if form.kind == "gguf"}
    if kinds - WIDE and "bf16" not in has:
        bits += 16.0
    if kinds & WIDE and "fp32" not in has:
        bits += 32.0
    if any(form.kind == "gguf" and bits_of(form, 16.0) < GGUF_BITS["q8_0"] for form in formats):
        bits += 16.0  # quantised from a file in 16 bits
    if any(form.kind == "gguf-lora" for form in formats):
        bits += 32.0  # the base that it is proved over, as a folder and as GGUF
    return int(parameters * bits / 8)
