"""A merged model as a folder that any program can load: weights, config, and tokenizer, template and stop tokens as
they were trained with. Also what a base in 4 or 8 bits is merged into."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from finefit.data.image_check import copy_processor_files
from finefit.errors import ModelError
from finefit.export.subject import ExportSubject
from finefit.facts.files import find_texts, read_config, read_object
from finefit.model.merge import copy_texts
from finefit.model.merged_weights import SHARD_BYTES, MergedWeights, most_frequent_dtype, write_merged
from finefit.model.quantised import PackedWeights, packed_weights
from finefit.model.unpacked import packed_as_loaded, requantised, write_unpacked
from finefit.spec.exports import PRECISIONS

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeBase:
    """What an adapter is merged into."""

    folder: Path
    packed: PackedWeights | None = None
    """The layers whose weights are rounded first, to what training multiplied with."""
    rounded: Callable[[Tensor], Tensor] | None = None


def merge_base(subject: ExportSubject, onto: str, work: Path) -> MergeBase:
    """`work`: a folder for an unpacked copy of a base that is stored packed; such a base has no other form."""
    stored = packed_weights(read_config(subject.base))
    if stored is not None:
        if onto == "original" and subject.adapter is not None:
            problem = f"{subject.base_name} is stored in {stored.bits} bits, so its original weights are not here"
            remedy = "give --onto trained to merge into those that were trained on, or --base with the original model"
            raise ModelError(problem, remedy)
        folder = work / "unpacked"
        if not folder.exists():
            write_unpacked(subject.base, folder, TORCH_DTYPES[precision_of(subject, None)], SHARD_BYTES)
        return MergeBase(folder=folder)
    if onto == "original" or subject.bits is None:
        return MergeBase(folder=subject.base)
    packed = packed_as_loaded(subject.bits, subject.base)
    return MergeBase(
        folder=subject.base, packed=packed, rounded=requantised(subject.bits, TORCH_DTYPES[subject.precision])
    )


def precision_of(subject: ExportSubject, asked: str | None) -> str:
    """The one that is written."""
    if asked is not None:
        return asked
    stored = most_frequent_dtype(subject.base)
    config = read_config(subject.base)
    if packed_weights(config) is not None:
        named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        stored = next((dtype for dtype in NAMES if str(dtype) == f"torch.{named}"), torch.bfloat16)
    return NAMES.get(stored, "fp32")


def write_merged_folder(
    subject: ExportSubject, base: MergeBase, out: Path, precision: str, *, shard_bytes: int = SHARD_BYTES
) -> MergedWeights:
    assert precision in PRECISIONS
    out.mkdir(parents=True, exist_ok=True)
    written = write_merged(
        base.folder,
        subject.adapter,
        out,
        dtype=TORCH_DTYPES[precision],
        unpacked=base.rounded,
        packed=base.packed,
        shard_bytes=shard_bytes,
    )
    write_texts(subject, out)
    return written


def write_texts(subject: ExportSubject, out: Path) -> None:
    """Everything beside weights and config. The tokenizer is that of the training, the stop tokens those that ended the
    answers it learnt from."""
    copy_texts(subject.base, out)
    if subject.tokenizer != subject.base:
        for name in set(find_texts(out)) & {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}:
            (out / name).unlink()  # one that training left out does not come back from the base
        copy_texts(subject.tokenizer, out)
    copy_processor_files(subject.base, out)
    path = out / GENERATION_CONFIG
    settings = read_object(path) if path.is_file() else {}
    before = settings.get("eos_token_id")
    if set(before if isinstance(before, list) else [before]) != set(subject.stop_tokens):
        settings["eos_token_id"] = list(subject.stop_tokens)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def copy_adapter(subject: ExportSubject, out: Path) -> None:
    """An adapter with its tokenizer, and nothing of its training."""
    if subject.adapter is None:
        problem = f"{subject.target} has no adapter: all of its weights were trained"
        raise ModelError(problem, "export it with --to merged")
    out.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(subject.adapter / name, out / name)
    for name, path in find_texts(subject.tokenizer).items():
        if name != "config.json":
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)
