"""The audit of the first two backwards of every process: every trained tensor is reached, on every rank, or it is named
with the reason.

A tensor that no gradient reaches stops the run before the first update. The gradient of an adapter's factor is exactly
zero as long as its partner is: that is expected once.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from finefit.artifacts.forecasts import grouped_names
from finefit.errors import FindingError
from finefit.objective.batch import Batch, Forward, LossSum, Objective
from finefit.rehearse.gradients import explain
from finefit.step.engine import Engine
from finefit.step.state import local_part
from finefit.train.ranks import Ranks
from finefit.vision import tower_in

log = logging.getLogger("finefit")
_LOOKS = 2
_FLOOR = 1e-12
"""Of the largest norm: anything smaller is rounding."""
_PARTNERS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_PARTNERS |= {partner: name for name, partner in _PARTNERS.items()}
_NAMES_TOLD = 8
_EXPERTS = ".experts."
_NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFound:
    """Names of trained tensors by the state of their gradient."""

    tensors: int
    unreached: tuple[str, ...]
    """Without those of experts: no row of this step need be routed to them."""
    idle: tuple[str, ...]
    """Of experts without rows. An expert that shares a tensor is named by its number in the tensor's name, and the
    tensor counts as reached."""
    blind: tuple[str, ...]
    """Of vision towers, where no row of this step has an image."""
    not_finite: tuple[str, ...]
    waiting: tuple[str, ...]
    """Exactly zero, because the other factor of the adapter is still zero."""
    zero: tuple[str, ...]
    faint: tuple[str, ...]


class Audit:
    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        ranks: Ranks,
        tell: Callable[..., Any],
        *,
        unfuse: Callable[[], None] = lambda: None,
    ) -> None:
        """`unfuse`: makes every module be called by itself, so that hooks see it; only before the run is stopped."""
        self._model, self._engine, self._ranks, self._tell, self._unfuse = model, engine, ranks, tell, unfuse
        self._left, self._last = _LOOKS, 0
        self._tower_of = {name: tower_in(model, name) for name, p in model.named_parameters() if p.requires_grad}
        """All None for a language model."""
        self._has_images = False
        self._touched: set[str] = set()
        self._heard: dict[str, Tensor] = {}
        self._by_expert: dict[str, Tensor] = {}
        self._ears: list[RemovableHandle] = []
        self._feelers: list[RemovableHandle] = list(self._feel()) if self._has_vision else []

    @property
    def _has_vision(self) -> bool:
        return any(self._tower_of.values())

    def _feel(self) -> Iterator[RemovableHandle]:
        """Notes what this rank's own rows reach, before ranks add up, where a rank holds whole tensors."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and local_part(parameter) is parameter:
                yield parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))  # type: ignore[no-untyped-call]

    def hear(self) -> None:
        """Where gradients are freed within backward, their norms are taken in hooks."""
        if self._left and not self._ears:
            trained = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
            self._ears = [p.register_hook(partial(self._note, name)) for name, p in trained]  # type: ignore[no-untyped-call]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._heard[name] = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self._by_expert |= _of_experts(name, gradient.detach())

    def decide(self, step: int, again: Callable[[], Any], finite: Tensor) -> bool:
        """The `decide` of a step: gradients exist and nothing is updated yet. `again` computes a loss of this step once
        more, to see which modules it calls."""
        is_finite = bool(finite)
        if self._left:
            is_whole = self._look(step, again, is_finite)
            self._left -= is_finite and is_whole  # a step that is not applied only shows what was not reached
        if not self._left:
            for hook in (*self._ears, *self._feelers):
                hook.remove()
            self._ears, self._feelers, self._heard, self._by_expert = [], [], {}, {}
        return is_finite

    def watched(self, objective: Objective) -> Objective:
        """Stops where the loss itself has no gradient: then nothing is reached, and backward would not say why."""
        return _WatchedObjective(objective, self._refuse, self._note_images)

    def _note_images(self, batch: Batch) -> None:
        self._has_images |= batch.extra is not None and bool(batch.extra.tensors.get("places_I", _NOTHING).numel())

    def _refuse(self, again: Callable[[], Any]) -> None:
        found = judge_gradients({name: p for name, p in self._model.named_parameters() if p.requires_grad}, {})
        self._stop(found, again)

    def _stop(self, found: AuditFound, again: Callable[[], Any]) -> NoReturn:
        # inside backward the other tensors are updated already
        problem = f"{_unreached_message(found)}. {'Nothing is saved' if self._ears else 'No update was made'}"
        self._unfuse()
        raise FindingError(problem, "\n".join(explain(self._model, found.unreached, _entered(self._model, again))))

    def _look(self, step: int, again: Callable[[], Any], is_finite: bool) -> bool:
        """Whether every tower could be reached."""
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        unreachable = self._unreachable()
        found = judge_gradients(trained, self._norms(trained), idle_experts(self._by_expert), unreachable)
        by_rank = self._by_rank()
        if found.unreached:
            self._stop(found, again)
        if not is_finite and step == self._last:  # fp16 repeats a step until its scale fits
            return not unreachable
        self._last = step
        kinds = ("idle", "blind", "not_finite", "waiting", "zero", "faint")
        named = {name: grouped_names(getattr(found, name)) for name in kinds}
        reached = found.tensors - sum(name in trained for name in found.idle) - len(found.blind)
        told = {
            **{k: v for k, v in named.items() if v},
            **({"towers": self._by_tower(found), "ranks": by_rank} if self._has_vision else {}),
        }
        self._tell(event="audited", step=step, tensors=found.tensors, reached=reached, **told)
        if self._left == 1 and (found.zero or found.faint):
            log.warning(_quiet_message(found))
        return not unreachable

    def _unreachable(self) -> frozenset[str]:
        """Trained tensors that this step cannot reach, since no row of any rank has an image. Every rank has to ask."""
        if not self._has_vision:
            return frozenset()
        has_images, self._has_images = self._ranks.any(self._has_images), False
        towers = () if has_images else ("vision", "projector")
        return frozenset(name for name, tower in self._tower_of.items() if tower in towers)

    def _by_tower(self, found: AuditFound) -> dict[str, dict[str, int]]:
        missing = {*found.idle, *found.blind, *found.not_finite}
        towers = dict.fromkeys(str(tower) for tower in self._tower_of.values())
        names = {tower: [name for name, of in self._tower_of.items() if str(of) == tower] for tower in towers}
        return {
            tower: {"tensors": len(own), "reached": len(own) - len(missing & {*own})} for tower, own in names.items()
        }

    def _by_rank(self) -> list[dict[str, int]]:
        """Tensors of each tower that a rank's own rows reached."""
        if not self._has_vision:
            return []
        own, self._touched = Counter(str(self._tower_of[name]) for name in self._touched), set()
        return list(self._ranks.gather(dict(own)))

    def _norms(self, trained: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """Of every tensor with a gradient on any rank; the largest norm of a shard stands for the whole."""
        if self._ears:
            heard, self._heard = self._heard, {}
            return dict(zip(heard, torch.stack(list(heard.values())).tolist(), strict=True)) if heard else {}
        here = {name: local_part(found[0]) for name, p in trained.items() if (found := self._engine.gradients([p]))}
        # of a shard it is unknown which experts it belongs to
        whole = {name: gradient for name, gradient in here.items() if gradient.shape == trained[name].shape}
        self._by_expert = {
            key: norms for name, gradient in whole.items() for key, norms in _of_experts(name, gradient).items()
        }
        filled = {name: gradient for name, gradient in here.items() if gradient.numel()}
        norms = dict.fromkeys(here, 0.0)
        if filled:  # one wait for the device, however many there are
            taken = torch.stack(torch._foreach_norm(list(filled.values()), 2, dtype=torch.float32)).tolist()
            norms |= {name: float(norm) for name, norm in zip(filled, taken, strict=True)}
        together: dict[str, float] = {}
        for part in self._ranks.gather(norms):
            for name, norm in part.items():
                before = together.get(name, 0.0)
                together[name] = math.nan if math.isnan(before) or math.isnan(norm) else max(before, norm)
        return together


class _WatchedObjective:
    def __init__(
        self, objective: Objective, refuse: Callable[[Callable[[], Any]], None], note: Callable[[Batch], None]
    ) -> None:
        self._objective, self._refuse, self._note = objective, refuse, note

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        self._note(batch)
        found = self._objective(forward, batch)
        if not found.total.requires_grad:
            self._refuse(lambda: self._objective(forward, batch))
        return found

    def count(self, batch: Batch) -> int:
        return self._objective.count(batch)


def judge_gradients(
    trained: Mapping[str, nn.Parameter],
    norms: Mapping[str, float],
    at_rest: Sequence[str] = (),
    unreachable: Container[str] = (),
) -> AuditFound:
    """`at_rest`: idle experts within reached tensors. `unreachable`: tensors that rows without images cannot reach."""
    absent = [name for name in trained if name not in norms]
    blind = [name for name in absent if name in unreachable]
    largest = max((norm for norm in norms.values() if norm < float("inf")), default=0.0)
    zero = [name for name, norm in norms.items() if norm == 0.0]
    waiting = [name for name in zero if _partner_is_zero(name, trained)]
    return AuditFound(
        tensors=len(trained),
        unreached=tuple(name for name in absent if _EXPERTS not in name and name not in unreachable),
        blind=tuple(blind),
        idle=(*(name for name in absent if _EXPERTS in name), *at_rest),
        not_finite=tuple(name for name, norm in norms.items() if not norm < float("inf")),
        waiting=tuple(waiting),
        zero=tuple(name for name in zero if name not in set(waiting)),
        faint=tuple(name for name, norm in norms.items() if 0.0 < norm <= _FLOOR * largest),
    )


def idle_experts(by_expert: Mapping[str, Tensor]) -> list[str]:
    """Experts whose gradient is exactly zero while others of the same tensor have one: no token of this step was routed
    to them."""
    norms = {name: found.tolist() for name, found in by_expert.items()}
    numbered = ((name, at, norm) for name, found in norms.items() if any(found) for at, norm in enumerate(found))
    return [name.replace(_EXPERTS, f"{_EXPERTS}{at}.") for name, at, norm in numbered if norm == 0.0]


def _of_experts(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """The gradient's norm for each expert, where one tensor holds several."""
    if _EXPERTS not in name or gradient.ndim != 3:
        return {}
    return {name: torch.linalg.vector_norm(gradient, dim=(1, 2), dtype=torch.float32)}


def _partner_is_zero(name: str, trained: Mapping[str, nn.Parameter]) -> bool:
    parts = [_PARTNERS.get(part, part) for part in name.split(".")]
    partner = trained.get(".".join(parts))
    return partner is not None and ".".join(parts) != name and not bool(local_part(partner).detach().any())


def _unreached_message(found: AuditFound) -> str:
    names = grouped_names(found.unreached)
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return (
        f"{len(found.unreached)} of {found.tensors} trained tensors got no gradient from the first backward: "
        f"{', '.join(names[:_NAMES_TOLD])}{more}. Training would not change them"
    )


def _quiet_message(found: AuditFound) -> str:
    zero, faint = (", ".join(grouped_names(names)[:_NAMES_TOLD]) for names in (found.zero, found.faint))
    parts = [f"exactly zero for {zero}: no row used them, or what follows them is zero"] if zero else []
    parts += [f"rounding (below {_FLOOR:g} of the largest) for {faint}"] if faint else []
    return "the gradient is " + "; it is ".join(parts)


def _entered(model: nn.Module, again: Callable[[], Any]) -> dict[str, bool]:
    """The modules that `again` calls, and whether with gradients enabled in any call."""
    entered: dict[str, bool] = {}

    def note(name: str, *_: Any) -> None:
        entered[name] = entered.get(name, False) or torch.is_grad_enabled()

    hooks = [module.register_forward_pre_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        with torch.enable_grad():
            again()
    finally:
        for hook in hooks:
            hook.remove()
    return entered
