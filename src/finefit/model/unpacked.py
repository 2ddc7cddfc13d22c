"""Weights in 4 or 8 bits in their plain form: what training on them multiplied with, tensor by tensor."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from finefit import bounded
from finefit.artifacts.atomic import report_disk_full
from finefit.errors import ModelError
from finefit.facts.files import read_config
from finefit.model.quantised import PackedWeights
from finefit.model.saved_weights import FileSpan, TensorSource, lazy, spans_in, write_shards
from finefit.vision import vision_forward_of

_HEAD = "lm_head"
"""Of every vision-language model."""
_STATE = ".quant_state.bitsandbytes__"
_OF_PACKED = re.compile(r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$")
_SCALES, _FORMAT = ".SCB", ".weight_format"
Unpack = Callable[[Tensor], Tensor]


def packed_as_loaded(bits: Literal[4, 8], folder: Path) -> PackedWeights:
    """What `load_base` packs of plain weights."""
    return PackedWeights(
        bits=bits,
        kind="int8" if bits == 8 else "nf4",
        is_nested=bits == 4,
        skipped=never_packed(AutoConfig.from_pretrained(folder)),
    )


def never_packed(config: PretrainedConfig) -> tuple[str, ...] | None:
    """None: the head, as transformers has it by itself. In a vision-language model also the other towers."""
    vision_forward = vision_forward_of(config)
    if vision_forward is None:
        return None
    others = (names for tower, names in vision_forward.towers.items() if tower != "language")
    return (_HEAD, *chain.from_iterable(others))


def requantised(bits: Literal[4, 8], dtype: torch.dtype) -> Unpack:
    """A weight as training multiplied with it: packed and unpacked again. `dtype`: of the products."""
    functional = _bitsandbytes().functional

    def in_4(weight: Tensor) -> Tensor:
        packed, state = functional.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
        found: Tensor = functional.dequantize_4bit(packed, state)
        return found

    def in_8(weight: Tensor) -> Tensor:
        packed, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return _from_8(packed, scales)

    return in_4 if bits == 4 else in_8


def _from_8(packed: Tensor, scales: Tensor) -> Tensor:
    return packed.float() * (scales.float().view(-1, 1) / 127)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise ModelError("weights in 4 or 8 bits need bitsandbytes", "pip install 'finefit[gpu]'") from None
    return bitsandbytes


def write_unpacked(folder: Path, out: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """A copy of a model that is stored packed, with plain weights."""
    out.mkdir(parents=True)
    sources, config = unpacked_sources(folder, dtype), read_config(folder)
    with report_disk_full(out, sum(source.num_bytes for source in sources.values())):
        write_shards(out, sources, shard_bytes)
        config.pop("quantization_config", None)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def unpacked_sources(folder: Path, dtype: torch.dtype) -> dict[str, TensorSource]:
    spans, sources = spans_in(folder), dict[str, TensorSource]()
    for name, span in spans.items():
        if (_OF_PACKED.search(name) and _OF_PACKED.sub("", name) in spans) or name.endswith((_SCALES, _FORMAT)):
            continue
        stats = {key: one for key, one in spans.items() if key.startswith(f"{name}.")}
        scales = spans.get(f"{name.removesuffix('.weight')}{_SCALES}")
        if any(_STATE in key for key in stats):
            sources[name] = lazy(_shape_of(stats), dtype, partial(_read_4, span, stats))
        elif scales is not None and span.dtype == "I8":
            sources[name] = lazy(span.shape, dtype, partial(_read_8, span, scales))
        else:
            sources[name] = span
    return sources


def _shape_of(stats: Mapping[str, FileSpan]) -> tuple[int, ...]:
    (state,) = (span.read() for key, span in stats.items() if _STATE in key)
    return tuple(bounded.parse_json(bytes(state.tolist()))["shape"])


def _read_4(span: FileSpan, stats: Mapping[str, FileSpan]) -> Tensor:
    bitsandbytes = _bitsandbytes()
    tensors = {key: one.read() for key, one in stats.items()}
    packed = bitsandbytes.nn.Params4bit.from_prequantized(data=span.read(), quantized_stats=tensors, device="cpu")
    found: Tensor = bitsandbytes.functional.dequantize_4bit(packed.data, packed.quant_state)
    return found


def _read_8(span: FileSpan, scales: FileSpan) -> Tensor:
    return _from_8(span.read(), scales.read())
