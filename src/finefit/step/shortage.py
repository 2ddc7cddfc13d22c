"""What running out of memory looks like, whoever says it: torch's allocator, a library that asks past it, or the host."""

import torch

_SAYINGS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")


def is_shortage(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(saying in str(error) for saying in _SAYINGS)
