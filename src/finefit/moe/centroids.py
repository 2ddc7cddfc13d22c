"""The initial weights of an untrained router: a token goes to the expert whose rows it resembles, by the hidden states
of the base model.

In every layer, Fisher's rule with a variance for each hidden value: the distance of a token from the mean of each
expert's tokens. What all tokens have in common, by far the largest part of a hidden state, favours no expert: it only
carries the constant that a router without a bias lacks. H hidden values, E experts, N tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from finefit.errors import DataError, ModelError

Row = tuple[int, ...]
_TOKENS = 1024
"""Of rows in one pass: the hidden states of all layers are in memory at once."""
_HELD_OUT = 4
"""One row in so many is held out, to measure the router."""
_MARGIN = 2.0
"""Between the logits of the first and the second choice at the median: 0.88 against 0.12 for two experts. Decided, and
still with a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Centroids:
    routers_EH: tuple[Tensor, ...]
    """By layer, in fp32."""
    own: dict[str, tuple[float, ...]]
    """By layer, the share of each expert's held-out tokens whose first choice it is."""
    tokens: dict[str, int]
    """Of each expert, in its mean."""
    held: dict[str, tuple[Row, ...]]
    """The held-out rows."""
    skipped: int
    """Tokens at the start of every row that were left out: the template's own words say nothing of an expert."""


def fit_centroids(model: nn.Module, rows: Mapping[str, Sequence[Row]]) -> Centroids:
    """`rows`: token ids of each expert's rows. They pass through the dense model twice: for the means, and for the
    router's choices."""
    fitted, held = divided(rows)
    skipped = num_shared([row for several in rows.values() for row in several])
    look = partial(_hidden_states, model, skipped=skipped)
    means = {name: _moments(look(several)) for name, several in fitted.items()}
    raw = [_fisher([moments[layer] for moments in means.values()]) for layer in range(len(_mlps(model)))]
    scaled = tuple(
        weight / scale
        for weight, scale in zip(raw, _scales(raw, [look(several) for several in fitted.values()]), strict=True)
    )
    own = {name: _own_shares(scaled, look(several), at) for at, (name, several) in enumerate(held.items())}
    return Centroids(
        routers_EH=tuple(weight.float().cpu() for weight in scaled),
        own=own,
        tokens={name: moments[0].count for name, moments in means.items()},
        held=held,
        skipped=skipped,
    )


def num_shared(rows: Sequence[Row]) -> int:
    """Tokens that all rows begin with; at least one of the shortest row is left. Where all rows are equal, nothing
    shows what the template wrote."""
    if len(set(rows)) < 2:
        return 0
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False))
    return min(sum(1 for _ in alike), min(map(len, rows)) - 1)


def divided(rows: Mapping[str, Sequence[Row]]) -> tuple[dict[str, tuple[Row, ...]], dict[str, tuple[Row, ...]]]:
    """The rows to fit and those held out. Equal rows count once, so that none is in both."""
    fitted, held = {}, {}
    for name, several in rows.items():
        once = tuple(dict.fromkeys(several))
        if len(once) < 2:
            raise DataError(
                f"expert {name} has {len(once)} different rows to start its router from, and one is held out",
                "give it more rows",
            )
        fitted[name] = tuple(row for at, row in enumerate(once) if (at + 1) % min(_HELD_OUT, len(once)))
        held[name] = tuple(row for at, row in enumerate(once) if not (at + 1) % min(_HELD_OUT, len(once)))
    _require_different(rows)
    _require_different(fitted)
    return fitted, held


def _require_different(rows: Mapping[str, Sequence[Row]]) -> None:
    """Means of the same rows do not differ: the router would be zero, or rounding noise."""
    for one, other in combinations(rows, 2):
        if set(rows[one]) == set(rows[other]):
            raise DataError(
                f"{one} and {other} have the same rows, so a router cannot tell one expert from the other by them",
                f"give {other} rows of its own in router.data, or let the router start at random",
            )


@dataclass(frozen=True, slots=True)
class _Moments:
    """Of tokens, in fp64."""

    count: int
    sum_H: Tensor
    squares_H: Tensor

    def mean(self) -> Tensor:
        return self.sum_H / self.count

    def variance(self) -> Tensor:
        return (self.squares_H / self.count - self.mean().square()).clamp(min=0)


def _moments(states: Iterator[list[Tensor]]) -> list[_Moments]:
    """By layer."""
    found: list[_Moments] = []
    for layers in states:
        new = [_Moments(len(h), h.double().sum(0), h.double().square().sum(0)) for h in layers]
        found = (
            [
                _Moments(a.count + b.count, a.sum_H + b.sum_H, a.squares_H + b.squares_H)
                for a, b in zip(found, new, strict=True)
            ]
            if found
            else new
        )
    return found


def _fisher(experts: Sequence[_Moments]) -> Tensor:
    """Scores w_e h + c_e, the largest for the nearest mean, in units of the variance around the means. A router has no
    constant: c_e is carried by the direction in which all tokens are most nearly one."""
    means_EH = torch.stack([moments.mean() for moments in experts])
    within_H = torch.stack([moments.variance() for moments in experts]).mean(0)
    within_H = within_H + 0.1 * within_H.mean() + 1e-12  # little variance in few rows proves nothing
    centre_H = means_EH.mean(0)
    apart_EH = means_EH - centre_H
    weight_EH = apart_EH / within_H
    constant_E = -(weight_EH @ centre_H) - 0.5 * (weight_EH * apart_EH).sum(1)
    one_H = (centre_H / within_H) / (1 + (centre_H.square() / within_H).sum())
    return weight_EH + constant_E[:, None] * one_H


def _scales(raw: Sequence[Tensor], fitted: Sequence[Iterator[list[Tensor]]]) -> list[float]:
    """Make a layer's choices decided and not final."""
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
    """The input of every layer's MLP for some rows at a time, tokens x hidden, without the first `skipped` tokens of
    each row."""
    device = next(model.parameters()).device
    for several in _together(rows):
        width = max(map(len, several))
        # padding comes last, so no token sees it
        padded = torch.tensor([(*row, *(0,) * (width - len(row))) for row in several], device=device)
        with torch.no_grad(), _caught(_mlps(model)) as states:
            model.base_model(input_ids=padded, use_cache=False)  # type: ignore[operator]
        yield [torch.cat([state[at, skipped : len(row)] for at, row in enumerate(several)]) for state in states]


def _together(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Groups of rows within a number of tokens, padding included."""
    several: list[Row] = []
    for row in rows:
        if several and (len(several) + 1) * max(map(len, (*several, row))) > _TOKENS:
            yield several
            several = []
        several.append(row)
    yield several


@contextmanager
def _caught(mlps: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    states: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        states.append(inputs[0].detach())

    handles = [mlp.register_forward_pre_hook(note) for mlp in mlps]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _mlps(model: nn.Module) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no known MLPs",
            "take a dense base of the llama, mistral, qwen2 or qwen3 family",
        )
    return found
