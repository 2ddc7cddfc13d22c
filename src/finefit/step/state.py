"""The optimizer and the random numbers, gathered into named tensors and put back bit for bit."""

from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finefit.errors import RunError
from finefit.spec.schema import AdamW

OPTIMIZER = "finefit_optimizer.safetensors"
RNG = "finefit_rng.safetensors"


def make_optimizer(model: nn.Module, spec: AdamW) -> torch.optim.AdamW:
    """Weight decay acts on matrices; biases and norms are left alone."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<slot>` -> tensor, in the parameters' own order."""
    return {f"{name}/{slot}": tensor for name, parameter in model.named_parameters() for slot, tensor in optimizer.state.get(parameter, {}).items()}


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    save_file({name: t.contiguous() for name, t in optimizer_tensors(model, optimizer).items()}, folder / OPTIMIZER)
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
        # `step` counts on the host, the moments live beside their parameter
        device = parameters[name].device
        optimizer.state[parameters[name]] = {slot: t if slot == "step" else t.to(device) for slot, t in slots.items()}
    restore_random(load_file(folder / RNG))


def _check_slots(slots_of: dict[str, dict[str, Tensor]], parameters: dict[str, nn.Parameter], folder: Path) -> None:
    if unknown := sorted(slots_of.keys() - parameters.keys()):
        raise RunError(f"{folder.name} holds optimizer state of tensors that are not trained here: {', '.join(unknown[:3])}")
    if odd := sorted(n for n, slots in slots_of.items() if any(t.shape != parameters[n].shape for slot, t in slots.items() if slot != "step")):
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
