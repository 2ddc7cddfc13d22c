"""The tensors of a dense model's folder, by their names in its files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from finefit.errors import ModelError
from finefit.facts.model import COMPUTED, find_weight_files, read_config
from finefit.model.alike import resolved

_HEAD = "lm_head.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """The tensors of a model folder, read one at a time. A head that its config ties to the embeddings is none of its own, whether it is stored or
    not; nor is what every model computes for itself."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._file_of: dict[str, Any] = {}
        for name in find_weight_files(folder):
            file = stack.enter_context(safe_open(folder / name, framework="pt"))
            self._file_of |= {key: file for key in file.keys() if not key.endswith(COMPUTED)}  # noqa: SIM118 it is no dict
        if resolved(read_config(folder)).get("tie_word_embeddings"):
            self._file_of.pop(_HEAD, None)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self._file_of[name].get_slice(name).get_shape()
        return shape

    def dtypes(self) -> set[torch.dtype]:
        found = {name: self._file_of[name].get_slice(name).get_dtype() for name in self._file_of}
        if odd := sorted(name for name, dtype in found.items() if dtype not in _DTYPES):
            raise ModelError(
                f"{odd[0]} is stored as {found[odd[0]]}, which cannot be mixed or averaged",
                "take weights in fp32, fp16 or bf16",
            )
        return {_DTYPES[dtype] for dtype in found.values()}


def is_rounded(found: Tensor, exact: Tensor) -> bool:
    """Whether it is the same tensor, but for what it is stored in: an adapter may be merged into fewer bits than its base has."""
    return torch.equal(found, exact.to(found.dtype))
