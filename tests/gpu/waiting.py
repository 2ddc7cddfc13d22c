"""Forbids the host to wait for a card."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """What waits within the block is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once that it does not notice every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
