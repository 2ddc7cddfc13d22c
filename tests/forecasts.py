"""An invented forecast: what a test is about is changed in it, all else is sound."""

from typing import Any

from finefit.artifacts.forecasts import Forecast, GradientMap, Lengths
from finefit.artifacts.records import Levers

GIB = 2**30
COMPONENTS = {
    "weights": int(14.193 * GIB),
    "activations": int(3.404 * GIB),
    "optimizer state": int(0.298 * GIB),
    "gradients": int(0.149 * GIB),
    "loss": int(1.157 * GIB),
    "temporary": int(0.581 * GIB),
    "workspace": int(0.0083 * GIB),
    "batch": 1536,
}


def make_forecast(**changes: Any) -> Forecast:
    """Of a LoRA on a model of 7 billion parameters; the sums follow from the components and the budget."""
    components = changes.pop("components", COMPONENTS)
    allocated_bytes = sum(components.values())
    reserved_bytes = allocated_bytes + int(0.344 * GIB)
    context_bytes, margin_bytes = int(0.498 * GIB), int(0.706 * GIB)
    peak_bytes = reserved_bytes + context_bytes + margin_bytes
    budget_bytes = changes.get("budget_bytes", int(23.53 * GIB))
    values: dict[str, Any] = {
        "card": "RTX 4090",
        "devices": 1,
        "fits": peak_bytes <= budget_bytes,
        "budget_bytes": budget_bytes,
        "peak_bytes": peak_bytes,
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": reserved_bytes,
        "context_bytes": context_bytes,
        "margin_bytes": margin_bytes,
        "peak_instant": "backward",
        "peak_module": "base_model.model.model.layers.27.mlp.down_proj.lora_A.default",
        "peak_operation": "aten::_log_softmax_backward_data",
        "components": components,
        "instants": {
            "load": int(14.20 * GIB),
            "backward": allocated_bytes,
            "batch": int(14.21 * GIB),
            "forward": int(18.05 * GIB),
            "loss": int(19.44 * GIB),
            "update": int(15.02 * GIB),
            "validation": int(16.31 * GIB),
            "generation": int(15.87 * GIB),
        },
        "levers": Levers(micro_batch=4, recompute=12, loss_chunk=1024, adapter_inputs="bf16"),
        "reasons": {
            "micro_batch": "the largest that fits; 8 needs 27.9 GiB",
            "recompute": "the fewest layers with which micro_batch 4 fits",
            "loss_chunk": "logits of 4,096 tokens would take 4.6 GiB",
            "adapter_inputs": "the product is taken in bf16",
        },
        "accumulation": 4,
        "tokens_per_step": 2047.4,
        "step_seconds": 0.43,
        "tokens_per_second": 4761.4,
        "total_steps": 1204,
        "total_seconds": 517.0,
        "price_per_hour": 1.1,
        "cost": 0.158,
        "flops_per_step": 6.21e13,
        "host_bytes": int(15.4 * GIB),
        "disk_bytes": int(0.93 * GIB),
        "parameters": 7_655_593_472,
        "trainable_parameters": 39_976_960,
        "lengths": Lengths(
            num_rows=3211, longest=1904, mean=511.8, supervised=880, mean_supervised=209.6, source="counted"
        ),
        "gradients": GradientMap(trainable=392, reached=392, unreached=()),
        "suggestions": (),
        "notes": ("attention runs as scaled_dot_product_attention: flash_attn is not installed",),
        "uncertainty": 0.004,
    }
    return Forecast(**(values | changes))
