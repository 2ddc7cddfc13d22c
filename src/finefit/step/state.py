"""Optimizer state and random numbers as named tensors, restored bit for bit, and the proof that frozen weights have not
changed."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finefit.errors import FinefitError, RunError, SpecError
from finefit.model.saved_weights import full_shape
from finefit.spec.schema import AdamW
from finefit.step.engine import SINGLE_PROCESS, Layout, local_part

OPTIMIZER = "finefit_optimizer.safetensors"
RNG = "finefit_rng.safetensors"
_SHARED = ("qmap1", "qmap2")
"""Tables of 8-bit AdamW that all parameters share; a file stores each tensor separately."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")


def make_optimizer(model: nn.Module, spec: AdamW, *, device: str = "cpu") -> torch.optim.Optimizer:
    """Weight decay applies to matrices, not to biases and norms. On a card the update is one kernel without
    temporaries."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [g for g in groups if g["params"]]
    if spec.kind == "adamw":
        kernel = {"fused": True} if device == "cuda" else {"foreach": True}
        return torch.optim.AdamW(filled, lr=spec.lr, betas=spec.betas, eps=spec.eps, **kernel)
    if device != "cuda":
        raise SpecError(f"optimizer.kind {spec.kind} needs a CUDA device", "set optimizer.kind: adamw")
    try:
        import bitsandbytes  # an extra: finefit[gpu]
    except ImportError:
        problem = f"optimizer.kind {spec.kind} needs bitsandbytes, which is not installed"
        raise SpecError(problem, "pip install 'finefit[gpu]'") from None
    kinds = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
    kind = getattr(bitsandbytes.optim, kinds[spec.kind])
    optimizer: torch.optim.Optimizer = kind(filled, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    return optimizer


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout = SINGLE_PROCESS, *, keeps: bool = True
) -> dict[str, Tensor]:
    """`<parameter>/<slot>` -> whole tensor, in the order of parameters. All ranks gather, and keep them if `keeps`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainable_of(model).items():
        for slot, value in layout.slots(optimizer, parameter).items():
            if keeps:
                tensors[f"{name}/{slot}"] = torch.as_tensor(value)  # 8-bit AdamW counts its steps in a plain number
    return tensors


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    gathered: dict[str, Tensor] | None = None,
    random_of_ranks: Sequence[dict[str, Tensor]] | None = None,
) -> None:
    """`gathered` and `random_of_ranks` are the optimizer's tensors and the random numbers of several ranks."""
    tensors = optimizer_tensors(model, optimizer) if gathered is None else gathered
    shared = {name for name in tensors if name.rsplit("/", 1)[1] in _SHARED}
    apart = {name: t.clone() if name in shared else t.contiguous() for name, t in tensors.items()}
    save_file(apart, folder / OPTIMIZER)
    if random_of_ranks is None:
        numbers = random_state()
    else:
        numbers = {f"rank{at}/{kind}": t for at, one in enumerate(random_of_ranks) for kind, t in one.items()}
    save_file(numbers, folder / RNG)


def restore_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout = SINGLE_PROCESS, *, rank: int = 0
) -> None:
    """Restores a state written by any number of ranks under any layout. A rank that did not exist then keeps its random
    numbers."""
    slots_of: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(folder / OPTIMIZER).items():
        name, slot = key.rsplit("/", 1)
        slots_of[name][slot] = tensor
    parameters = trainable_of(model)
    if unknown := sorted(slots_of.keys() - parameters.keys()):
        names = ", ".join(unknown[:3])
        raise RunError(f"{folder.name} holds optimizer state of tensors that are not trained here: {names}")
    moments = {name: [t for slot, t in slots.items() if slot in _MOMENTS] for name, slots in slots_of.items()}
    if odd := sorted(n for n, found in moments.items() if any(t.shape != full_shape(parameters[n]) for t in found)):
        raise RunError(f"{folder.name} holds optimizer state of another shape for {', '.join(odd[:3])}")
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if name in slots_of:
            placed = {slot: _in_place(slot, t, parameter, optimizer) for slot, t in slots_of[name].items()}
            layout.put_slots(optimizer, parameter, placed)
    stored, prefix = load_file(folder / RNG), f"rank{rank}/"
    own = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    if not own and rank == 0:  # what a single process wrote belongs to the first rank
        own = {name: tensor for name, tensor in stored.items() if "/" not in name}
    if own:
        restore_random(own)


def _in_place(slot: str, tensor: Tensor, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor | int:
    """Moments are on the parameter's device, or paged; the step count is on the host, unless the update is fused."""
    if slot in _MOMENTS and getattr(optimizer, "is_paged", False):
        buffer: Tensor = optimizer.get_state_buffer(parameter, dtype=tensor.dtype)  # type: ignore[attr-defined]
        return buffer.copy_(tensor)
    if slot != "step":
        return tensor.to(parameter.device)
    if not isinstance(optimizer, torch.optim.AdamW):
        return int(tensor)
    return tensor.to(parameter.device) if optimizer.defaults["fused"] else tensor


def random_state() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_random(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """For passes that belong to no step: random numbers, and buffers such as the running mean of a norm, are afterwards
    what they were before."""
    random_before, buffers_before = random_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_random(random_before)
        with torch.no_grad():
            for buffer, before in buffers_before:
                buffer.copy_(before)


def state_bytes(model: nn.Module) -> int:
    """The bytes of AdamW's two moments, whether they exist yet or not."""
    return sum(2 * full_shape(p).numel() * p.element_size() for p in model.parameters() if p.requires_grad)


# Frozen weights are proved unchanged by an exact checksum of every frozen tensor's bytes, computed on its device. Eight
# bytes at a time are mixed with their position and summed in 64-bit integers, which wrap and do not round: the order of
# the sum does not matter, and any single word that changes, or two that change places, change the sum.

_WORD = 8
_PIECE_BYTES = 8 << 20
"""The number of bytes summed at once; temporaries take a few times that."""
_ODD, _FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_SHIFT = 29
_WITHOUT_SIGN = (1 << (64 - _SHIFT)) - 1
"""Clears the sign of a word shifted right: torch fills with the sign, which would make a word and its complement
equal."""

FrozenSums = dict[str, str]
"""Kind, shape and checksum of frozen tensors, by name."""


def frozen_checksums(model: nn.Module) -> FrozenSums:
    """Includes the scales of quantised weights and, for a sharded tensor, this rank's shard. The device is read
    once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()  # a tensor with two names comes once
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = local_part(tensor).detach()
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device  # metadata of quantised weights is on the host
    words = torch.stack([_checksum(tensor).to(device) for tensor in tensors.values()]).tolist()
    found = zip(tensors.items(), words, strict=True)
    return {name: f"{tensor.dtype} {tuple(tensor.shape)} {word}" for (name, tensor), word in found}


def require_frozen_unchanged(before: FrozenSums, model: nn.Module) -> bool | None:
    """None if nothing is frozen. A frozen tensor that changed is a bug of finefit or of a library."""
    after = frozen_checksums(model)
    if moved := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        names = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
        raise FinefitError(f"{len(moved)} of {len(before)} frozen tensors changed during training: {names}")
    return True if before else None


def _checksum(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1).view(torch.uint8)
    for at, piece in enumerate(torch.split(flat, _PIECE_BYTES)):
        total += _mixed(_words(piece), first=at * (_PIECE_BYTES // _WORD)).sum()
    return total


def _words(piece: Tensor) -> Tensor:
    """The bytes as 64-bit words, padded with zeros. They are copied, because a tensor need not be aligned to words."""
    whole = torch.zeros(-(-piece.numel() // _WORD) * _WORD, dtype=torch.uint8, device=piece.device)
    whole[: piece.numel()] = piece
    return whole.view(torch.int64)


def _mixed(words: Tensor, *, first: int) -> Tensor:
    places = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed = words.bitwise_xor_(places.mul_(_ODD)).mul_(_FACTOR)
    return mixed.bitwise_xor_((mixed >> _SHIFT).bitwise_and_(_WITHOUT_SIGN)).mul_(_FACTOR)
