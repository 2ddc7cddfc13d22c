"""Memory is predicted for segments that grow, as a worker has them."""

import os

import pytest

from finefit.artifacts.processes import allocator_setting

expandable_alone = pytest.mark.skipif(
    "expandable_segments:True" not in (allocator_setting(os.environ) or ""),
    reason="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is not set",
)
