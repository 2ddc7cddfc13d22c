"""The routers of a mixture of experts, and what they say while the model runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from finefit.objective.router import Routed


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name, in the order of the layers. A router is known by what it holds: a row of weights for each expert, and how many of them answer."""
    return {name: module for name, module in model.named_modules() if _is_router(module)}


def _is_router(module: nn.Module) -> bool:
    weight, num_experts = getattr(module, "weight", None), getattr(module, "num_experts", None)
    if not isinstance(weight, Tensor) or not isinstance(getattr(module, "top_k", None), int):
        return False
    shape: tuple[int, ...] = tuple(
        getattr(weight, "ds_shape", weight.shape)
    )  # DeepSpeed leaves an empty tensor in the place of one that it divides
    return len(shape) == 2 and shape[0] == num_experts


def top_k_of(router: nn.Module) -> int:
    top_k = router.top_k
    assert isinstance(top_k, int)
    return top_k


def is_normalised(router: nn.Module) -> bool:
    """Whether the weights of the experts that answer sum to one; so it is where a router has no switch for it."""
    return bool(getattr(router, "norm_topk_prob", True))


@contextmanager
def heard(routers: Iterable[nn.Module]) -> Iterator[list[Routed]]:
    """What the routers say within the block, in the order in which they are called. A layer that backward computes again is called after the block,
    and not heard twice."""
    found: list[Routed] = []

    def note(_: nn.Module, __: Any, answer: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(Routed(*answer))

    with hooked(routers, note):
        yield found


@contextmanager
def hooked(routers: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
