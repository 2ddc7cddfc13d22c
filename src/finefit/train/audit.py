"""The audit of the first two backwards of every process. A trained tensor that no gradient reaches on any rank stops
the run before the first update, with the reason. The gradient of an adapter's factor is exactly zero as long as its
partner is, so one such zero is expected."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from finefit.artifacts.forecasts import grouped_names
from finefit.errors import FindingError
from finefit.objective.batch import Batch, Forward, LossSum, Objective
from finefit.rehearse.rehearsal import explain
from finefit.step.engine import Engine, local_part
from finefit.train.ranks import Ranks
from finefit.vision import tower_in

log = logging.getLogger("finefit")
_LOOKS = 2
_FLOOR = 1e-12  # of the largest norm: anything smaller is rounding
_PARTNERS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
_PARTNERS |= {partner: name for name, partner in _PARTNERS.items()}
_NAMES_TOLD = 8
_EXPERTS = ".experts."
_NOTHING = torch.empty(0)
Unfuse = Callable[[], None]
Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFound:
    """Names of trained tensors, by the state of their gradient."""

    tensors: int
    unreached: tuple[str, ...]
    """Tensors without a gradient, except those of experts, to which no row of this step need be routed."""
    idle: tuple[str, ...]
    """Tensors of experts without rows. An expert that shares a tensor is named by its number, and its tensor counts as
    reached."""
    no_image: tuple[str, ...]
    """Tensors of vision towers, if no row of this step has an image."""
    not_finite: tuple[str, ...]
    waiting: tuple[str, ...]
    """Exactly zero, because the other factor of the adapter is still zero."""
    zero: tuple[str, ...]
    faint: tuple[str, ...]


class Audit:
    def __init__(
        self, model: nn.Module, engine: Engine, ranks: Ranks, tell: Callable[..., Any], *, unfuse: Unfuse = lambda: None
    ) -> None:
        """`unfuse` makes every module be called by itself, so that hooks see it; it is used only before the run is
        stopped."""
        self._model, self._engine, self._ranks, self._tell, self._unfuse = model, engine, ranks, tell, unfuse
        self._left, self._last = _LOOKS, 0
        self._tower_of = {name: tower_in(model, name) for name in self._trained()}
        """Every tower is None for a language model."""
        self._has_vision = any(self._tower_of.values())
        self.has_images = False
        """Whether a row of this rank since the last inspection had an image."""
        self._touched: set[str] = set()
        self._heard: dict[str, Tensor] = {}
        self._by_expert: dict[str, Tensor] = {}
        self._ears: list[RemovableHandle] = []
        self._feelers: list[RemovableHandle] = []
        for name, parameter in self._trained().items() if self._has_vision else ():
            # notes what this rank's own rows reach, before ranks add up, where a rank holds whole tensors
            if local_part(parameter) is parameter:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._touched.add(name))  # type: ignore[no-untyped-call]
                self._feelers.append(hook)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def hear(self) -> None:
        """Takes norms in hooks if gradients are freed within backward."""
        if self._left and not self._ears:
            self._ears = [p.register_hook(partial(self._note, name)) for name, p in self._trained().items()]  # type: ignore[no-untyped-call]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._heard[name] = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self._by_expert |= _of_experts(name, gradient.detach())

    def decide(self, step: int, again: Callable[[], Any], finite: Tensor) -> bool:
        """Serves as the `decide` of a step, before any update. `again` computes one of the step's losses once more, to
        see which modules it calls."""
        is_finite = bool(finite)
        if self._left:
            is_whole = self._inspect(step, again, is_finite)
            self._left -= is_finite and is_whole  # a step that is not applied only shows what was not reached
        if not self._left:
            for hook in (*self._ears, *self._feelers):
                hook.remove()
            self._ears, self._feelers, self._heard, self._by_expert = [], [], {}, {}
        return is_finite

    def watched(self, objective: Objective) -> Objective:
        """Stops the run if the loss itself has no gradient: nothing is reached then, and backward would not say why."""
        return _WatchedObjective(objective, self)

    def stop(self, again: Callable[[], Any], found: AuditFound | None = None) -> NoReturn:
        found = found or judge_gradients(self._trained(), {})
        names = grouped_names(found.unreached)
        more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        # inside backward the other tensors are updated already
        saved = "Nothing is saved" if self._ears else "No update was made"
        self._unfuse()
        raise FindingError(
            f"{len(found.unreached)} of {found.tensors} trained tensors got no gradient from the first backward: "
            f"{', '.join(names[:_NAMES_TOLD])}{more}. Training would not change them. {saved}",
            "\n".join(explain(self._model, found.unreached, _entered(self._model, again))),
        )

    def _inspect(self, step: int, again: Callable[[], Any], is_finite: bool) -> bool:
        """Whether this step could reach every tower. Every rank must call it."""
        trained, unreachable = self._trained(), frozenset[str]()
        if self._has_vision:
            if not self._ranks.any(self.has_images):  # no row of any rank can reach these
                towers = ("vision", "projector")
                unreachable = frozenset(name for name, tower in self._tower_of.items() if tower in towers)
            self.has_images = False
        norms = self._norms(trained)
        found = judge_gradients(trained, norms, self._idle_experts(), unreachable)
        told: dict[str, Any] = {}
        if self._has_vision:
            # tensors of each tower that a rank's own rows reached
            own, self._touched = Counter(str(self._tower_of[name]) for name in self._touched), set()
            told = {"towers": self._by_tower(found), "ranks": list(self._ranks.gather(dict(own)))}
        if found.unreached:
            self.stop(again, found)
        if not is_finite and step == self._last:  # fp16 repeats a step until its scale fits
            return not unreachable
        self._last = step
        kinds = ("idle", "no_image", "not_finite", "waiting", "zero", "faint")
        named = {kind: names for kind in kinds if (names := grouped_names(getattr(found, kind)))}
        reached = found.tensors - sum(name in trained for name in found.idle) - len(found.no_image)
        self._tell(event="audited", step=step, tensors=found.tensors, reached=reached, **named, **told)
        if self._left == 1 and (found.zero or found.faint):
            zero, faint = (", ".join(named.get(kind, [])[:_NAMES_TOLD]) for kind in ("zero", "faint"))
            parts = [f"exactly zero for {zero}: no row used them, or what follows them is zero"] if zero else []
            parts += [f"rounding (below {_FLOOR:g} of the largest) for {faint}"] if faint else []
            log.warning("the gradient is " + "; it is ".join(parts))
        return not unreachable

    def _by_tower(self, found: AuditFound) -> dict[str, dict[str, int]]:
        missing, towers = {*found.idle, *found.no_image, *found.not_finite}, self._tower_of.items()
        tensors = Counter(str(tower) for _, tower in towers)
        reached = Counter(str(tower) for name, tower in towers if name not in missing)
        return {tower: {"tensors": count, "reached": reached[tower]} for tower, count in tensors.items()}

    def _idle_experts(self) -> list[str]:
        """Experts whose gradient is exactly zero while others in their tensor have one: no token of this step was
        routed to them."""
        norms = {name: found.tolist() for name, found in self._by_expert.items()}
        numbered = ((name, at, norm) for name, found in norms.items() if any(found) for at, norm in enumerate(found))
        return [name.replace(_EXPERTS, f"{_EXPERTS}{at}.") for name, at, norm in numbered if norm == 0.0]

    def _norms(self, trained: Parameters) -> dict[str, float]:
        """Norms of every tensor that has a gradient on any rank; the largest norm of its shards represents the whole
        tensor."""
        if self._ears:
            heard, self._heard = self._heard, {}
            return dict(zip(heard, torch.stack(list(heard.values())).tolist(), strict=True)) if heard else {}
        here = {name: local_part(found[0]) for name, p in trained.items() if (found := self._engine.gradients([p]))}
        self._by_expert = {}
        for name, gradient in here.items():
            if gradient.shape == trained[name].shape:  # of a shard it is unknown which experts it belongs to
                self._by_expert |= _of_experts(name, gradient)
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


@dataclass(frozen=True, slots=True)
class _WatchedObjective:
    objective: Objective
    audit: Audit

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        if batch.extra is not None and batch.extra.tensors.get("places_I", _NOTHING).numel():
            self.audit.has_images = True
        found = self.objective(forward, batch)
        if not found.total.requires_grad:
            self.audit.stop(lambda: self.objective(forward, batch))
        return found

    def count(self, batch: Batch) -> int:
        return self.objective.count(batch)


def judge_gradients(
    trained: Parameters, norms: Mapping[str, float], at_rest: Sequence[str] = (), unreachable: Container[str] = ()
) -> AuditFound:
    """`at_rest` are idle experts within reached tensors. `unreachable` are tensors that rows without images cannot
    reach."""

    def is_waiting(name: str) -> bool:
        partner = ".".join(_PARTNERS.get(part, part) for part in name.split("."))
        return partner != name and partner in trained and not bool(local_part(trained[partner]).detach().any())

    absent = [name for name in trained if name not in norms]
    largest = max((norm for norm in norms.values() if norm < float("inf")), default=0.0)
    zero = {name: is_waiting(name) for name, norm in norms.items() if norm == 0.0}
    return AuditFound(
        tensors=len(trained),
        unreached=tuple(name for name in absent if _EXPERTS not in name and name not in unreachable),
        no_image=tuple(name for name in absent if name in unreachable),
        idle=(*(name for name in absent if _EXPERTS in name), *at_rest),
        not_finite=tuple(name for name, norm in norms.items() if not norm < float("inf")),
        waiting=tuple(name for name, waits in zero.items() if waits),
        zero=tuple(name for name, waits in zero.items() if not waits),
        faint=tuple(name for name, norm in norms.items() if 0.0 < norm <= _FLOOR * largest),
    )


def _of_experts(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """The gradient's norm of each expert, if one tensor holds several."""
    if _EXPERTS not in name or gradient.ndim != 3:
        return {}
    return {name: torch.linalg.vector_norm(gradient, dim=(1, 2), dtype=torch.float32)}


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
