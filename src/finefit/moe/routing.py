"""Which experts the tokens of each data set go to, layer by layer: measured in the model, and drawn as an SVG.

N tokens, K experts that answer each, E experts.
"""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal, overload

import torch
from torch import Tensor, nn

from finefit.artifacts.records import Routing, SourceRouting
from finefit.model.experts import record_routing, routers_of, top_k_of
from finefit.moe.build import EXPERT_NAMES
from finefit.objective.losses import Routed

_CELL, _LEFT, _TOP = 16, 48, 56


def measure_routing(model: nn.Module, rows: Mapping[str, Sequence[Sequence[int]]], *, skipped: int = 0) -> Routing:
    """`rows`: token ids by data set. `skipped`: tokens at the start of every row that are not counted. The model runs
    row by row and is not changed."""
    routers = list(routers_of(model).values())
    num_experts = int(routers[0].num_experts)  # type: ignore[arg-type]
    names = tuple(getattr(model.config, EXPERT_NAMES, None) or map(str, range(num_experts)))
    sources = {name: _source(model, several, len(names), skipped) for name, several in rows.items() if several}
    return Routing(experts=names, top_k=top_k_of(routers[0]), sources=sources)


def _source(model: nn.Module, rows: Sequence[Sequence[int]], num_experts: int, skipped: int) -> SourceRouting:
    routers, counts, tokens = list(routers_of(model).values()), None, 0
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    for row in rows:
        with torch.no_grad(), record_routing(routers) as said:
            model.base_model(input_ids=torch.tensor([list(row)], device=device), use_cache=False)  # type: ignore[operator]
        here = torch.stack([_counted(routed, num_experts, skipped) for routed in said])
        counts, tokens = (here if counts is None else counts + here), tokens + len(row) - skipped
    model.train(was_training)
    assert counts is not None
    return SourceRouting(rows=len(rows), tokens=tokens, first=_shares(counts[:, 0]), weight=_shares(counts[:, 1]))


def _counted(routed: Routed, num_experts: int, skipped: int) -> Tensor:
    """First choices and weights by expert in one layer, in fp64."""
    chosen_NK, weights_NK = routed.chosen_NK[skipped:].cpu(), routed.weights_NK[skipped:].double().cpu()
    first_E = torch.bincount(chosen_NK[:, 0], minlength=num_experts).double()
    weight_E = torch.bincount(chosen_NK.flatten(), weights_NK.flatten(), minlength=num_experts)
    return torch.stack([first_E, weight_E])


def _shares(counts_LE: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(value), 6) for value in layer / layer.sum()) for layer in counts_LE)


@overload
def own_share(found: Routing, *, by_layer: Literal[False] = False) -> dict[str, float]: ...
@overload
def own_share(found: Routing, *, by_layer: Literal[True]) -> dict[str, tuple[float, ...]]: ...
def own_share(found: Routing, *, by_layer: bool = False) -> dict[str, float] | dict[str, tuple[float, ...]]:
    """For data sets with the name of an expert: how often that expert is the first choice."""
    at = {name: found.experts.index(name) for name in found.sources if name in found.experts}
    layers = {name: tuple(layer[column] for layer in found.sources[name].first) for name, column in at.items()}
    return layers if by_layer else {name: statistics.fmean(shares) for name, shares in layers.items()}


def routing_map(found: Routing) -> str:
    """An SVG: a block for each data set, a row for each layer, a column for each expert; darker cells have more
    weight."""
    blocks = [_block(name, source, found.experts, at) for at, (name, source) in enumerate(found.sources.items())]
    layers = max(len(source.weight) for source in found.sources.values())
    labels = [_text(_LEFT - 6, _TOP + layer * _CELL + 12, str(layer), "end") for layer in range(layers)]
    width, height = _LEFT + len(blocks) * _pitch(found.experts), _TOP + layers * _CELL + 24
    parts = [_text(_LEFT - 6, _TOP - 6, "layer", "end"), *labels, *(part for block in blocks for part in block)]
    note = _text(_LEFT, height - 6, "weight of each expert, by data set and layer: white 0, dark 1", "start")
    style = '<style>text{font:10px sans-serif;fill:#222}</style><rect width="100%" height="100%" fill="#fff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 360)}" height="{height}" role="img" aria-label="routing by layer">'  # noqa: E501
    return "\n".join([head, style, *parts, note, "</svg>", ""])


def _pitch(experts: Sequence[str]) -> int:
    return max(len(experts) * 2 * _CELL, 96) + 24


def _block(name: str, source: SourceRouting, experts: Sequence[str], at: int) -> list[str]:
    left, wide = _LEFT + at * _pitch(experts), 2 * _CELL
    heads = [_text(left + column * wide, _TOP - 6, expert[:5], "start") for column, expert in enumerate(experts)]
    cells = [
        f'<rect x="{left + column * wide}" y="{_TOP + layer * _CELL}" width="{wide - 1}" height="{_CELL - 1}" fill="{_shade(share)}" stroke="#ccc">'  # noqa: E501
        f"<title>{escape(name)}, layer {layer}, {escape(experts[column])}: {share:.1%}</title></rect>"
        for layer, shares in enumerate(source.weight)
        for column, share in enumerate(shares)
    ]
    return [_text(left, _TOP - 26, f"{name} ({source.tokens} tokens)", "start"), *heads, *cells]


def _shade(share: float) -> str:
    red, green, blue = (round(255 - share * (255 - dark)) for dark in (8, 48, 107))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _text(x: int, y: int, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
