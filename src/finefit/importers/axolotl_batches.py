"""The rows of an optimizer step of axolotl, or the packs that hold them, and what it trains on of a row."""

from typing import Any

from finefit.importers import training as shared
from finefit.importers.keys import Config, Outcome, SeenRow, translated


def batch(value: Any, config: Config) -> Outcome:
    """Rows of an optimizer step; with sample_packing packs, which hold as many rows as fit."""
    rows, accumulated, ranks = _product(config)
    count = per_step(config)
    product = f"{rows} micro x {accumulated} accumulated x {ranks} rank{'s' * (ranks > 1)}"
    if (tokens := packs(config)) is None:
        return translated({"global_batch": count}, f"= {product}")
    return shared.packed_batch(count, tokens, config, f"{product}: ")


def _product(config: Config) -> tuple[int, int, int]:
    """Rows of a micro-batch, micro-batches of a step, and ranks with rows of their own. axolotl's `batch_size` is that
    of one device over all accumulated steps."""
    rows = max(1, config.whole("micro_batch_size", 1))
    accumulated = config.whole("gradient_accumulation_steps", 0) or max(1, config.whole("batch_size", rows) // rows)
    shared_by = max(1, config.whole("context_parallel_size", 1)) * max(1, config.whole("tensor_parallel_size", 1))
    return rows, accumulated, max(1, config.devices // shared_by)


def per_step(config: Config) -> int:
    rows, accumulated, ranks = _product(config)
    return (1 if _is_one_pack(config) else rows) * accumulated * ranks


def _is_one_pack(config: Config) -> bool:
    """Whether a micro-batch is one pack, as it is if attention can keep rows apart."""
    if not config.is_on("sample_packing"):
        return False
    if config.get("multipack_real_batches") is not None:
        return not config.is_on("multipack_real_batches")
    named = str(config.get("attn_implementation") or "").lower()
    flags = ("flash_attention", "flex_attention", "xformers_attention")
    return any(map(config.is_on, flags)) or any(kind in named for kind in ("flash", "flex", "xformers"))


def packs(config: Config) -> int | None:
    if not config.is_on("sample_packing"):
        return None
    return config.whole("sequence_len") * (_product(config)[0] if _is_one_pack(config) else 1)


def seen(row: SeenRow, config: Config) -> tuple[int, int]:
    if row.length > config.whole("sequence_len"):
        return 0, 0
    return row.length, row.length if config.is_on("train_on_inputs") else row.supervised
