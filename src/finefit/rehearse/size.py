"""How large a model is, without a rehearsal."""

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from finefit.artifacts.forecasts import TowerSize
from finefit.model.experts import active_parameters, experts_of
from finefit.model.sight import bare, sight_in, tower_in
from finefit.model.sight.unused import unused_in
from finefit.rehearse.fake_model import on_meta, trainable_of
from finefit.rehearse.kernels import kernels_for
from finefit.rehearse.scene import Scene
from finefit.rehearse.shadows import Nf4Linear, paged_bytes
from finefit.spec.schema import AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    parameters: int
    trainable: int
    trainable_tensors: int
    weight_bytes: int
    """Of the frozen and the trained weights as they lie on the device."""
    trainable_bytes: int
    paged_bytes: int = 0
    """Of optimizer state that the driver moves between card and host."""
    active: int | None = None
    """Parameters that a token meets, in a mixture of experts; None where it meets all."""
    expert_bytes: int = 0
    """Of weights in tensors that hold several experts."""
    towers: dict[str, TowerSize] = field(default_factory=dict)
    """Of a model that sees."""
    tower_names: dict[str, frozenset[str]] = field(default_factory=dict)
    """What is trained of each."""
    unused: tuple[str, ...] = ()
    """Modules of a vision tower that no image passes."""


def survey(scene: Scene) -> Size:
    return _size(on_meta(scene, kernels_for(scene.device, scene.capability, scene.precision)), scene.optimizer)


def _size(model: nn.Module, optimizer: AdamW) -> Size:
    """A parameter that is packed into bits counts as what it stands for."""
    trained = trainable_of(model).values()
    is_paged, is_eight_bit = optimizer.kind.startswith("paged"), optimizer.kind.endswith("8bit")
    packed = sum(
        module.in_features * module.out_features - module.weight.numel()
        for module in model.modules()
        if isinstance(module, Nf4Linear)
    )
    of_experts = [p for experts in experts_of(model).values() for p in experts.parameters()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()) + packed,
        active=active_parameters(model) + packed if of_experts else None,
        expert_bytes=sum(p.numel() * p.element_size() for p in of_experts),
        trainable=sum(p.numel() for p in trained),
        trainable_tensors=len(trained),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        trainable_bytes=sum(p.numel() * p.element_size() for p in trained),
        paged_bytes=paged_bytes(trained, is_eight_bit=is_eight_bit) if is_paged else 0,
        towers=_towers(model),
        tower_names=_tower_names(model),
        unused=() if (sight := sight_in(model)) is None else unused_in(bare(model), sight),
    )


def _towers(model: nn.Module) -> dict[str, TowerSize]:
    if sight_in(model) is None:
        return {}
    total, trained, tensors = Counter[str](), Counter[str](), Counter[str]()
    stands_for = {
        id(module.weight): module.in_features * module.out_features
        for module in model.modules()
        if isinstance(module, Nf4Linear)
    }
    for name, parameter in model.named_parameters():
        tower, count = str(tower_in(model, name)), stands_for.get(id(parameter), parameter.numel())
        total[tower] += count
        trained[tower] += count * parameter.requires_grad
        tensors[tower] += parameter.requires_grad
    return {
        tower: TowerSize(parameters=total[tower], trainable=trained[tower], tensors=tensors[tower]) for tower in total
    }


def _tower_names(model: nn.Module) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for name in trainable_of(model) if sight_in(model) is not None else ():
        found.setdefault(str(tower_in(model, name)), set()).add(name)
    return {tower: frozenset(names) for tower, names in found.items()}
