"""Whether layers are computed by fused kernels or by torch's own operations."""

from typing import Literal

from finefit.errors import SpecError
from finefit.plan.search import ASKED
from finefit.plan.target import Target
from finefit.rehearse.shard import Sharding
from finefit.spec.schema import Levers as AskedLevers


def decide_kernels(
    asked: AskedLevers, target: Target, sharding: Sharding, *, has_experts: bool
) -> tuple[Literal["torch", "fused"], str]:
    """Fused ones take weights as they lie, so these must be whole."""
    if asked.compile and has_experts:
        raise SpecError(
            "levers.compile: true is not for mixtures of experts: torch compiles their products by groups in bf16 alone, "
            "and there they were not held against layers as they are",
            "--set levers.compile=false",
        )
    if asked.kernels == "fused" and asked.compile:
        raise SpecError(
            "levers.kernels: fused and levers.compile: true contradict each other: layers are compiled as torch has them",
            "--set levers.kernels=torch, or --set levers.compile=false",
        )
    if asked.kernels != "auto":
        return asked.kernels, ASKED
    if asked.compile:
        return "torch", "the layers are compiled"
    if sharding in ("fsdp2", "zero3"):
        return "torch", "the weights are divided over the devices"
    if target.device == "cuda" and not target.has_liger:
        return "torch", "liger-kernel is not installed here: pip install 'finefit[gpu]'"
    return "fused", "the same numbers with fewer and larger operations"
