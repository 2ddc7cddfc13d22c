"""Tensors of a saved model as the model that has them in memory knows them: transformers keeps some in another form than it stores, such as the
experts of a mixture, which are many tensors in a file and one in memory. One is read at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from finefit.facts.model import find_weight_files


class Stored:
    """Of one folder; knows what has not been asked for."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for name in find_weight_files(folder):
            file: Any = safe_open(folder / name, framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._left = set(self._file_of)

    @property
    def untaken(self) -> list[str]:
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
    """Which parts of a tensor are stored under which names: transformers is given their numbers in the place of their values. `unit` values in a row
    have one number together, so that few have to be given where rows stay whole."""
    if not isinstance(model, PreTrainedModel):
        return {}
    numbers = torch.arange(shape.numel() // unit).view(*shape[:-1], -1)
    found: dict[str, Tensor] = revert_weight_conversion(model, {name: numbers})
    return found


def _agree(numbers: Tensor, stored: Sequence[int], unit: int) -> bool:
    """Whether they number what is stored, one after the other; a dimension of one may come and go."""
    rows = stored if unit == 1 else stored[:-1] if stored and stored[-1] == unit else (0,)
    return [size for size in numbers.shape if size != 1] == [size for size in rows if size != 1]
