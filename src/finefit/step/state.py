"""The optimizer and the random numbers, gathered into named tensors and put back bit for bit."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finefit.errors import RunError, SpecError
from finefit.spec.schema import AdamW
from finefit.step.engine import ALONE, Layout, whole_shape

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
    if spec.kind == "adamw":
        return torch.optim.AdamW(filled, lr=spec.lr, betas=spec.betas, eps=spec.eps, **_kernel(device))
    return _of_bitsandbytes(filled, spec, device)


def _kernel(device: str) -> dict[str, bool]:
    return {"fused": True} if device == "cuda" else {"foreach": True}


_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def _of_bitsandbytes(groups: list[dict[str, Any]], spec: AdamW, device: str) -> torch.optim.Optimizer:
    if device != "cuda":
        raise SpecError(f"optimizer.kind {spec.kind} needs a CUDA device", "set optimizer.kind: adamw")
    try:
        import bitsandbytes  # an extra: finefit[gpu]
    except ImportError:
        raise SpecError(
            f"optimizer.kind {spec.kind} needs bitsandbytes, which is not installed", "pip install 'finefit[gpu]'"
        ) from None
    kind = getattr(bitsandbytes.optim, _BITSANDBYTES[spec.kind])
    optimizer: torch.optim.Optimizer = kind(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    return optimizer


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout = ALONE, *, keeps: bool = True
) -> dict[str, Tensor]:
    """`<parameter>/<slot>` -> whole tensor, in the parameters' own order. All ranks ask; who `keeps` them gets them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(model).items():
        for slot, value in layout.slots(optimizer, parameter).items():
            if keeps:
                tensors[f"{name}/{slot}"] = torch.as_tensor(value)  # 8-bit AdamW counts its steps in a plain number
    return tensors


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    gathered: dict[str, Tensor] | None = None,
    random_of_ranks: Sequence[dict[str, Tensor]] | None = None,
) -> None:
    """`gathered` and `random_of_ranks`: the optimizer's tensors and the random numbers of every rank, where there are several."""
    tensors = optimizer_tensors(model, optimizer) if gathered is None else gathered
    shared = {name for name in tensors if name.rsplit("/", 1)[1] in _SHARED}
    save_file(
        {name: t.clone() if name in shared else t.contiguous() for name, t in tensors.items()}, folder / OPTIMIZER
    )
    save_file(random_state() if random_of_ranks is None else _by_rank(random_of_ranks), folder / RNG)


def restore_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout = ALONE, *, rank: int = 0
) -> None:
    """Written by any number of ranks under any layout. A rank that was not there then goes on with the random numbers that it has."""
    slots_of: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(folder / OPTIMIZER).items():
        name, slot = key.rsplit("/", 1)
        slots_of[name][slot] = tensor
    parameters = _trained(model)
    _check_slots(slots_of, parameters, folder)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if name in slots_of:
            placed = {slot: _in_place(slot, t, parameter, optimizer) for slot, t in slots_of[name].items()}
            layout.put_slots(optimizer, parameter, placed)
    if own := _of_rank(load_file(folder / RNG), rank):
        restore_random(own)


def _by_rank(random_of_ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"rank{rank}/{kind}": tensor for rank, tensors in enumerate(random_of_ranks) for kind, tensor in tensors.items()
    }


def _of_rank(stored: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a process wrote that was alone is the first rank's."""
    prefix = f"rank{rank}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    return own or ({name: tensor for name, tensor in stored.items() if "/" not in name} if rank == 0 else {})


def _in_place(slot: str, tensor: Tensor, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor | int:
    """The moments live beside their parameter, or where they can be paged out; the count of steps lives on the host, unless the update is one kernel
    on the device."""
    if slot in _MOMENTS and getattr(optimizer, "is_paged", False):
        buffer: Tensor = optimizer.get_state_buffer(parameter, dtype=tensor.dtype)  # type: ignore[attr-defined]
        return buffer.copy_(tensor)
    if slot != "step":
        return tensor.to(parameter.device)
    if not isinstance(optimizer, torch.optim.AdamW):
        return int(tensor)
    return tensor.to(parameter.device) if optimizer.defaults["fused"] else tensor


def _check_slots(slots_of: dict[str, dict[str, Tensor]], parameters: dict[str, nn.Parameter], folder: Path) -> None:
    if unknown := sorted(slots_of.keys() - parameters.keys()):
        raise RunError(
            f"{folder.name} holds optimizer state of tensors that are not trained here: {', '.join(unknown[:3])}"
        )
    if odd := sorted(
        n
        for n, slots in slots_of.items()
        if any(t.shape != whole_shape(parameters[n]) for slot, t in slots.items() if slot in _MOMENTS)
    ):
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
    return sum(2 * whole_shape(p).numel() * p.element_size() for p in model.parameters() if p.requires_grad)
