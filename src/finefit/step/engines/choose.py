"""The engine that a stage names, among these ranks."""

from pathlib import Path

import torch

from finefit.artifacts.records import Stage
from finefit.errors import FinefitError, RunError, SpecError
from finefit.spec.schema import AutoEngine, DeepSpeed, FullyShard, Lora, Parallel, Single
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
    if odd := engine_problems(stage):
        raise SpecError("\n".join(odd), "set engine.kind: ddp, which leaves weights and state whole")
    match stage.engine:
        case Single():
            raise RunError(f"engine.kind is single, and this is one of {peers.size} ranks", "name another engine, or start one process")
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
    return "cpu" if num_ranks > 1 and _divides_weights(stage) else stage.device


def _divides_weights(stage: Stage) -> bool:
    return isinstance(stage.engine, FullyShard) or (isinstance(stage.engine, DeepSpeed) and stage.engine.stage == 3)


def engine_problems(stage: Stage) -> list[str]:
    """What the engine cannot do with the rest of the stage."""
    engine, tuning, name = stage.engine, stage.tuning, stage.engine.kind
    odd = []
    if stage.levers.update == "inside" and not isinstance(engine, Single):
        odd.append(f"levers.update inside needs the whole gradient in backward, and engine.kind {name} sums it over ranks later")
    if not isinstance(engine, FullyShard | DeepSpeed):
        return odd
    if stage.optimizer.kind != "adamw":
        odd.append(f"optimizer.kind {stage.optimizer.kind} keeps its state in blocks that engine.kind {name} cannot divide")
    if isinstance(tuning, Lora) and tuning.base_bits is not None and _divides_weights(stage):
        odd.append(f"tuning.base_bits {tuning.base_bits}: packed weights cannot be divided by engine.kind {name}")
    if isinstance(tuning, Lora) and tuning.weights == "bf16" and isinstance(engine, DeepSpeed):
        odd.append("tuning.weights bf16: deepspeed would update fp32 copies of them, which are not what is saved")
    if isinstance(engine, DeepSpeed) and engine.stage == 3:
        if stage.levers.kernels == "fused":
            odd.append("levers.kernels fused reads weights that ZeRO-3 has not gathered")
        if stage.levers.keep_attention:
            odd.append("levers.keep_attention: ZeRO-3 gathers weights inside what is computed again, where only what was kept is expected")
        if stage.levers.mlp_tiles > 1:
            odd.append(f"levers.mlp_tiles {stage.levers.mlp_tiles}: ZeRO-3 would gather the weights for each piece, on short rows for fewer of them")
    return odd


def _compute_dtype(stage: Stage) -> torch.dtype | None:
    """Whole fp32 weights are gathered in what products are taken in; frozen ones are kept in it already."""
    if isinstance(stage.tuning, Lora):
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[stage.precision]
