"""A declared part of a model's own weights is trained, all else is frozen.

A pattern matches a module whose dotted name ends with it, part by part; `*` stands for one part. `layers.*.mlp` is the MLP of every layer with
everything in it, `layers.0.mlp` that of the first, `norm` every module of that name. Of a model that sees, the name of a tower is that tower.
What stands in for the shared expert of a mixture that has none lies in every `mlp` and is never trained.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar, get_args

import torch
from torch import nn

from finefit.errors import ModelError
from finefit.model.experts import stand_ins_in
from finefit.model.sight import sight_in, tower_of
from finefit.model.sight.unused import is_among, unused_in
from finefit.spec.models import Tower

M = TypeVar("M", bound=nn.Module)
_SHOWN = 24


def train_only(model: M, patterns: Sequence[str]) -> M:
    """Trained weights are kept in fp32, where small updates are not lost; frozen ones stay as they were loaded. Autocast brings them together."""
    chosen = {name for pattern in patterns for name in _chosen(model, pattern)}
    _require_untied(model, chosen)
    unmoved = stand_ins_in(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_inside(name, chosen) and not is_among(name, unmoved))
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return model


def _chosen(model: nn.Module, pattern: str) -> set[str]:
    """Names of modules, or where a tower is meant of its parameters: one tower may lie inside another."""
    sight = sight_in(model)
    if sight is None or pattern not in get_args(Tower):
        return _matched(model, pattern)
    unused, names = unused_in(model, sight), (name for name, _ in model.named_parameters(remove_duplicate=False))
    return {name for name in names if tower_of(sight, name) == pattern and not is_among(name, unused)}


def _matched(model: nn.Module, pattern: str) -> set[str]:
    wanted, unmoved = pattern.split("."), stand_ins_in(model)
    found = {name for name, _ in model.named_modules() if name and _ends_with(name.split("."), wanted)}
    weighty = {
        name
        for name in found
        if any(True for _ in model.get_submodule(name).parameters()) and not is_among(name, unmoved)
    }
    if not weighty:
        what = "only modules without weights that could learn" if found else "no module of the model"
        raise ModelError(f"tuning.trainable: {pattern} matches {what}", f"its modules are {', '.join(_kinds(model))}")
    return weighty


def _ends_with(parts: list[str], wanted: list[str]) -> bool:
    end = parts[-len(wanted) :]
    return len(end) == len(wanted) and all(theirs in ("*", ours) for ours, theirs in zip(end, wanted, strict=True))


def _kinds(model: nn.Module) -> Iterator[str]:
    """Names of modules with weights, `*` for their numbers."""
    kinds = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")): None
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters())
    }
    yield from list(kinds)[:_SHOWN]
    if len(kinds) > _SHOWN:
        yield f"and {len(kinds) - _SHOWN} more"


def _require_untied(model: nn.Module, chosen: set[str]) -> None:
    """A tensor that two modules share moves in both."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        inside = [name for name in names if _is_inside(name, chosen)]
        if inside and len(inside) < len(names):
            outside = sorted(set(names) - set(inside))[0]
            raise ModelError(
                f"tuning.trainable: {inside[0]} is one tensor with {outside}, which would move with it and is not to be trained",
                f"name {outside.rsplit('.', 1)[0]} in tuning.trainable too, or leave {inside[0].rsplit('.', 1)[0]} out",
            )


def _is_inside(parameter: str, modules: set[str]) -> bool:
    parts = parameter.split(".")
    return any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))
