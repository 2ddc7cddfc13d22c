"""Predicted against measured memory of finefit's own training step, on real widths with random weights.

    python bench/memory.py predict predicted.json              on a machine without a GPU
    python bench/memory.py predict predicted.json -img         of models that see alone
    python bench/memory.py measure measured.json               on the card
    python bench/memory.py capped  predicted.json capped.json  on the card: memory limited to just above and just below what was predicted
    python bench/memory.py merge   predicted.json measured.json capped.json bench/results/memory.json
    python bench/memory.py renew   predicted.json bench/results/memory.json    forecasts of today beside measurements that stay

Behind the files `predict`, `measure` and `capped` take parts of names, and then only the cases that have one of them;
`merge` replaces these in the earlier result. All cases share a process: what CUDA itself holds grows from one to the
next (`device_bytes`). A prediction never sees the card: only its name and compute capability.
"""  # noqa: E501

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finefit.artifacts.records import Levers
from finefit.facts.cards import find_kind
from finefit.objective.batch import Batch, Extra, Packed, Paired
from finefit.plan.search import fragmentation_bytes
from finefit.plan.target import CONTEXT_BYTES, MARGIN, MARGIN_BYTES, rates_of
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import step_seconds
from finefit.rehearse.fake_model import StepConfig, image_tokens, read_config
from finefit.rehearse.layer_kinds import rehearse_extrapolated, with_layers
from finefit.spec.models import Full, Lora, Subset, Tuning
from finefit.spec.schema import AdamW, Dpo, Objective, Sft
from finefit.step.forward import is_reference_cached
from finefit.vision import geometry_of
from finefit.vision.family import Grid, ImageInput

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen2-0.5b-of-2": {
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 896,
        "moe_intermediate_size": 4864,
        "shared_expert_intermediate_size": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-vl-3b": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": True,
    },
    "llava-1.5-7b": {
        "model_type": "llava",
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
        "image_token_index": 32000,
        "image_seq_length": 576,
        "tie_word_embeddings": False,
    },
    "smolvlm-2b": {
        "model_type": "idefics3",
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49155,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 16384,
            "pad_token_id": 2,
        },
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        "image_token_id": 49153,
        "scale_factor": 3,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    },
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "tie_word_embeddings": True,
    },
    "paligemma-3b-448": {
        "model_type": "paligemma",
        "text_config": {
            "model_type": "gemma",
            "vocab_size": 257216,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "num_image_tokens": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 448,
            "patch_size": 14,
            "projection_dim": 2048,
        },
        "projection_dim": 2048,
        "image_token_index": 257152,
        "tie_word_embeddings": True,
    },
}
KIND = find_kind("NVIDIA H200", None)
assert KIND is not None
RATES = rates_of(KIND)
FULL = Full(kind="full")
DEVICE = "cuda"


SFT, DPO, DPO_CACHED = Sft(kind="sft"), Dpo(kind="dpo"), Dpo(kind="dpo", reference="cached")


def lora(rank: int, dropout: float = 0.0, bits: Any = None, **more: Any) -> Lora:
    return Lora(kind="lora", rank=rank, alpha=2 * rank, dropout=dropout, base_bits=bits, **more)


def subset(*trainable: str) -> Subset:
    return Subset(kind="subset", trainable=trainable)


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    layers: int
    tuning: Tuning
    rows: int
    tokens: int
    recompute: int = 0
    supervised: float = 1.0
    """Share of the tokens."""
    loss_chunk: int | None = None
    keep_attention: bool = False
    offload: bool = False
    mlp_tiles: int = 1
    adapter_inputs: Any = "bf16"
    optimizer: Any = "adamw"
    accumulates: bool = False
    precision: Any = "bf16"
    objective: Objective = SFT
    """A row is a pair where preferences are trained."""
    packing: bool = False
    kernels: Any = "torch"
    grids: tuple[Grid, ...] = ()
    """Of the images that every row shows."""

    @property
    def tuned(self) -> str:
        if not isinstance(self.tuning, Lora):
            return self.tuning.kind
        bits = {None: "", 4: "-nf4", 8: "-int8"}[self.tuning.base_bits]
        weights, towers = (
            "-bf16w" if self.tuning.weights == "bf16" else "",
            "-towers" if isinstance(self.tuning.targets, dict) else "",
        )
        return f"r{self.tuning.rank}{bits}{'-dora' if self.tuning.dora else ''}{weights}{towers}"

    @property
    def name(self) -> str:
        tuned = self.tuned
        parts = [self.shape, f"{self.layers}L", tuned, f"{self.rows}x{self.tokens}", f"re{self.recompute}"]
        parts += [f"chunk{self.loss_chunk}"] if self.loss_chunk else ["plain"]
        parts += ["attn"] if self.keep_attention else []
        parts += ["offload"] if self.offload else []
        parts += [f"tiles{self.mlp_tiles}"] if self.mlp_tiles > 1 else []
        parts += ["in32"] if self.adapter_inputs == "fp32" and isinstance(self.tuning, Lora) else []
        parts += ["adam8"] if self.optimizer != "adamw" else []
        parts += ["acc"] if self.accumulates else []
        parts += [f"sup{round(100 * self.supervised)}"] if self.supervised < 1 else []
        parts += [self.precision] if self.precision != "bf16" else []
        parts += [f"dpo-{self.objective.reference}"] if isinstance(self.objective, Dpo) else []
        parts += ["packed"] if self.packing else []
        parts += [self.kernels] if self.kernels != "torch" else []
        parts += [f"img{image_tokens(SHAPES[self.shape], self.grids)}"] if self.grids else []
        return "-".join(parts)

    @property
    def cfg(self) -> StepConfig:
        return StepConfig(
            config=with_layers(SHAPES[self.shape], ["layer"] * self.layers),
            tuning=self.tuning,
            optimizer=AdamW(lr=1e-5, kind=self.optimizer),
            device="cuda",
            capability=(9, 0),
            precision=self.precision,
            levers=Levers(
                micro_batch=self.rows,
                recompute=self.recompute,
                keep_attention=self.keep_attention,
                loss_chunk=self.loss_chunk,
                offload=self.offload,
                mlp_tiles=self.mlp_tiles,
                adapter_inputs=self.adapter_inputs,
                packing=self.packing,
                kernels=self.kernels,
            ),
            tokens=self.tokens,
            supervised=max(1, int((self.tokens - 1) * self.supervised)),
            accumulates=self.accumulates,
            objective=self.objective,
            rows_per_step=self.rows,
            grids=self.grids,
        )


Q7, Q4, L8, M7, G4, Q05, S, MOE = (
    "qwen2.5-7b",
    "qwen3-4b",
    "llama-3.1-8b",
    "mistral-7b-v0.3",
    "gemma-3-4b",
    "qwen2.5-0.5b",
    "smollm2-135m",
    "qwen3-moe",
)
LATENT, HYBRID, DELTA = "deepseek-v2-lite", "falcon-h1-1.5b", "qwen3-next"
VL, LLAVA, SMOL, GEMMA, PALI = "qwen2.5-vl-3b", "llava-1.5-7b", "smolvlm-2b", "gemma-3-4b-it", "paligemma-3b-448"
ALL: Any = {"language": "all-linear", "vision": "all-linear", "projector": "all-linear"}
"""Targets in every tower."""
BOTH: Any = {"language": "all-linear", "vision": "all-linear"}
"""Of Gemma-3, whose projector has no linear layer."""
CASES: tuple[Case, ...] = (
    Case(shape=Q7, layers=28, tuning=lora(128, 0.05), rows=1, tokens=512, adapter_inputs="fp32"),
    Case(shape=Q7, layers=28, tuning=lora(128, 0.05), rows=1, tokens=2048, recompute=28, adapter_inputs="fp32"),
    Case(shape=Q7, layers=28, tuning=lora(128), rows=1, tokens=2048, recompute=28, loss_chunk=1024),
    Case(shape=Q7, layers=28, tuning=lora(128), rows=4, tokens=2048, recompute=14, loss_chunk=1024),
    Case(
        shape=Q7,
        layers=28,
        tuning=lora(16),
        rows=2,
        tokens=4096,
        recompute=28,
        loss_chunk=1024,
        accumulates=True,
        supervised=0.3,
    ),
    Case(shape=Q7, layers=8, tuning=lora(128), rows=4, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape=Q7, layers=8, tuning=lora(128), rows=4, tokens=2048, loss_chunk=1024),
    Case(shape=Q7, layers=8, tuning=lora(128), rows=4, tokens=2048, recompute=8),
    Case(shape=Q7, layers=8, tuning=lora(128), rows=1, tokens=8192, recompute=8, loss_chunk=1024),
    Case(shape=Q7, layers=8, tuning=lora(128), rows=1, tokens=512),
    Case(
        shape=Q7, layers=8, tuning=lora(128), rows=2, tokens=2048, recompute=4, loss_chunk=2048, optimizer="adamw_8bit"
    ),
    Case(shape=Q4, layers=36, tuning=lora(128, 0.05), rows=1, tokens=8192, recompute=36, adapter_inputs="fp32"),
    Case(
        shape=Q4, layers=36, tuning=lora(64), rows=1, tokens=32768, recompute=36, loss_chunk=1024, keep_attention=True
    ),
    Case(
        shape=Q4,
        layers=36,
        tuning=lora(64),
        rows=1,
        tokens=65536,
        recompute=36,
        loss_chunk=1024,
        offload=True,
        mlp_tiles=8,
        supervised=0.05,
    ),
    Case(shape=Q4, layers=4, tuning=FULL, rows=1, tokens=8192, recompute=4, loss_chunk=1024),
    Case(shape=L8, layers=8, tuning=lora(16), rows=1, tokens=4096),
    Case(shape=L8, layers=8, tuning=lora(16), rows=8, tokens=1024, recompute=8, loss_chunk=2048, accumulates=True),
    Case(shape=L8, layers=8, tuning=lora(16, bits=4), rows=4, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape=L8, layers=4, tuning=FULL, rows=2, tokens=2048, recompute=0, loss_chunk=1024, accumulates=True),
    Case(shape=L8, layers=4, tuning=lora(16), rows=1, tokens=1024, recompute=2, precision="fp32"),
    Case(shape=M7, layers=32, tuning=lora(16, bits=4), rows=2, tokens=1024, recompute=32, loss_chunk=1024),
    Case(shape=M7, layers=8, tuning=lora(16, 0.05), rows=2, tokens=2048, recompute=4, adapter_inputs="fp32"),
    Case(shape=G4, layers=12, tuning=lora(16), rows=1, tokens=4096, loss_chunk=1024),
    Case(shape=G4, layers=34, tuning=lora(16), rows=2, tokens=2048, recompute=34, loss_chunk=1024, supervised=0.3),
    Case(shape=Q05, layers=24, tuning=FULL, rows=4, tokens=1024, loss_chunk=1024),
    Case(shape=Q05, layers=24, tuning=FULL, rows=8, tokens=512, recompute=24, accumulates=True),
    Case(shape=S, layers=30, tuning=FULL, rows=8, tokens=1024),
    Case(shape=S, layers=30, tuning=lora(16, 0.1), rows=8, tokens=512, accumulates=True, adapter_inputs="fp32"),
    Case(shape=MOE, layers=2, tuning=FULL, rows=1, tokens=1024, recompute=2, loss_chunk=1024),
    Case(shape=Q05, layers=24, tuning=lora(16), rows=16, tokens=256, supervised=0.5),
    # pairs
    Case(
        shape=M7,
        layers=32,
        tuning=lora(16, bits=4),
        rows=1,
        tokens=1024,
        recompute=32,
        loss_chunk=256,
        objective=DPO,
        accumulates=True,
    ),
    Case(shape=M7, layers=8, tuning=lora(16), rows=2, tokens=1024, loss_chunk=1024, objective=DPO),
    Case(shape=M7, layers=8, tuning=lora(16), rows=2, tokens=1024, recompute=8, objective=DPO_CACHED),
    Case(shape=Q05, layers=24, tuning=FULL, rows=2, tokens=512, loss_chunk=1024, objective=DPO_CACHED),
    # weights in 8 bits
    Case(shape=M7, layers=32, tuning=lora(16, bits=8), rows=1, tokens=1024, recompute=32, loss_chunk=1024),
    Case(shape=L8, layers=8, tuning=lora(16, bits=8), rows=4, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape=L8, layers=8, tuning=lora(16, bits=8), rows=2, tokens=1024),
    # DoRA
    Case(shape=Q7, layers=8, tuning=lora(64, dora=True), rows=2, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape=L8, layers=8, tuning=lora(16, bits=4, dora=True), rows=2, tokens=1024, recompute=8, loss_chunk=1024),
    # adapters in bf16
    Case(shape=Q7, layers=28, tuning=lora(128, weights="bf16"), rows=1, tokens=2048, recompute=28, loss_chunk=1024),
    Case(shape=Q7, layers=8, tuning=lora(128, weights="bf16"), rows=4, tokens=2048, recompute=8, loss_chunk=1024),
    # fp16
    Case(shape=L8, layers=8, tuning=lora(16), rows=1, tokens=4096, recompute=4, precision="fp16"),
    Case(shape=Q05, layers=24, tuning=FULL, rows=4, tokens=1024, loss_chunk=1024, precision="fp16"),
    # a part of the weights
    Case(shape=Q4, layers=8, tuning=subset("layers.*.mlp"), rows=1, tokens=4096, recompute=8, loss_chunk=1024),
    Case(shape=Q05, layers=24, tuning=subset("layers.*.self_attn"), rows=4, tokens=1024),
    # rows behind one another
    Case(shape=Q7, layers=8, tuning=lora(16), rows=4, tokens=2048, recompute=8, loss_chunk=1024, packing=True),
    Case(shape=S, layers=30, tuning=FULL, rows=8, tokens=512, packing=True),
    Case(shape=Q4, layers=4, tuning=FULL, rows=1, tokens=4096, recompute=4, loss_chunk=1024, optimizer="adamw_8bit"),
    # fused kernels
    Case(shape=Q7, layers=28, tuning=lora(128), rows=4, tokens=2048, recompute=28, loss_chunk=1024, kernels="fused"),
    Case(
        shape=Q7,
        layers=28,
        tuning=lora(16),
        rows=2,
        tokens=2048,
        recompute=14,
        loss_chunk=1024,
        kernels="fused",
        accumulates=True,
        supervised=0.3,
    ),
    Case(shape=Q7, layers=8, tuning=lora(64, 0.05), rows=2, tokens=2048, recompute=4, loss_chunk=1024, kernels="fused"),
    Case(
        shape=L8, layers=8, tuning=lora(16, bits=4), rows=4, tokens=2048, recompute=8, loss_chunk=1024, kernels="fused"
    ),
    Case(
        shape=M7,
        layers=32,
        tuning=lora(16, bits=4),
        rows=1,
        tokens=1024,
        recompute=32,
        loss_chunk=256,
        objective=DPO,
        kernels="fused",
    ),
    Case(
        shape=Q4,
        layers=36,
        tuning=lora(64),
        rows=1,
        tokens=8192,
        recompute=36,
        loss_chunk=1024,
        keep_attention=True,
        kernels="fused",
    ),
    Case(
        shape=Q4,
        layers=12,
        tuning=lora(16),
        rows=1,
        tokens=16384,
        recompute=12,
        loss_chunk=1024,
        offload=True,
        mlp_tiles=8,
        kernels="fused",
    ),
    Case(shape=Q05, layers=24, tuning=FULL, rows=4, tokens=1024, recompute=24, loss_chunk=1024, kernels="fused"),
    Case(shape=G4, layers=12, tuning=lora(16), rows=2, tokens=2048, loss_chunk=1024, kernels="fused"),
    Case(shape=S, layers=30, tuning=lora(16), rows=8, tokens=512, packing=True, kernels="fused"),
    # models that see
    Case(
        shape=VL, layers=36, tuning=lora(16), rows=2, tokens=2048, loss_chunk=1024, supervised=0.3, grids=((1, 64, 64),)
    ),
    Case(
        shape=VL,
        layers=36,
        tuning=lora(16),
        rows=4,
        tokens=2048,
        recompute=36,
        loss_chunk=1024,
        supervised=0.3,
        grids=((1, 64, 64),),
    ),
    Case(
        shape=VL,
        layers=36,
        tuning=lora(16, targets=ALL),
        rows=1,
        tokens=2048,
        loss_chunk=1024,
        supervised=0.3,
        grids=((1, 64, 64),),
    ),
    Case(
        shape=VL,
        layers=36,
        tuning=lora(16, targets=ALL),
        rows=4,
        tokens=2048,
        recompute=36,
        loss_chunk=1024,
        grids=((1, 64, 64),),
    ),
    Case(
        shape=VL,
        layers=36,
        tuning=lora(16, targets=ALL),
        rows=2,
        tokens=2048,
        recompute=18,
        loss_chunk=1024,
        accumulates=True,
        supervised=0.3,
        kernels="fused",
        grids=((1, 48, 64), (1, 32, 32)),
    ),
    Case(
        shape=LLAVA,
        layers=32,
        tuning=lora(16),
        rows=4,
        tokens=1024,
        recompute=32,
        loss_chunk=1024,
        supervised=0.3,
        grids=((1,),),
    ),
    Case(shape=LLAVA, layers=32, tuning=lora(16, targets=ALL), rows=2, tokens=1024, supervised=0.3, grids=((1,),)),
    Case(
        shape=LLAVA,
        layers=32,
        tuning=lora(16, targets=ALL),
        rows=8,
        tokens=1024,
        recompute=32,
        loss_chunk=1024,
        grids=((1,),),
    ),
    Case(
        shape=LLAVA,
        layers=8,
        tuning=subset("projector"),
        rows=4,
        tokens=1024,
        recompute=8,
        loss_chunk=1024,
        grids=((1,),),
    ),
    Case(
        shape=SMOL,
        layers=24,
        tuning=lora(16, targets=ALL),
        rows=2,
        tokens=1536,
        loss_chunk=1024,
        supervised=0.3,
        grids=((3, 4),),
    ),
    Case(
        shape=SMOL,
        layers=24,
        tuning=lora(16),
        rows=4,
        tokens=1536,
        recompute=24,
        loss_chunk=1024,
        grids=((3, 4),),
        kernels="fused",
    ),
    Case(
        shape=GEMMA,
        layers=34,
        tuning=lora(16),
        rows=2,
        tokens=1536,
        recompute=34,
        loss_chunk=1024,
        supervised=0.3,
        grids=((1,),),
    ),
    Case(
        shape=GEMMA,
        layers=34,
        tuning=lora(16, targets=BOTH),
        rows=1,
        tokens=1536,
        loss_chunk=1024,
        supervised=0.3,
        grids=((1,), (1,)),
    ),
    Case(
        shape=PALI,
        layers=18,
        tuning=lora(16),
        rows=4,
        tokens=1280,
        recompute=18,
        loss_chunk=1024,
        supervised=0.1,
        grids=((1,),),
    ),
    Case(
        shape=PALI,
        layers=18,
        tuning=lora(16, targets=ALL),
        rows=2,
        tokens=1280,
        loss_chunk=1024,
        supervised=0.1,
        grids=((1,),),
    ),
    Case(shape=LATENT, layers=4, tuning=lora(16), rows=2, tokens=1024),
    Case(shape=LATENT, layers=4, tuning=lora(16), rows=1, tokens=4096, recompute=4, loss_chunk=1024),
    Case(shape=HYBRID, layers=4, tuning=lora(16), rows=2, tokens=1024),
    Case(shape=HYBRID, layers=4, tuning=lora(16), rows=1, tokens=4096, recompute=4, loss_chunk=1024),
    Case(shape=DELTA, layers=4, tuning=lora(16), rows=1, tokens=1024),
    Case(shape=DELTA, layers=4, tuning=lora(16), rows=1, tokens=2048, recompute=4, loss_chunk=1024),
)
SPEED = (5, 6, 7, 8, 9, 17)
"""Cases of 4x2048, 1x8192 and 1x512 rows whose predicted step time is held to 20 %."""
LONG = 32768
"""Tokens of a row from which a case is too slow to be run again under a limit."""


def predict(parts: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for case in chosen(parts):
        began = time.perf_counter()
        rehearsed = rehearse_extrapolated(case.cfg)
        answer = replay(rehearsed.trace.stream())
        margin = (
            int(answer.reserved_bytes * MARGIN)
            + MARGIN_BYTES
            + fragmentation_bytes(answer.reserved_bytes, rehearsed, case.cfg)
        )
        block = rehearsed.trace.blocks[rehearsed.trace.events[answer.peak_at][0]]
        found.append(
            {
                "config": case.name,
                "allocated_bytes": answer.allocated_bytes,
                "reserved_bytes": answer.reserved_bytes,
                "margin_bytes": margin,
                "peak_bytes": answer.reserved_bytes + CONTEXT_BYTES + margin,
                "step_seconds": step_seconds(rehearsed.trace, RATES),
                "components": rehearsed.trace.components(answer.peak_at),
                "instants": rehearsed.trace.peaks(),
                "peak": f"{block.instant} {block.module} {block.operation}",
                "rehearsal_seconds": round(time.perf_counter() - began, 2),
            }
        )
        print(
            (
                f"{case.name:75} {answer.allocated_bytes / 2**30:8.3f} {answer.reserved_bytes / 2**30:8.3f} "
                f"{found[-1]['rehearsal_seconds']:5.1f} s"
            ),
            flush=True,
        )
    return found


# on the card


def measure(
    case: Case, *, limit_bytes: int | None = None, steps: int = 6, adjust: Callable[[nn.Module], None] = lambda _: None
) -> dict[str, Any]:
    """`adjust` may change the model before it is trained."""
    from finefit.step.forward import autocast_for, bind, eval_without_grad, keeps_casts, make_objective
    from finefit.step.fused import kernels_here
    from finefit.step.levers import apply_levers
    from finefit.step.optimize import optimizer_step
    from finefit.step.state import make_optimizer

    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    cfg = case.cfg
    torch.manual_seed(0)
    model = build(cfg)
    adjust(model)
    is_fused = case.kernels == "fused"
    kernels = kernels_here(DEVICE) if is_fused else None
    apply_levers(model, cfg.levers, kernels=kernels)
    optimizer = make_optimizer(model, cfg.optimizer, device=DEVICE)
    autocast = autocast_for(DEVICE, cfg.precision, with_cache=keeps_casts(cfg.tuning, cfg.levers))
    forward = bind(model, loss_chunk=cfg.levers.loss_chunk, autocast=autocast, is_fused=is_fused, kernels=kernels)
    objective = make_objective(cfg.objective, cfg.tuning, model, forward)
    is_half = cfg.precision == "fp16"
    loaded, before_update = torch.cuda.memory_allocated(), 0
    if is_reference_cached(cfg.objective, cfg.tuning):
        with eval_without_grad(model):
            forward(make_batch(case))

    def decide(finite: Tensor) -> bool:
        nonlocal before_update
        before_update = max(before_update, torch.cuda.max_memory_allocated())
        return bool(finite) or is_half  # random weights may overflow, which takes no memory

    seconds = []
    for _ in range(steps if case.tokens < 32768 else 3):
        batches = [make_batch(case) for _ in range(2 if case.accumulates else 1)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        outcome = optimizer_step(
            batches,
            forward=forward,
            objective=objective,
            optimizer=optimizer,
            clip=1.0,
            decide=decide,
            loss_scale=1024.0 if is_half else 1.0,
        )
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        assert outcome.applied
        del batches
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
        "loaded_bytes": loaded,
        "before_update_bytes": before_update,
        "step_seconds": statistics.median(seconds[2:]) if len(seconds) > 3 else seconds[-1],
        "loss": outcome.loss.item(),
    }


def make_batch(case: Case) -> Batch:
    """Random tokens, the last ones of every sequence supervised, as the rehearsal has it."""
    cfg = case.cfg
    sequences = case.rows * cfg.sides
    ids = torch.randint(0, read_config(cfg.config).get_text_config().vocab_size, (sequences, case.tokens))
    extra = show(case, ids)
    last = torch.arange(case.tokens - 1 - cfg.supervised, case.tokens - 1)
    supervised = torch.cat([row * case.tokens + last for row in range(sequences)])
    targets = ids.flatten()[supervised + 1]
    boundaries = torch.arange(sequences + 1, dtype=torch.int32) * case.tokens
    packed = Packed(
        position_ids_BT=torch.arange(case.tokens).repeat(sequences)[None],
        boundaries_R1=boundaries,
        lengths=(case.tokens,) * sequences,
    )
    reference = torch.zeros(sequences) if is_reference_cached(case.objective, case.tuning) else None
    return Batch(
        input_ids_BT=ids.view(1, -1) if case.packing else ids,
        positions_N=supervised,
        targets_N=targets,
        num_supervised=len(supervised),
        num_tokens=ids.numel(),
        packed=packed if case.packing else None,
        paired=Paired(supervised=(cfg.supervised,) * sequences, reference_R=reference) if cfg.sides > 1 else None,
        extra=extra,
    ).moved(lambda tensor: tensor.to(DEVICE))


def show(case: Case, ids_BT: Tensor) -> Extra | None:
    """Images of random pixels one after the other, their tokens written into the rows."""
    geometry = geometry_of(case.cfg.config)
    if geometry is None:
        return None
    ids_BT[ids_BT == geometry.image_token] = 1
    at, row = 1, []
    for grid in case.grids:
        ids_BT[:, at : at + geometry.num_tokens(grid)] = geometry.image_token
        at += geometry.num_tokens(grid) + 1
        row.append(
            ImageInput(
                grid,
                {
                    name: np.random.default_rng(at).normal(size=p.shape).astype(p.dtype)
                    for name, p in geometry.blank_pixels(grid).items()
                },
            )
        )
    prompts = [case.tokens - case.cfg.supervised] * len(ids_BT)
    return geometry.extra(ids_BT.numpy(), [case.tokens] * len(ids_BT), [row] * len(ids_BT), prompts)


def build(cfg: StepConfig) -> nn.Module:
    """Random weights where a loaded model's would lie, in the order and with the detours of loading."""
    from finefit.model.attention import choose_attention
    from finefit.model.experts import choose_experts
    from finefit.model.load import base_bits, make_trainable, weight_dtype
    from finefit.vision import auto_class

    config = read_config(cfg.config)
    with torch.device("meta"):
        model = auto_class(config).from_config(
            config,
            dtype=weight_dtype(cfg.precision, cfg.tuning),
            attn_implementation=choose_attention(
                DEVICE, torch.cuda.get_device_capability(), cfg.precision, config, packing=cfg.levers.packing
            ),
            experts_implementation=choose_experts(),
        )
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if base_bits(cfg.tuning) == 8:
        quantise_to_bytes(model)
    elif base_bits(cfg.tuning):
        quantise(model)
    else:
        warm_up = torch.empty(total, dtype=torch.uint8, device=DEVICE)
        del warm_up
    fill(model)
    model.tie_weights()
    trained: nn.Module = make_trainable(model, cfg.tuning, name="bench")
    return trained


def fill(model: nn.Module) -> None:
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, old in slots.items():
                if old is None or old.device.type == DEVICE:
                    continue
                if id(old) not in made:
                    new: Tensor = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=DEVICE)
                    new.normal_(0, 0.02) if new.is_floating_point() else new.zero_()
                    made[id(old)] = (
                        nn.Parameter(new, requires_grad=old.requires_grad) if slots is module._parameters else new,
                        old,
                    )
                slots[name] = made[id(old)][0]  # type: ignore[assignment]


def quantise(model: nn.Module) -> None:
    import bitsandbytes

    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                dense = torch.empty(child.weight.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                layer.weight = bitsandbytes.nn.Params4bit(
                    dense, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
                ).to("cuda")
                setattr(parent, name, layer)
                del dense
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def quantise_to_bytes(model: nn.Module) -> None:
    """As transformers loads them: all in one piece from the allocator first, then each from the card to the host and
    back."""
    import bitsandbytes

    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if type(child) is nn.Linear and child is not head
    ]
    narrow = {id(child.weight) for _, _, child in linear}
    warm_up = torch.empty(
        sum(p.numel() * (1 if id(p) in narrow else p.element_size()) for p in model.parameters()),
        dtype=torch.uint8,
        device="cuda",
    )
    del warm_up
    for parent, name, child in linear:
        dense = torch.empty(child.weight.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        layer = bitsandbytes.nn.Linear8bitLt(
            child.in_features,
            child.out_features,
            bias=child.bias is not None,
            has_fp16_weights=False,
            threshold=6.0,
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Int8Params(dense.cpu(), requires_grad=False, has_fp16_weights=False).to("cuda")
        layer.bias = child.bias
        setattr(parent, name, layer)
        del dense
    model.is_loaded_in_8bit = True  # type: ignore[assignment]


def alone(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With a card as empty as at the start: nothing cached, no workspaces."""
    try:
        answer = run()
    except torch.OutOfMemoryError as error:
        answer = {"out_of_memory": str(error)[:200]}
    except Exception as error:  # noqa: BLE001 the next case may still be measured
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return answer | {"left_bytes": torch.cuda.memory_reserved()}


def chosen(parts: Sequence[str]) -> list[Case]:
    """Those whose name has one of the parts; all where none is given."""
    return [case for case in CASES if not parts or any(part in case.name for part in parts)]


def measure_all(out: Path, parts: Sequence[str]) -> None:
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "versions": versions(), "cases": {}}
    for case in chosen(parts):
        found["cases"][case.name] = alone(lambda case=case: measure(case))  # type: ignore[misc]
        print(case.name, found["cases"][case.name], flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def capped_all(predicted: list[dict[str, Any]], out: Path, parts: Sequence[str]) -> None:
    """What the allocator may hold is set to the predicted reserved memory with its margin, and to 3 % less than the
    predicted reserved memory."""
    by_config = {row["config"]: row for row in predicted}
    found: list[dict[str, Any]] = []
    cases = sorted((c for c in chosen(parts) if c.tokens < LONG), key=lambda c: by_config[c.name]["reserved_bytes"])
    limits = {
        "fits": {name: row["reserved_bytes"] + row["margin_bytes"] for name, row in by_config.items()},
        "does not fit": {name: int(row["reserved_bytes"] * 0.97) for name, row in by_config.items()},
    }
    for verdict, limit_of in limits.items():
        for case in cases:
            limit = limit_of[case.name]
            answer = alone(partial(measure, case, limit_bytes=limit, steps=3))
            lived = "out_of_memory" not in answer and "error" not in answer
            found.append(
                {"config": case.name, "limit_bytes": limit, "verdict": verdict, "lived": lived}
                | ({} if lived else {"why": str(answer)[:200]})
            )
            print(case.name, verdict, "lived" if lived else answer, flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "peft")}


_PREDICTED = ("allocated_bytes", "reserved_bytes", "peak_bytes", "step_seconds", "components")


def merge(
    predicted: list[dict[str, Any]], measured: dict[str, Any], capped: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The committed result: one entry for each case."""
    rows = []
    for row in predicted:
        truth = measured["cases"][row["config"]]
        limits = {entry["verdict"]: entry["lived"] for entry in capped if entry["config"] == row["config"]}
        rows.append(
            {
                "config": row["config"],
                "card": measured["card"],
                "date": datetime.now(UTC).date().isoformat(),
                "versions": {"predicted": versions(), "measured": measured["versions"]},
                "predicted": {key: row[key] for key in _PREDICTED},
                "measured": {
                    key: truth[key]
                    for key in ("loaded_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "step_seconds")
                },
                "capped": limits,
            }
        )
    return rows


def replaced(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases that were not measured now keep their earlier figures, each with its own date and versions."""
    now = {row["config"]: row for row in rows}
    kept = [now.pop(row["config"], row) for row in earlier]
    return [*kept, *now.values()]


def renewed(rows: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured keeps its date; runs under a limit had that of the forecast of their day. What was never
    measured is left out."""
    now = {row["config"]: {"predicted": {key: row[key] for key in _PREDICTED}} for row in predicted}
    return [
        row | now[row["config"]] | {"versions": row["versions"] | {"predicted": versions()}}
        if row["config"] in now
        else row
        for row in rows
    ]


def main() -> None:
    what, given = sys.argv[1], sys.argv[2:]
    files = [Path(name) for name in given]
    match what:
        case "predict":
            files[0].write_text(json.dumps(predict(given[1:]), indent=1) + "\n")
        case "measure":
            measure_all(files[0], given[1:])
        case "capped":
            capped_all(json.loads(files[0].read_text()), files[1], given[2:])
        case "merge":
            rows = merge(*(json.loads(file.read_text()) for file in files[:3]))
            earlier = json.loads(files[3].read_text()) if files[3].exists() else rows
            files[3].write_text(json.dumps(replaced(earlier, rows), indent=1) + "\n")
        case "renew":
            told, known = (json.loads(file.read_text()) for file in files)
            files[1].write_text(json.dumps(renewed(known, told), indent=1) + "\n")


if __name__ == "__main__":
    main()
