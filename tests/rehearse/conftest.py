"""Real widths as configs, and scenes of one card generation."""

from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.rehearse.step_config import StepConfig
from finefit.spec.models import Full, Lora
from finefit.spec.schema import AdamW

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "heads": 32,
        "kv": 8,
        "width": 128,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "heads": 28,
        "kv": 4,
        "width": 128,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "heads": 32,
        "kv": 8,
        "width": 128,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "heads": 32,
        "kv": 8,
        "width": 128,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "heads": 9,
        "kv": 3,
        "width": 64,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "heads": 32,
        "kv": 8,
        "width": 64,
    },
}
LORA, FULL = Lora(kind="lora", rank=8, alpha=16), Full(kind="full")


def make_config(shape: str = "smollm2-135m", *, layers: int = 2, tied: bool = False, **more: Any) -> dict[str, Any]:
    known = SHAPES[shape]
    kept = {key: value for key, value in known.items() if key not in ("heads", "kv", "width")}
    heads = {"num_attention_heads": known["heads"], "num_key_value_heads": known["kv"], "head_dim": known["width"]}
    return kept | heads | {"num_hidden_layers": layers, "tie_word_embeddings": tied, "sliding_window": None} | more


def make_cfg(config: dict[str, Any] | None = None, **changes: Any) -> StepConfig:
    """On an Ampere card or newer, in bf16, one row of 512 tokens, all supervised."""
    levers = changes.pop("levers", {})
    plain: dict[str, Any] = {
        "config": config or make_config(),
        "tuning": LORA,
        "optimizer": AdamW(lr=1e-4),
        "device": "cuda",
        "capability": (8, 9),
        "precision": "bf16",
        "levers": Levers(**({"micro_batch": 1, "adapter_inputs": "bf16"} | levers)),
        "tokens": 512,
        "supervised": 511,
        "accumulates": False,
    }
    return StepConfig(**(plain | changes))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)
