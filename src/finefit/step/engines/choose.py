"""The engine that a stage names, among these ranks."""

from collections.abc import Iterator
from pathlib import Path

import torch

from finefit.artifacts.records import Finding, Levers
from finefit.artifacts.trainings import Stage
from finefit.errors import FinefitError, RunError, SpecError
from finefit.spec.models import Lora, Tuning
from finefit.spec.schema import AdamW, AutoEngine, DeepSpeed, Engine, FullyShard, Parallel, Single
from finefit.step.engine import ALONE, LiveEngine, Peers
from finefit.step.engines.ddp import Copies
from finefit.step.engines.fsdp import FullShards
from finefit.step.engines.zero import Zero
from finefit.step.engines.zero_config import open_config


def make_engine(stage: Stage, peers: Peers, *, folder: Path, run: Path) -> LiveEngine:
    """`folder`: of the stage; `run`: of its run. Then `engine.around(...)` binds the model, and
    `engine.prepare(...)` divides it and makes its optimizer, before a checkpoint is put back."""
    if peers.size == 1:  # nothing to share, whatever the engine
        return ALONE
    require_possible(stage)
    match stage.engine:
        case Single():
            raise RunError(
                f"engine.kind is single, and this is one of {peers.size} ranks",
                "name another engine, or start one process",
            )
        case Parallel():
            return Copies(peers)
        case FullyShard():
            return FullShards(peers, device=stage.device, compute=_compute_dtype(stage))
        case DeepSpeed():
            return Zero(peers, device=stage.device, config=open_config(folder, stage, run, writes=peers.rank == 0))
        case AutoEngine():
            raise FinefitError("a stage must name the engine that auto came to")


def loads_on(stage: Stage, *, num_ranks: int) -> str:
    """The device that weights are loaded on: those that are divided are moved part by part, so that no card need hold all of them."""
    return "cpu" if num_ranks > 1 and divides_weights(stage.engine) else stage.device


def divides_weights(engine: Engine) -> bool:
    return isinstance(engine, FullyShard) or (isinstance(engine, DeepSpeed) and engine.stage == 3)


def require_possible(stage: Stage) -> None:
    if odd := list(engine_problems(stage.engine, stage.tuning, stage.optimizer, stage.levers)):
        raise SpecError(
            "\n".join(finding.problem for finding in odd), "\n".join(dict.fromkeys(finding.remedy for finding in odd))
        )


def engine_problems(engine: Engine, tuning: Tuning, optimizer: AdamW, levers: Levers) -> Iterator[Finding]:
    """What the engine cannot do with the rest of a stage, each an error with the change that mends it."""
    name = engine.kind
    if levers.update == "inside" and not isinstance(engine, Single):
        yield _error(
            f"levers.update inside needs the whole gradient in backward, and engine.kind {name} sums it over ranks later",
            "--set levers.update=after",
        )
    if isinstance(engine, FullyShard | DeepSpeed) and optimizer.kind != "adamw":
        yield _error(
            f"optimizer.kind {optimizer.kind} keeps its state in blocks that engine.kind {name} cannot divide",
            "--set optimizer.kind=adamw, or set engine.kind: ddp, which leaves state whole",
        )
    if isinstance(tuning, Lora):
        yield from _adapter_problems(engine, tuning)
    if isinstance(engine, DeepSpeed) and engine.stage == 3:
        yield from _gathering_problems(levers)


def _adapter_problems(engine: Engine, tuning: Lora) -> Iterator[Finding]:
    if tuning.base_bits is not None and divides_weights(engine):
        yield _error(
            f"tuning.base_bits {tuning.base_bits}: packed weights cannot be divided by engine.kind {engine.kind}",
            "set engine.kind: ddp, which leaves weights whole, or leave tuning.base_bits out",
        )
    if tuning.weights == "bf16" and isinstance(engine, DeepSpeed):
        yield _error(
            "tuning.weights bf16: deepspeed would update fp32 copies of them, which are not what is saved",
            "--set tuning.weights=fp32, or set engine.kind: fsdp2, which updates them as they are",
        )


def _gathering_problems(levers: Levers) -> Iterator[Finding]:
    """ZeRO-3 puts a layer's weights together when it is called, and nowhere else."""
    if levers.kernels == "fused":
        yield _error("levers.kernels fused reads weights that ZeRO-3 has not gathered", "--set levers.kernels=torch")
    if levers.keep_attention:
        yield _error(
            "levers.keep_attention: ZeRO-3 gathers weights inside what is computed again, where only what was kept is expected",
            "--set levers.keep_attention=false",
        )
    if levers.mlp_tiles > 1:
        yield _error(
            f"levers.mlp_tiles {levers.mlp_tiles}: ZeRO-3 would gather the weights for each piece, on short rows for fewer of them",
            "--set levers.mlp_tiles=1",
        )


def _error(problem: str, remedy: str) -> Finding:
    return Finding(level="error", problem=problem, remedy=remedy)


def _compute_dtype(stage: Stage) -> torch.dtype | None:
    """Whole fp32 weights are gathered in what products are taken in; frozen ones are kept in it already."""
    if isinstance(stage.tuning, Lora):
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[stage.precision]
