"""One candidate, looked at: its rehearsal, what the allocator makes of it, how long a step takes."""

from dataclasses import dataclass, field, replace

from finefit.artifacts.records import Levers
from finefit.model.custom_files import written_in
from finefit.plan.target import Target
from finefit.rehearse.allocator import Replay, replay
from finefit.rehearse.clock import Rates, phase_seconds
from finefit.rehearse.custom import num_layers
from finefit.rehearse.depth import layer_kinds, rehearse_depth
from finefit.rehearse.fake_model import read_config
from finefit.rehearse.rehearsal import Rehearsed
from finefit.rehearse.scene import Scene
from finefit.rehearse.shard import Sharding, sharded
from finefit.spec.models import Full, Lora

_USUAL = Rates(half_flops=130e12, full_flops=15e12, bytes_per_second=1e12, launch_seconds=15e-6)

FUSED_AGAIN = 0.025
"""Share of the reserved memory that is added where whole weights are trained in layers with fused kernels that are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    scene: Scene
    rehearsed: Rehearsed
    replay: Replay
    peak_bytes: int
    """What the card must hold."""
    margin_bytes: int
    accumulation: int
    step_seconds: float
    """By the target's rates, or by those of a usual card where they are not known: enough to compare."""

    @property
    def levers(self) -> Levers:
        return self.scene.levers


@dataclass(frozen=True, slots=True, kw_only=True)
class Looker:
    """Looks at candidates of one stage on one target; what was rehearsed once is not rehearsed again."""

    scene: Scene
    target: Target
    rows_per_step: int
    """Of one card."""
    sharding: Sharding = "none"
    has_experts: bool = False
    memo: dict[str, Rehearsed] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        found = written_in(self.scene.config)
        return len(layer_kinds(read_config(self.scene.config))) if found is None else num_layers(found)

    def fits(self, look: Look) -> bool:
        return look.peak_bytes <= self.target.budget_bytes

    def look(self, levers: Levers, *, is_quick: bool = True, scene: Scene | None = None) -> Look:
        accumulation = -(-self.rows_per_step // levers.micro_batch)
        asked = replace(scene or self.scene, levers=levers, is_quick=is_quick, accumulates=accumulation > 1)
        key = repr(asked)
        if key not in self.looks:
            self.looks[key] = self._look(asked, accumulation)
        return self.looks[key]

    def _look(self, scene: Scene, accumulation: int) -> Look:
        rehearsed = rehearse_depth(scene, self.memo)
        if self.sharding != "none":
            halves = scene.precision != "fp32" and isinstance(
                scene.tuning, Full
            )  # adapters and a subset lie beside frozen halves already
            rehearsed = replace(
                rehearsed, trace=sharded(rehearsed.trace, self.sharding, self.target.count, gathers_halves=halves)
            )
        answer = replay(rehearsed.trace.stream(), expandable=self.target.expandable)
        reserved = answer.reserved_bytes if self.target.device == "cuda" else answer.allocated_bytes
        margin = int(reserved * self.target.margin) + self.target.margin_bytes + holes(reserved, rehearsed, scene)
        return Look(
            scene=scene,
            rehearsed=rehearsed,
            replay=answer,
            peak_bytes=reserved + self.target.context_bytes + margin,
            margin_bytes=margin,
            accumulation=accumulation,
            step_seconds=self._seconds(rehearsed, scene),
        )

    def _seconds(self, rehearsed: Rehearsed, scene: Scene) -> float:
        phases = phase_seconds(rehearsed.trace, self.target.rates or _USUAL)
        update = phases.pop("update", 0.0)
        batches = 2 if scene.accumulates and not scene.is_quick else 1
        copies = 2 * rehearsed.trace.host_bytes / self.target.host_bytes_per_second
        beside = max(sum(phases.values()) / batches, copies)  # copies run while the card computes
        return beside * self.rows_per_step / scene.levers.micro_batch + update


def holes(reserved: int, rehearsed: Rehearsed, scene: Scene) -> int:
    """What the allocator may hold beside its forecast. A layer's input on its way to the host and back may leave a hole of its size; whole weights
    in layers with fused kernels that are computed again took 3.1 % more than foretold (docs/memory.md), though what they allocate was foretold."""
    levers = scene.levers
    is_again = (
        levers.kernels == "fused" and levers.recompute and not isinstance(scene.tuning, Lora) and scene.device == "cuda"
    )
    again = int(reserved * FUSED_AGAIN) if is_again else 0
    return again + (rehearsed.trace.host_bytes // levers.recompute if levers.offload and levers.recompute else 0)
