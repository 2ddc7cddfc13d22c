"""A layer as bitsandbytes packs it, and peft's DoRA on a layer."""

import peft
import torch
from torch import Tensor, nn


class One(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.proj = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.proj(x)
        return found


def quantised_layer(bits: int, inputs: int, outputs: int, *, device: str) -> nn.Module:
    import bitsandbytes

    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    if bits == 8:
        layer = bitsandbytes.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
        )
    made: nn.Module = layer.to(device)
    return made


def with_dora(layer: nn.Module, bits: int) -> nn.Module:
    """Of a model that says of itself, as transformers' do, how it was loaded. The adapter is trained in fp32."""
    model = One(layer)
    setattr(model, f"is_loaded_in_{bits}bit", True)
    config = peft.LoraConfig(r=16, lora_alpha=32, use_dora=True, target_modules=["proj"])
    adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted
