"""Layer inputs wait in pinned host memory between forward and backward; the copies run beside the computation.

One tensor is on its way out while the next layer computes, and one is on its way back while the layer after it does. Both directions wait for
events and never for the host. Layers come back in the opposite order of their going.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Store(Protocol):
    """Where a layer's input waits between forward and backward."""

    def put(self, tensor: Tensor) -> Callable[[], Tensor]: ...


class _Waiting:
    """One input, out of the device. It belongs to the graph that will ask for it: with that graph it goes."""

    def __init__(self, held: Tensor, like: Tensor, give_back: Callable[[Tensor], None]) -> None:
        self.held, self.shape, self.dtype, self.device = held, like.shape, like.dtype, like.device
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        weakref.finalize(self, give_back, held)


class PinnedMemory:
    """Buffers are kept for the next step: pinning costs more than copying."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._free: list[Tensor] = []
        self._waiting: list[weakref.ref[_Waiting]] = []
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        held = self._buffer(tensor)
        self._copy_out(tensor, held)
        waiting = _Waiting(held, tensor, self._give_back)
        self._waiting.append(weakref.ref(waiting))
        return lambda: self._fetch(waiting)

    def _copy_out(self, tensor: Tensor, held: Tensor) -> None:
        flat = tensor.flatten().view(torch.uint8)
        if not tensor.is_cuda:
            held[: len(flat)].copy_(flat)
            return
        stream, now = self._stream(tensor.device), torch.cuda.current_stream(tensor.device)
        self._let_leave(now)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            held[: len(flat)].copy_(flat, non_blocking=True)
            left = stream.record_event()
        self._leaving = (tensor, left)  # so long its memory must not be given to another

    def _let_leave(self, now: torch.cuda.Stream) -> None:
        if self._leaving is not None:
            now.wait_event(self._leaving[1])
            self._leaving = None

    def _fetch(self, waiting: _Waiting) -> Tensor:
        if waiting.coming is None:
            self._call_back(waiting)
        assert waiting.coming is not None
        tensor, arrived = waiting.coming
        waiting.coming = None
        if arrived is not None:
            torch.cuda.current_stream(waiting.device).wait_event(arrived)
        self._call_next()
        return tensor

    def _call_next(self) -> None:
        """What is asked for next is what went before."""
        while self._waiting:
            following = self._waiting.pop()()
            if following is not None and following.coming is None:
                self._call_back(following)
                return

    def _call_back(self, waiting: _Waiting) -> None:
        if self._waiting and self._waiting[-1]() is waiting:
            self._waiting.pop()
        tensor = torch.empty(waiting.shape, dtype=waiting.dtype, device=waiting.device)
        flat = tensor.view(-1).view(torch.uint8)
        if not tensor.is_cuda:
            flat.copy_(waiting.held[: len(flat)])
            waiting.coming = (tensor, None)
            return
        stream, now = self._stream(waiting.device), torch.cuda.current_stream(waiting.device)
        self._let_leave(now)
        stream.wait_stream(now)  # whoever had this memory before is done with it
        with torch.cuda.stream(stream):
            flat.copy_(waiting.held[: len(flat)], non_blocking=True)
            waiting.coming = (tensor, stream.record_event())

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _buffer(self, tensor: Tensor) -> Tensor:
        """The smallest that is large enough; else one takes the place of the largest that is not, so that no more are ever held than a step needs."""
        num_bytes = tensor.numel() * tensor.element_size()
        large = [at for at, held in enumerate(self._free) if held.numel() >= num_bytes]
        if large:
            return self._free.pop(min(large, key=lambda at: self._free[at].numel()))
        if self._free:
            self._free.pop(max(range(len(self._free)), key=lambda at: self._free[at].numel()))
        return _pinned(num_bytes, is_pinned=tensor.is_cuda)

    def _give_back(self, held: Tensor) -> None:
        self._free.append(held)


def _pinned(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Exactly so many bytes; torch's own pinned memory comes in powers of two."""
    held = torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned:
        code = torch.cuda.cudart().cudaHostRegister(held.data_ptr(), num_bytes, 0)  # type: ignore[no-untyped-call]
        if int(code) != 0:
            raise torch.OutOfMemoryError(
                f"{num_bytes:,} bytes of host memory could not be pinned (CUDA error {int(code)})"
            )
        weakref.finalize(held, _unpin, held.data_ptr())
    return held


def _unpin(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
