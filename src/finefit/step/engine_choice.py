"""Makes the engine that a stage names, for these ranks."""

from collections.abc import Iterator
from pathlib import Path

import torch

from finefit.artifacts.records import Finding, Levers
from finefit.artifacts.stage_records import Stage
from finefit.errors import FinefitError, RunError, SpecError
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, AutoEngine, Ddp, DeepSpeed, Engine, Fsdp2, Single
from finefit.step.deepspeed import ZeroEngine, open_config
from finefit.step.engine import SINGLE_PROCESS, DdpEngine, FsdpEngine, Peers, TrainEngine


def make_engine(stage: Stage, peers: Peers, *, folder: Path, run: Path) -> TrainEngine:
    """`folder` is that of the stage, `run` that of its run. After this, `engine.around(...)` binds the model, and
    `engine.prepare(...)` shards it and makes its optimizer, before a checkpoint is restored."""
    if peers.size == 1:  # nothing to share, whatever the engine
        return SINGLE_PROCESS
    require_possible(stage)
    match stage.engine:
        case Single():
            problem = f"engine.kind is single, and this is one of {peers.size} ranks"
            raise RunError(problem, "name another engine, or start one process")
        case Ddp():
            return DdpEngine(peers)
        case Fsdp2():
            # trained fp32 weights are gathered in the dtype of the products; frozen ones already have it
            is_frozen = isinstance(stage.tuning, Lora)
            dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
            return FsdpEngine(peers, device=stage.device, compute=None if is_frozen else dtypes[stage.precision])
        case DeepSpeed():
            config = open_config(folder, stage, run, writes=peers.rank == 0)
            return ZeroEngine(peers, device=stage.device, config=config)
        case AutoEngine():
            raise FinefitError("a stage must name the engine that auto resolved to")


def loads_on(stage: Stage, *, num_ranks: int) -> str:
    """The device that weights are loaded on. Sharded ones are moved part by part, so that no card holds all of them."""
    return "cpu" if num_ranks > 1 and divides_weights(stage.engine) else stage.device


def divides_weights(engine: Engine) -> bool:
    return isinstance(engine, Fsdp2) or (isinstance(engine, DeepSpeed) and engine.stage == 3)


def require_possible(stage: Stage) -> None:
    if found := list(engine_problems(stage.engine, stage.tuning, stage.optimizer, stage.levers)):
        remedies = dict.fromkeys(finding.remedy for finding in found)
        raise SpecError("\n".join(finding.problem for finding in found), "\n".join(remedies))


def engine_problems(engine: Engine, tuning: Tuning, optimizer: AdamW, levers: Levers) -> Iterator[Finding]:
    """Errors for the settings of a stage that its engine does not support, each with its remedy."""
    name, is_zero3 = engine.kind, isinstance(engine, DeepSpeed) and engine.stage == 3
    if levers.update == "inside" and not isinstance(engine, Single):
        problem = f"levers.update inside needs the whole gradient in backward, and engine.kind {name} sums it later"
        yield _error(problem, "--set levers.update=after")
    if isinstance(engine, Fsdp2 | DeepSpeed) and optimizer.kind != "adamw":
        problem = f"optimizer.kind {optimizer.kind} keeps its state in blocks that engine.kind {name} cannot divide"
        yield _error(problem, "--set optimizer.kind=adamw, or set engine.kind: ddp, which leaves state whole")
    if isinstance(tuning, Lora) and tuning.base_bits is not None and divides_weights(engine):
        problem = f"tuning.base_bits {tuning.base_bits}: engine.kind {name} cannot divide quantised weights"
        yield _error(problem, "set engine.kind: ddp, which leaves weights whole, or leave tuning.base_bits out")
    if isinstance(tuning, Lora) and tuning.weights == "bf16" and isinstance(engine, DeepSpeed):
        problem = "tuning.weights bf16: deepspeed would update fp32 copies, and those are not saved"
        yield _error(problem, "--set tuning.weights=fp32, or set engine.kind: fsdp2, which updates bf16 itself")
    if isinstance(tuning, Lora) and tuning.experts and divides_weights(engine):
        problem = (
            f"tuning.experts: adapters of experts are not known to be exact where engine.kind {name} divides weights"
        )
        yield _error(problem, "set engine.kind: ddp, which leaves weights whole, or leave tuning.experts out")
    # ZeRO-3 gathers a layer's weights when the layer is called, and nowhere else
    if is_zero3 and levers.kernels == "fused":
        yield _error("levers.kernels fused reads weights that ZeRO-3 has not gathered", "--set levers.kernels=torch")
    if is_zero3 and levers.keep_attention:
        problem = "levers.keep_attention: ZeRO-3 gathers weights during recomputation, which expects only kept tensors"
        yield _error(problem, "--set levers.keep_attention=false")
    if is_zero3 and levers.mlp_tiles > 1:
        problem = f"levers.mlp_tiles {levers.mlp_tiles}: ZeRO-3 would gather the weights once per tile"
        yield _error(f"{problem}, and short rows have fewer tiles", "--set levers.mlp_tiles=1")


def _error(problem: str, remedy: str) -> Finding:
    return Finding(level="error", problem=problem, remedy=remedy)
