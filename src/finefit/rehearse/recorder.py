"""Records operations on fake tensors and their costs: each new storage is an allocation, and its finalizer is the free.

The place of an event is found without changes to the step: in forward by the called modules, in backward by the
sequence number of the autograd node, which identifies the module whose forward made the node, and in the update by the
tensors that an operation takes."""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from finefit.rehearse.cost_model import HOST_KINDS, INT8_MM, grouped_bytes, is_attention, operation_flops
from finefit.rehearse.fake_kernels import GROUPED_MM, DeviceKernels, run_kernel
from finefit.rehearse.trace import OUTSIDE, WORKSPACE, Block, Cost, Trace
from finefit.step.fused import FusedKernels

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_WITHOUT_KERNEL = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
P = ParamSpec("P")
R = TypeVar("R")
Place = tuple[str, int]
"""(module, layer)"""
NOWHERE: Place = ("", OUTSIDE)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kernels: DeviceKernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = "load"
        """`load`, `batch`, `step`, `reference`, `validation` or `generation`; see `_find_instant`."""
        self.last: tuple[str, str] = ("", "")
        """The current module and operation, for the error if an operation cannot be rehearsed."""
        self.entered: dict[str, bool] = {}
        """Called modules, and whether gradients were enabled in any call."""
        self._kernels = kernels
        self._alive: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """By storage: calls when it is freed."""
        self._unit_of: dict[int, int] = {}
        """Layer by storage: what the update computes from a tensor belongs to the tensor's layer."""
        self._stack: list[Place] = [NOWHERE]
        self._starts: list[int] = [0]
        self._places: list[Place] = [NOWHERE]
        """The place in which autograd nodes were made, indexed by their first sequence number."""
        self._with_workspace: set[str] = set()
        self._instant, self._unit = "load", OUTSIDE
        self._in_backward = self._in_backbone = False
        self.is_selective = False
        """Whether checkpointed layers keep some outputs, so that every operation in them passes through Python."""
        self._next_kind: str | None = None
        """The kind of the next operation, if it stands for something else."""
        self._node: object = None

    def watch(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        unit_of = {id(layer): at for at, layer in enumerate(layers)}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name, unit_of.get(id(module))))
            module.register_forward_hook(self._leave, always_call=True)

    def reading(self, read: Callable[P, R]) -> Callable[P, R]:
        """Wraps the backbone: what it executes is the forward; the head is part of the loss."""

        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            self._in_backbone = True
            try:
                return read(*args, **kwargs)
            finally:
                self._in_backbone = False

        return watched

    def _enter(self, name: str, unit: int | None, *_: object) -> None:
        self.entered[name] = self.entered.get(name, False) or torch.is_grad_enabled()
        # without a layer of its own: that of the caller, or in backward that of the recomputing node
        inherited = self._find_place(torch._C._current_autograd_node(), ())[1] if unit is None else unit
        self._stack.append((name, inherited))
        self._note_place()

    def _leave(self, *_: object) -> None:
        self._stack.pop()
        self._note_place()

    def _note_place(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._places.append(self._stack[-1])

    def _find_place(self, node: Any, args: tuple[Any, ...]) -> Place:
        if len(self._stack) > 1:
            return self._stack[-1]
        if node is None:
            return "", OUTSIDE if _is_list(args) else self._unit_of.get(_first_storage(args), self._stack[0][1])
        number = node._sequence_nr()
        if number > 1 << 62:  # a gradient is accumulated where it was made
            return "", self._unit
        return self._places[bisect_right(self._starts, number) - 1]

    def _find_instant(self, node: Any) -> str:
        if self.phase != "step":
            return self.phase
        if node is not None:
            self._in_backward = True
            return "backward"
        if len(self._stack) > 1:
            self._in_backward = False
        if self._in_backbone:
            return "forward"
        return "update" if self._in_backward else "loss"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # two of three calls: a fake tensor knows its device without torch's dispatcher
        node = torch._C._current_autograd_node()
        if node is not None and len(self._stack) == 1 and func is _ATEN.add.Tensor and _is_free(args[0]):
            func = _ATEN.add_.Tensor  # autograd sums gradients in place, except for fake tensors
        module, self._unit = self._find_place(node, args)
        self._instant = self._find_instant(node)
        self.last = (module, func.name())
        out = run_kernel(func, args, kwargs or {})
        leaves = list(_tensors((out,)))
        units = None
        if isinstance(out, list) and not module and _is_list(args):  # each output belongs where its input does
            units = [self._unit_of.get(tensor.untyped_storage()._cdata, OUTSIDE) for tensor in args[0]]
        is_new = False
        for at, leaf in enumerate(leaves):
            is_new |= self._born(leaf.untyped_storage(), module, self._unit if units is None else units[at])
        thread = "backward" if node is not None else "forward"
        if func in _PRODUCTS and thread not in self._with_workspace and self._kernels.workspace_bytes:
            # cuBLAS allocates this at a thread's first product, after the result, and keeps it
            self._with_workspace.add(thread)
            self.trace.allocate(Block(self._kernels.workspace_bytes, WORKSPACE, "", thread, OUTSIDE), OUTSIDE)
        sizes = self._kernels.hidden_bytes(func, args)
        hidden = [Block(size, self._instant, module, self.last[1], self._unit) for size in sizes]
        for ident in [self.trace.allocate(block, self._unit) for block in hidden]:
            self.trace.free(ident, self._unit, self._instant)
        self._count(func, args, kwargs or {}, out, leaves, is_new)
        return out

    def _born(self, storage: torch.UntypedStorage, module: str, unit: int) -> bool:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive or num_bytes == 0:
            return False
        ident = self.trace.allocate(Block(num_bytes, self._instant, module, self.last[1], unit), unit)
        self._alive[key], self._unit_of[key] = ident, unit
        self._watched[key] = weakref.ref(storage, lambda _: self._died(key, ident))
        return True

    def _died(self, key: int, ident: int) -> None:
        if self._alive.get(key) == ident:
            unit = self._unit_of.pop(key)
            del self._alive[key], self._watched[key]
            # the update proceeds from tensor to tensor; otherwise a free belongs to the layer being executed
            self.trace.free(ident, unit if self._instant == "update" else self._unit, self._instant)

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, leaves: list[Tensor], is_new: bool
    ) -> None:
        flops = operation_flops(func, args, kwargs, out)
        # a view, or memory that nothing writes yet
        is_idle = not flops and not func._schema.is_mutable and (not is_new or func._overloadpacket in _WITHOUT_KERNEL)
        self._dispatch(self._kind(func, is_idle=is_idle), self._unit, self._kernels.launches(func, args))
        if is_idle:
            return
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        if self._instant == "update" and lists:
            for tensors in zip(*lists, strict=False):
                unit = self._unit_of.get(_first_storage(tensors), OUTSIDE)
                self._add_cost(Cost(0, 2 * sum(t.nbytes for t in tensors), False), unit)
                self._dispatch("listed", unit)
            return
        given = list(_tensors(args))
        is_grouped = func is GROUPED_MM
        moved = grouped_bytes(args[0], args[1], leaves) if is_grouped else sum(t.nbytes for t in (*given, *leaves))
        is_half = func is INT8_MM or next((t.element_size() for t in given if t.is_floating_point()), 4) <= 2
        self._add_cost(Cost(flops, moved, is_half, is_attention(self.last[1])), self._unit)

    def _dispatch(self, kind: str, unit: int, count: int = 1) -> None:
        self.trace.operations.setdefault((self._instant, unit), Counter())[kind] += count

    def _kind(self, func: Any, *, is_idle: bool) -> str:
        """Returns the kind of an operation by what the host does for it; also counts autograd nodes in Python."""
        kind, self._next_kind = self._next_kind or HOST_KINDS.get(func), None
        node: object = torch._C._current_autograd_node()
        if node is not None and node is not self._node and isinstance(node, BackwardCFunction):
            self._dispatch("function", self._unit)
        self._node = node
        is_again = node is not None and len(self._stack) > 1
        if is_again and self.is_selective:
            self._dispatch("selective", self._unit)
        plain = "view" if is_idle else "kernel"
        return kind or (f"{plain} again" if is_again else f"{plain} back" if node is not None else plain)

    def launching(self, kernels: FusedKernels) -> FusedKernels:
        """Wraps fused kernels, so that the first operation that stands for one is counted as a Triton launch."""
        recorder = self

        class Launching:
            def __getattr__(self, name: str) -> Any:
                recorder._next_kind = "triton"
                return getattr(kernels, name)

        return cast("FusedKernels", Launching())

    def _add_cost(self, cost: Cost, unit: int) -> None:
        self.trace.costs.setdefault((self._instant, unit), Counter())[cost] += 1

    def finish(self) -> Trace:
        """Ends the recording: Python may free what is still alive at any time."""
        self._watched.clear()
        return self.trace

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Sets the category of tensors that their owner identifies: weights, gradients, optimizer state."""
        for tensor in tensors:
            ident = self._alive.get(tensor.untyped_storage()._cdata)
            if ident is not None:
                self.trace.categories[ident] = category

    def join(self, tensors: Iterable[Tensor], to: Tensor) -> None:
        """Assigns later operations on these to the layer of `to`: a step counter is not made from any other tensor."""
        unit = self._unit_of.get(to.untyped_storage()._cdata, OUTSIDE)
        self._unit_of |= {key: unit for tensor in tensors if (key := tensor.untyped_storage()._cdata) in self._unit_of}

    def place(self, unit: int) -> None:
        """Sets the layer of what is made outside any module."""
        self._stack[0] = ("", unit)
        self._unit = unit


def _is_free(tensor: Any) -> bool:
    """Returns whether only autograd's buffer holds the tensor: one use there, and one here."""
    return isinstance(tensor, Tensor) and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2


def _is_list(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], (list, tuple)) and any(isinstance(value, Tensor) for value in args[0])


def _first_storage(args: tuple[Any, ...]) -> int:
    first = next(_tensors(args), None)
    return -1 if first is None else first.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
