"""Real widths as configs, and scenes of one card generation."""

from typing import Any

import pytest

from finefit.artifacts.records import Levers
from finefit.rehearse.allocator import replay
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.rehearsal import Rehearsal
from finefit.rehearse.trace import Trace
from finefit.spec.models import Full, Lora
from finefit.spec.schema import AdamW

KEYS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "heads", "kv", "width")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(KEYS, values, strict=True))
    for name, values in {
        "llama-3.1-8b": ("llama", 128256, 4096, 14336, 32, 8, 128),
        "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 4, 128),
        "qwen3-4b": ("qwen3", 151936, 2560, 9728, 32, 8, 128),
        "mistral-7b": ("mistral", 32768, 4096, 14336, 32, 8, 128),
        "smollm2-135m": ("llama", 49152, 576, 1536, 9, 3, 64),
        "llama-3.2-1b": ("llama", 128256, 2048, 8192, 32, 8, 64),
    }.items()
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


def peak(found: Rehearsal) -> int:
    return replay(found.trace.stream()).allocated_bytes


def kept_after_forward(found: Rehearsal) -> int:
    """Bytes of activations when the last layer of the last forward is done."""
    last = max(at for at, instant in enumerate(found.trace.instants) if instant == "forward")
    return found.trace.components(last).get("activations", 0)


def held_before_the_last_step(found: Rehearsal) -> dict[str, int]:
    return found.trace.components(last_step(found.trace) - 1)


def last_step(trace: Trace) -> int:
    """The event at which it begins: right after its batches are made."""
    return len(trace.instants) - trace.instants[::-1].index("batch")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)
