"""The routers of a mixture: their initial weights before training, and the experts to which the tokens of each data set
are routed.

A token is first routed to the expert whose rows it resembles, by the hidden states of the base model. In every layer
this is Fisher's rule with a variance for each hidden value: the distance of a token from the mean of each expert's
tokens. What all tokens have in common, by far the largest part of a hidden state, favours no expert: it only carries
the constant that a router without a bias lacks. H hidden values, E experts, N tokens, K experts that answer each, L
layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import combinations, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finefit.artifacts.records import Routing, SourceRouting
from finefit.errors import DataError, ModelError
from finefit.model.experts import forward_hooks, record_routing, routers_of, top_k_of
from finefit.moe.build import EXPERT_NAMES

Row = tuple[int, ...]
_TOKENS = 1024
"""Tokens of rows in one pass, because the hidden states of all layers are in memory at once."""
_HELD_OUT = 4
"""One row in this many is held out, to measure the router."""
_MARGIN = 2.0
"""The median difference between the logits of the first and the second choice: 0.88 against 0.12 for two experts.
Choices are clear and still have a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Centroids:
    routers_EH: tuple[Tensor, ...]
    """The routers of each layer, in fp32."""
    own: dict[str, tuple[float, ...]]
    """The share of each expert's held-out tokens whose first choice it is, for each layer."""
    tokens: dict[str, int]
    """The number of tokens in each expert's mean."""
    held: dict[str, tuple[Row, ...]]
    """The number of held-out rows."""
    skipped: int
    """Tokens at the start of every row that were left out: a template's own words say nothing about an expert."""


def fit_centroids(model: nn.Module, rows: Mapping[str, Sequence[Row]]) -> Centroids:
    """`rows` are token ids by expert. They pass the dense model twice: for the means, and for the router's choices."""
    fitted, held = divided(rows)
    skipped = num_shared([row for several in rows.values() for row in several])
    look = partial(_hidden_states, model, skipped=skipped)
    means = {name: _moments(look(several)) for name, several in fitted.items()}
    raw = [_fisher([moments[layer] for moments in means.values()]) for layer in range(len(_mlps(model)))]
    scales = _scales(raw, [look(several) for several in fitted.values()])
    scaled = tuple(weight / scale for weight, scale in zip(raw, scales, strict=True))
    return Centroids(
        routers_EH=tuple(weight.float().cpu() for weight in scaled),
        own={name: _own_shares(scaled, look(several), at) for at, (name, several) in enumerate(held.items())},
        tokens={name: moments[0].tokens for name, moments in means.items()},
        held=held,
        skipped=skipped,
    )


def num_shared(rows: Sequence[Row]) -> int:
    """The number of tokens that all rows begin with; at least one token of the shortest row is left. If all rows are
    equal, nothing shows what the template wrote."""
    if len(set(rows)) < 2:
        return 0
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False))
    return min(sum(1 for _ in alike), min(map(len, rows)) - 1)


def divided(rows: Mapping[str, Sequence[Row]]) -> tuple[dict[str, tuple[Row, ...]], dict[str, tuple[Row, ...]]]:
    """The rows to fit and the held-out ones. Equal rows count once, so that none is in both."""
    fitted, held = {}, {}
    for name, several in rows.items():
        once = tuple(dict.fromkeys(several))
        if len(once) < 2:
            problem = f"expert {name} has {len(once)} different rows to start its router from, and one is held out"
            raise DataError(problem, "give it more rows")
        fitted[name] = tuple(row for at, row in enumerate(once) if (at + 1) % min(_HELD_OUT, len(once)))
        held[name] = tuple(row for at, row in enumerate(once) if not (at + 1) % min(_HELD_OUT, len(once)))
    _require_different(rows)
    _require_different(fitted)
    return fitted, held


def _require_different(rows: Mapping[str, Sequence[Row]]) -> None:
    """Refuses experts whose rows are the same, because their means do not differ: the router would be zero or rounding
    noise."""
    for one, other in combinations(rows, 2):
        if set(rows[one]) == set(rows[other]):
            problem = f"{one} and {other} have the same rows, so a router cannot tell one expert from the other by them"
            raise DataError(problem, f"give {other} rows of its own in router.data, or let the router start at random")


class _Moments(NamedTuple):
    """Sums in fp64."""

    tokens: int
    sum_H: Tensor
    squares_H: Tensor


def _moments(states: Iterator[list[Tensor]]) -> list[_Moments]:
    """The moments of each layer."""
    found: list[_Moments] = []
    for layers in states:
        new = [_Moments(len(h), h.double().sum(0), h.double().square().sum(0)) for h in layers]
        pairs = zip(found, new, strict=True) if found else ()
        found = [_Moments(a.tokens + b.tokens, a.sum_H + b.sum_H, a.squares_H + b.squares_H) for a, b in pairs] or new
    return found


def _fisher(experts: Sequence[_Moments]) -> Tensor:
    """Scores w_e h + c_e, the largest for the nearest mean, in units of the variance around the means. A router has no
    constant: c_e is carried by the direction in which all tokens are most nearly one."""
    means_EH = torch.stack([moments.sum_H / moments.tokens for moments in experts])
    squares_EH = torch.stack([moments.squares_H / moments.tokens for moments in experts])
    within_H = (squares_EH - means_EH.square()).clamp(min=0).mean(0)
    within_H = within_H + 0.1 * within_H.mean() + 1e-12  # little variance in few rows proves nothing
    centre_H = means_EH.mean(0)
    apart_EH = means_EH - centre_H
    weight_EH = apart_EH / within_H
    constant_E = -(weight_EH @ centre_H) - 0.5 * (weight_EH * apart_EH).sum(1)
    one_H = (centre_H / within_H) / (1 + (centre_H.square() / within_H).sum())
    return weight_EH + constant_E[:, None] * one_H


def _scales(raw: Sequence[Tensor], fitted: Sequence[Iterator[list[Tensor]]]) -> list[float]:
    """Scale factors that give each layer the target median margin."""
    margins: list[list[Tensor]] = [[] for _ in raw]
    for states in fitted:
        for layers in states:
            for seen, weight, hidden in zip(margins, raw, layers, strict=True):
                first, second = (hidden.double() @ weight.T).topk(2, dim=1).values.unbind(1)
                seen.append(first - second)
    medians = [float(torch.cat(seen).median()) for seen in margins]
    return [median / _MARGIN if median > 0 else 1.0 for median in medians]


def _own_shares(routers: Sequence[Tensor], states: Iterator[list[Tensor]], own: int) -> tuple[float, ...]:
    right, tokens = torch.zeros(len(routers), dtype=torch.float64), 0
    for layers in states:
        right += torch.tensor(
            [float(((h.double() @ w.T).argmax(1) == own).sum()) for h, w in zip(layers, routers, strict=True)],
            dtype=torch.float64,
        )
        tokens += len(layers[0])
    return tuple((right / tokens).tolist())


def _hidden_states(model: nn.Module, rows: Sequence[Row], *, skipped: int) -> Iterator[list[Tensor]]:
    """The input of every layer's MLP for a batch of rows, tokens x hidden, without the first `skipped` tokens of each
    row."""
    device, states = next(model.parameters()).device, list[Tensor]()

    def note(_: nn.Module, inputs: tuple[Any, ...], __: Any) -> None:
        states.append(inputs[0].detach())

    for several in _together(rows):
        width = max(map(len, several))
        # padding comes last, so no token sees it
        padded = torch.tensor([(*row, *(0,) * (width - len(row))) for row in several], device=device)
        states.clear()
        with torch.no_grad(), forward_hooks(_mlps(model), note):
            model.base_model(input_ids=padded, use_cache=False)  # type: ignore[operator]
        yield [torch.cat([state[at, skipped : len(row)] for at, row in enumerate(several)]) for state in states]


def _together(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Groups of rows up to a number of tokens, padding included."""
    several: list[Row] = []
    for row in rows:
        if several and (len(several) + 1) * max(map(len, (*several, row))) > _TOKENS:
            yield several
            several = []
        several.append(row)
    yield several


def _mlps(model: nn.Module) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not found:
        problem = f"{type(model).__name__} has no known MLPs"
        raise ModelError(problem, "take a dense base of the llama, mistral, qwen2 or qwen3 family")
    return found


def measure_routing(model: nn.Module, rows: Mapping[str, Sequence[Sequence[int]]], *, skipped: int = 0) -> Routing:
    """`rows` are token ids by data set. The first `skipped` tokens of every row are not counted. The model runs row by
    row and is not changed."""
    routers = list(routers_of(model).values())
    num_experts = int(routers[0].num_experts)  # type: ignore[arg-type]
    names = tuple(getattr(model.config, EXPERT_NAMES, None) or map(str, range(num_experts)))
    device, was_training, sources = next(model.parameters()).device, model.training, {}
    model.eval()
    for name, several in ((name, several) for name, several in rows.items() if several):
        first_LE = weight_LE = torch.zeros((), dtype=torch.float64)
        for row in several:
            with torch.no_grad(), record_routing(routers) as said:
                model.base_model(input_ids=torch.tensor([list(row)], device=device), use_cache=False)  # type: ignore[operator]
            chosen = [routed.chosen_NK[skipped:].cpu() for routed in said]
            weights = [routed.weights_NK[skipped:].double().cpu().flatten() for routed in said]
            first_LE = first_LE + torch.stack([torch.bincount(c_NK[:, 0], minlength=len(names)) for c_NK in chosen])
            weight_LE = weight_LE + torch.stack(
                [torch.bincount(c.flatten(), w, minlength=len(names)) for c, w in zip(chosen, weights, strict=True)]
            )
        tokens = sum(len(row) - skipped for row in several)
        first, weight = _shares(first_LE), _shares(weight_LE)
        sources[name] = SourceRouting(rows=len(several), tokens=tokens, first=first, weight=weight)
    model.train(was_training)
    return Routing(experts=names, top_k=top_k_of(routers[0]), sources=sources)


def _shares(counts_LE: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(value), 6) for value in layer / layer.sum()) for layer in counts_LE)


def own_share(found: Routing) -> dict[str, tuple[float, ...]]:
    """For each data set named like an expert, how often that expert is the first choice, by layer."""
    at = {name: found.experts.index(name) for name in found.sources if name in found.experts}
    return {name: tuple(layer[column] for layer in found.sources[name].first) for name, column in at.items()}


def routing_map(found: Routing) -> str:
    """An SVG with a block for each data set, a row for each layer and a column for each expert; a darker cell has more
    weight."""
    cell, wide, margin, top = 16, 32, 48, 56
    pitch = max(len(found.experts) * wide, 96) + 24
    layers = max(len(source.weight) for source in found.sources.values())
    parts = [_text(margin - 6, top - 6, "layer", "end")]
    parts += [_text(margin - 6, top + layer * cell + 12, str(layer), "end") for layer in range(layers)]
    for at, (name, source) in enumerate(found.sources.items()):
        lefts = [margin + at * pitch + column * wide for column in range(len(found.experts))]
        parts.append(_text(lefts[0], top - 26, f"{name} ({source.tokens} tokens)", "start"))
        parts += [_text(left, top - 6, expert[:5], "start") for left, expert in zip(lefts, found.experts, strict=True)]
        for layer, shares in enumerate(source.weight):
            for left, expert, share in zip(lefts, found.experts, shares, strict=True):
                shade = "".join(f"{round(255 - share * (255 - dark)):02x}" for dark in (8, 48, 107))
                parts.append(
                    f'<rect x="{left}" y="{top + layer * cell}" width="{wide - 1}" height="{cell - 1}" fill="#{shade}" '
                    f'stroke="#ccc"><title>{escape(name)}, layer {layer}, {escape(expert)}: {share:.1%}</title></rect>'
                )
    width, height = max(margin + len(found.sources) * pitch, 360), top + layers * cell + 24
    note = _text(margin, height - 6, "weight of each expert, by data set and layer: white 0, dark 1", "start")
    style = '<style>text{font:10px sans-serif;fill:#222}</style><rect width="100%" height="100%" fill="#fff"/>'
    size = f'width="{width}" height="{height}" role="img" aria-label="routing by layer"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, *parts, note, "</svg>", ""])


def _text(x: int, y: int, words: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
