"""Remembers what operations on fake tensors return, by the operation and the metadata of its arguments.

A rehearsal repeats the same few hundred operations in every layer, pass and candidate. Torch's fake tensors remember
their results too, but each lookup there takes most of a rehearsal's time. A result is remembered only if the arguments'
metadata determine it: new tensors, views of arguments, and arguments themselves. Everything else is computed by torch
every time, as is every first call."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Any, ...]
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of arguments that describe themselves."""
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Operations whose results, or whose effects on their arguments, need more than metadata."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A result that is one of the arguments."""

    argument: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A result that is a new tensor, or a view of an argument."""

    argument: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    attributes: dict[str, Any]
    """What torch notes on a fake tensor, except its mode."""


_Result = _Written | _Made | None
_Results = _Result | list[_Result] | tuple[_Result, ...]
_known: dict[Key, tuple[bool, _Results]] = {}
"""(whether the arguments determine the result, the result), for the lifetime of the process: keys are exhaustive."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what `func(*args, **kwargs)` returns under the fake tensor mode that is active."""
    tensors: list[FakeTensor] = []
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not (_describe(args, parts, tensors) and (not kwargs or _describe(kwargs.items(), parts, tensors))):
        return func(*args, **kwargs)
    key = tuple(parts)
    is_determined, results = _known.get(key, (False, None))
    if is_determined:
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        with torch._C._DisableTorchDispatch():
            if isinstance(results, (list, tuple)):
                return type(results)([_make(result, tensors, mode) for result in results])
            return _make(results, tensors, mode)
    out = func(*args, **kwargs)
    if key not in _known:
        _known[key] = _described_results(func, out, tensors)
    return out


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
    """Adds what distinguishes the values to `parts`, and their tensors to `tensors`. Returns whether that is all that
    matters about them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            is_odd = value.dtype.is_complex or value.is_neg() or value.layout is not torch.strided
            if value.constant is not None or is_odd:
                return False
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset(), value._fake_device)
            tensors.append(value)
        elif kind in _VALUES:
            parts += (kind, value)  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _describe(value, parts, tensors):
                return False
        else:
            return False
    return True


def _described_results(func: Any, out: Any, tensors: Sequence[FakeTensor]) -> tuple[bool, _Results]:
    resizes = any(argument.is_out for argument in func._schema.arguments)
    if resizes or not _UNKNOWN.isdisjoint(func.tags) or not is_builtin(func):
        return False, None
    if not isinstance(out, (list, tuple)):
        return _described_result(out, tensors)
    found = [_described_result(leaf, tensors) for leaf in out]
    new = [leaf for leaf, (_, one) in zip(out, found, strict=True) if isinstance(one, _Made) and one.argument is None]
    shares_nothing = len({leaf.untyped_storage()._cdata for leaf in new}) == len(new)
    is_determined = type(out) in (list, tuple) and shares_nothing and all(is_known for is_known, _ in found)
    return is_determined, type(out)(one for _, one in found) if is_determined else None


def _described_result(leaf: Any, tensors: Sequence[FakeTensor]) -> tuple[bool, _Result]:
    if leaf is None:
        return True, None
    for number, tensor in enumerate(tensors):
        if leaf is tensor:
            return True, _Written(number)
    if not isinstance(leaf, FakeTensor) or not _describe([leaf], [], []) or leaf.requires_grad:
        return False, None
    storage = leaf.untyped_storage()
    made = _Made(
        argument=next((at for at, one in enumerate(tensors) if one.untyped_storage()._cdata == storage._cdata), None),
        dtype=leaf.dtype,
        shape=tuple(leaf.shape),
        stride=leaf.stride(),
        offset=int(leaf.storage_offset()),
        device=leaf.fake_device,
        attributes={name: value for name, value in vars(leaf).items() if name != "fake_mode"},
    )
    with torch._C._DisableTorchDispatch():
        again = _make(made, tensors, leaf.fake_mode)
        is_same = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(leaf)
        return is_same and again.untyped_storage().nbytes() == storage.nbytes(), made


def _make(result: _Result, tensors: Sequence[FakeTensor], mode: FakeTensorMode) -> Any:
    """Must not be called under a fake tensor mode."""
    if result is None:
        return None
    if isinstance(result, _Written):
        return tensors[result.argument]
    if result.argument is None:
        bare = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    else:
        bare = torch.empty(0, dtype=result.dtype, device="meta")
        bare.set_(tensors[result.argument].untyped_storage(), result.offset, result.shape, result.stride)
    made = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=result.device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    vars(made).update(result.attributes, fake_mode=mode)
    return made
