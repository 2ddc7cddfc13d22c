"""Which module makes a stage of which kind. Each is imported only where it is needed: some bring torch."""

from pathlib import Path
from typing import Any, Literal, Protocol

from finefit.artifacts.pipelines import Order

Kind = Literal["compare", "make_pairs", "merge_adapter", "build_moe", "gate", "python"]


class Maker(Protocol):
    def make(self, order: Order, out: Path) -> dict[str, Any]:
        """Fills `out`; returns what there is to tell."""

    def lines(self, summary: dict[str, Any]) -> list[str]:
        """That, in words."""


def maker_of(kind: Kind) -> Maker:
    match kind:
        case "python":
            from finefit.pipeline.making import python

            return python
        case "make_pairs":
            from finefit.pipeline.making import make_pairs

            return make_pairs
        case "merge_adapter":
            from finefit.pipeline.making import merge_adapter

            return merge_adapter
        case "build_moe":
            from finefit.pipeline.making import build_moe

            return build_moe
        case "gate":
            from finefit.pipeline.making import gate

            return gate
        case "compare":
            from finefit.pipeline.making import compare

            return compare


def lines_of(kind: str, summary: dict[str, Any]) -> list[str]:
    """What a finished stage that is no training tells of itself."""
    if not summary:
        return []
    if kind == "evaluate":
        from finefit.pipeline.making import evaluate

        return evaluate.lines(summary)
    match kind:
        case "compare" | "make_pairs" | "merge_adapter" | "build_moe" | "gate" | "python":
            return maker_of(kind).lines(summary)
    return []
