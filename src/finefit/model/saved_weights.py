"""The weights of a saved model under the names of the model in memory: transformers stores some in another form, such
as the experts of a mixture, which are many tensors in a file and one in memory. Read one at a time, put back into a
model, or collected from one whose parameters are sharded over ranks."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit.errors import RunError
from finefit.facts.files import find_weight_files
from finefit.model.resolve_model import ADAPTER_WEIGHTS

TRAINED = "default"
"""Peft's name of an adapter without a name of its own; it is saved in the plain layout."""
Put = Callable[[nn.Parameter, Tensor], None]


class SavedTensors:
    """Of one folder; remembers what has not been read."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for name in find_weight_files(folder):
            file: Any = safe_open(folder / name, framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._left = set(self._file_of)

    @property
    def unread(self) -> list[str]:
        return sorted(self._left)

    def take(self, model: nn.Module, name: str, shape: torch.Size) -> Tensor | None:
        """None where it is not there, or not in this shape."""
        if name in self._file_of:
            return self.read(name) if self._shape(name) == list(shape) else None
        unit, places = self._parts(model, name, shape)
        if not places:
            return None
        parts = {key: self.read(key) for key in places}
        whole_SU = torch.empty(shape.numel() // unit, unit, dtype=next(iter(parts.values())).dtype)
        for key, part in parts.items():
            whole_SU[places[key].flatten()] = part.reshape(-1, unit)
        return whole_SU.view(shape)

    def names(self, model: nn.Module, name: str, shape: torch.Size) -> tuple[str, ...]:
        """What a tensor is stored under: its own name, or those of its parts. Empty where `take` gives None."""
        if name in self._file_of:
            return (name,) if self._shape(name) == list(shape) else ()
        return tuple(self._parts(model, name, shape)[1])

    def _parts(self, model: nn.Module, name: str, shape: torch.Size) -> tuple[int, dict[str, Tensor]]:
        for unit in (shape[-1] if shape else 1, 1):
            places = _places(model, name, shape, unit)
            if places and all(
                key in self._file_of and _agree(place, self._shape(key), unit) for key, place in places.items()
            ):
                return unit, places
        return 1, {}

    def _shape(self, name: str) -> list[int]:
        shape: list[int] = self._file_of[name].get_slice(name).get_shape()
        return shape

    def read(self, name: str) -> Tensor:
        """As it is stored, under a name of the file."""
        self._left.discard(name)
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _places(model: nn.Module, name: str, shape: torch.Size, unit: int) -> dict[str, Tensor]:
    """Which parts of a tensor are stored under which names: transformers converts their numbers in place of their
    values. `unit` values in a row share a number, so that few numbers are needed where rows stay whole."""
    if not isinstance(model, PreTrainedModel):
        return {}
    numbers = torch.arange(shape.numel() // unit).view(*shape[:-1], -1)
    found: dict[str, Tensor] = revert_weight_conversion(model, {name: numbers})
    return found


def _agree(numbers: Tensor, stored: Sequence[int], unit: int) -> bool:
    """Whether they number what is stored, in order; a dimension of one may come and go."""
    rows = stored if unit == 1 else stored[:-1] if stored and stored[-1] == unit else (0,)
    return [size for size in numbers.shape if size != 1] == [size for size in rows if size != 1]


def put_whole(parameter: Tensor, value: Tensor) -> None:
    parameter.detach().copy_(value)


def restore_weights(model: nn.Module, checkpoint: Path, put: Put = put_whole) -> None:
    """Puts a trainable model back to what `save_weights` wrote, tensor by tensor. `put`: into a parameter that may be
    sharded over ranks."""
    if isinstance(model, peft.PeftModel):
        wanted = adapter_tensors(model, dict(model.named_parameters()))
        adapter = load_file(checkpoint / ADAPTER_WEIGHTS)
        odd = adapter.keys() ^ wanted.keys() or {n for n in wanted if adapter[n].shape != whole_shape(wanted[n])}
        if odd:
            names = ", ".join(sorted(odd)[:3])
            raise RunError(f"{checkpoint.name} holds an adapter for another model or other targets: {names} differ")
        for name, tensor in adapter.items():
            _put(wanted[name], tensor, put)
        return
    stored = SavedTensors(checkpoint)
    targets = model.state_dict(keep_vars=True)
    restored: set[int] = set()
    for name, target in targets.items():
        if (value := stored.take(model, name, whole_shape(target))) is not None:
            _put(target, value, put)
            restored.add(id(target))
    if stored.unread:
        raise RunError(f"{checkpoint.name} holds {stored.unread[0]}, which this model does not have in that shape")
    # a tied tensor is stored under one of its names
    if missing := sorted(name for name, target in targets.items() if id(target) not in restored):
        raise RunError(f"{checkpoint.name} lacks {', '.join(missing[:3])}")


def _put(target: Tensor, value: Tensor, put: Put) -> None:
    """A buffer is whole on every rank."""
    if isinstance(target, nn.Parameter):
        put(target, value)
    else:
        put_whole(target, value)


def whole_shape(tensor: Tensor) -> torch.Size:
    """DeepSpeed leaves an empty tensor in the place of one that it has sharded."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def adapter_tensors(adapted: peft.PeftModel, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Of the adapter that is trained, by the names that they are stored under. `tensors`: by name, in place of the
    model's own."""
    named: dict[str, Tensor] = peft.get_peft_model_state_dict(
        adapted, state_dict=tensors, adapter_name=TRAINED, save_embedding_layers=False
    )
    return named


def whole_weights(
    model: nn.Module, weight: Callable[[nn.Parameter], Tensor], *, keeps: bool, only_trained: bool = False
) -> dict[str, Tensor]:
    """What `save_weights` takes where parameters are sharded. `weight` assembles one, with the help of all ranks; the
    rank that `keeps` them gets them, tied ones still tied. `only_trained`: frozen ones are saved from files."""
    named = dict(_trained(model)) if isinstance(model, peft.PeftModel) else model.state_dict(keep_vars=True)
    if only_trained:
        buffers = {name: tensor for name, tensor in named.items() if not isinstance(tensor, nn.Parameter)}
        named = dict(_trained(model)) | buffers
    whole: dict[int, Tensor] = {}
    for ident, tensor in {id(tensor): tensor for tensor in named.values()}.items():
        value = weight(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
        if keeps:
            whole[ident] = value
    return {name: whole[id(tensor)] for name, tensor in named.items()} if keeps else {}


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
