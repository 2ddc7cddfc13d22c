"""The optimizer and the random numbers, gathered into named tensors and put back bit for bit."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finefit.errors import RunError, SpecError
from finefit.spec.schema import AdamW

OPTIMIZER = "finefit_optimizer.safetensors"
RNG = "finefit_rng.safetensors"
_SHARED = ("qmap1", "qmap2")
"""Tables of 8-bit AdamW that all parameters have in common; a file holds each tensor by itself."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")


def make_optimizer(model: nn.Module, spec: AdamW, *, device: str = "cpu") -> torch.optim.Optimizer:
    """Weight decay acts on matrices; biases and norms are left alone. On a card the update is one kernel without temporaries."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [g for g in groups if g["params"]]
    if spec.kind == "adamw_8bit":
        return _eight_bit(filled, spec, device)
    return torch.optim.AdamW(filled, lr=spec.lr, betas=spec.betas, eps=spec.eps, **_kernel(device))


def _kernel(device: str) -> dict[str, bool]:
    return {"fused": True} if device == "cuda" else {"foreach": True}


def _eight_bit(groups: list[dict[str, Any]], spec: AdamW, device: str) -> torch.optim.Optimizer:
    if device != "cuda":
        raise SpecError("optimizer.kind adamw_8bit needs a CUDA device", "set optimizer.kind: adamw")
    try:
        import bitsandbytes  # an extra: finefit[gpu]
    except ImportError:
        raise SpecError("optimizer.kind adamw_8bit needs bitsandbytes, which is not installed", "pip install 'finefit[gpu]'") from None
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    return optimizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<slot>` -> tensor, in the parameters' own order."""
    return {
        f"{name}/{slot}": torch.as_tensor(value)  # 8-bit AdamW counts its steps in a plain number
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors = optimizer_tensors(model, optimizer)
    shared = {name for name in tensors if name.rsplit("/", 1)[1] in _SHARED}
    save_file({name: t.clone() if name in shared else t.contiguous() for name, t in tensors.items()}, folder / OPTIMIZER)
    save_file(random_state(), folder / RNG)


def restore_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    slots_of: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(folder / OPTIMIZER).items():
        name, slot = key.rsplit("/", 1)
        slots_of[name][slot] = tensor
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_slots(slots_of, parameters, folder)
    optimizer.state.clear()
    for name, slots in slots_of.items():
        optimizer.state[parameters[name]] = {slot: _in_place(slot, t, parameters[name].device, optimizer) for slot, t in slots.items()}
    restore_random(load_file(folder / RNG))


def _in_place(slot: str, tensor: Tensor, device: torch.device, optimizer: torch.optim.Optimizer) -> Tensor | int:
    """The moments live beside their parameter; the count of steps lives on the host, unless the update is one kernel on the device."""
    if slot != "step":
        return tensor.to(device)
    if not isinstance(optimizer, torch.optim.AdamW):
        return int(tensor)
    return tensor.to(device) if optimizer.defaults["fused"] else tensor


def _check_slots(slots_of: dict[str, dict[str, Tensor]], parameters: dict[str, nn.Parameter], folder: Path) -> None:
    if unknown := sorted(slots_of.keys() - parameters.keys()):
        raise RunError(f"{folder.name} holds optimizer state of tensors that are not trained here: {', '.join(unknown[:3])}")
    if odd := sorted(n for n, slots in slots_of.items() if any(t.shape != parameters[n].shape for slot, t in slots.items() if slot in _MOMENTS)):
        raise RunError(f"{folder.name} holds optimizer state of another shape for {', '.join(odd[:3])}")


def random_state() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_random(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def state_bytes(model: nn.Module) -> int:
    """What AdamW's two moments take, before the first step as after it."""
    return sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
