"""The DeepSpeed JSON of a stage: what finefit chooses, with what a user's own file adds. The spec decides batch sizes, precision, optimizer, clipping
and schedule; a file that says otherwise is refused by name, all of it at once."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from finefit.artifacts.atomic import write_text
from finefit.artifacts.records import Levers
from finefit.artifacts.trainings import Stage
from finefit.errors import SpecError
from finefit.spec.schema import AdamW, DeepSpeed, Engine

FILE = "deepspeed.json"
"""In the stage directory."""
_BUCKET_VALUES = (25 << 20) // 4
"""Of gradients on their way between ranks: 25 MiB in fp32, as the plan has it. DeepSpeed's own choice is 2 GB."""
_LIVE_VALUES = 250_000_000
"""Of weights that ZeRO-3 leaves whole because they are needed again soon; 1 GB in fp32."""
_AUTO = "auto"
_SPECS = ("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "amp", "torch_autocast", "data_types")
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_FOREIGN = (
    "amp",
    "torch_autocast",
    "data_types",
    "elasticity",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
    "progressive_layer_drop",
    "sequence_parallel_size",
    "tensor_parallel",
    "pipeline",
    "eigenvalue",
    "autotuning",
)
"""What would change the numbers or the rows of a step, and has no word in the spec."""


class Decided(Protocol):
    """What a file may contradict: a stage has it, and before there is one the spec with its forecast."""

    @property
    def engine(self) -> Engine: ...
    @property
    def optimizer(self) -> AdamW: ...
    @property
    def levers(self) -> Levers: ...
    @property
    def precision(self) -> str: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def num_ranks(self) -> int | None: ...


def open_config(folder: Path, stage: Stage, run: Path, *, writes: bool) -> dict[str, Any]:
    """The one that lies in the stage directory; at the first start it is made. `run` is where the path of the user's own file starts."""
    path = folder / FILE
    if path.exists():
        return _read(path)
    engine = stage.engine
    assert isinstance(engine, DeepSpeed)
    config = deepspeed_config(stage, own_config(engine, run))
    if writes:
        write_text(path, json.dumps(config, indent=1) + "\n")
    return config


def own_config(engine: Engine, base: Path) -> dict[str, Any]:
    """What the user's file says; nothing where there is none. Its path starts at `base`."""
    return _read(base / engine.config) if isinstance(engine, DeepSpeed) and engine.config is not None else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"engine.config: there is no {path}", "its path is relative to the spec file") from None
    except ValueError as error:
        raise SpecError(
            f"engine.config: {path.name} is no JSON: {error}", "mend it, or leave engine.config out"
        ) from None
    if not isinstance(found, dict):
        raise SpecError(
            f"engine.config: {path.name} holds {type(found).__name__} instead of an object",
            "mend it, or leave engine.config out",
        )
    return found


def deepspeed_config(stage: Stage, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own`: what the user's file says; it is kept where it does not contradict."""
    if odd := list(contradictions(stage, own)):
        raise SpecError(
            "engine.config contradicts the spec:\n" + "\n".join(f"  {line}" for line in odd),
            'take these out of it, or write "auto"; the spec decides',
        )
    kept = {key: value for key, value in own.items() if key not in (*_SPECS, *_BATCHES)}
    return kept | {
        "train_micro_batch_size_per_gpu": stage.levers.micro_batch,
        "gradient_accumulation_steps": 1,  # finefit says itself which micro-batch is the last of a step
        "gradient_clipping": 0.0,  # and clips by the norm that it shows
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero(stage)
        | {key: value for key, value in own.get("zero_optimization", {}).items() if value != _AUTO},
    }


def _zero(stage: Stage) -> dict[str, Any]:
    assert isinstance(stage.engine, DeepSpeed)
    chosen: dict[str, Any] = {
        "stage": stage.engine.stage,
        "overlap_comm": stage.device == "cuda",
        "contiguous_gradients": True,
        "reduce_bucket_size": _BUCKET_VALUES,
    }
    if stage.engine.stage == 2:
        return chosen | {"allgather_bucket_size": _BUCKET_VALUES}
    return chosen | {
        "stage3_prefetch_bucket_size": _BUCKET_VALUES,
        "stage3_max_live_parameters": _LIVE_VALUES,
        "stage3_max_reuse_distance": _LIVE_VALUES,
        # its own linear layer, which keeps no copy of a weight in halves, rounds otherwise than torch's; frozen weights are in halves already
        "memory_efficient_linear": stage.tuning.kind != "lora" and stage.precision != "fp32",
    }


def contradictions(stage: Decided, own: Mapping[str, Any]) -> Iterator[str]:
    for key, (where, wanted) in _decided(stage).items():
        if (said := _at(own, key)) not in (None, _AUTO) and not _same(said, wanted):
            yield f"{key} is {json.dumps(said)}, {where} is {json.dumps(wanted)}"
    if own.get("scheduler") not in (None, {}):
        yield "scheduler is given, the learning rate is that of schedule"
    for key in _FOREIGN:
        value = own.get(key)
        if value and not (isinstance(value, Mapping) and value.get("enabled") is False) and value != 1:
            yield f"{key} is given, and nothing in the spec asks for it"
    for key in ("offload_optimizer", "offload_param"):
        device = _at(own, f"zero_optimization.{key}.device")
        if device not in (None, "none"):
            yield f"zero_optimization.{key}.device is {json.dumps(device)}, and state stays on its device; levers.offload moves activations"


def _decided(stage: Decided) -> dict[str, tuple[str, Any]]:
    """By key of DeepSpeed's: what the spec calls it, and its value."""
    engine, adamw = stage.engine, stage.optimizer
    assert isinstance(engine, DeepSpeed)
    per_micro_batch = stage.levers.micro_batch * (stage.num_ranks or engine.devices)
    return {
        "train_batch_size": ("global_batch", stage.global_batch),
        "train_micro_batch_size_per_gpu": ("levers.micro_batch", stage.levers.micro_batch),
        "gradient_accumulation_steps": ("what global_batch comes to", -(-stage.global_batch // per_micro_batch)),
        "gradient_clipping": ("optimizer.clip", adamw.clip or 0.0),
        "fp16.enabled": ("precision fp16", stage.precision == "fp16"),
        "bf16.enabled": ("precision bf16", stage.precision == "bf16"),
        "zero_optimization.stage": ("engine.stage", engine.stage),
        "optimizer.type": ("optimizer.kind", "AdamW"),
        "optimizer.params.lr": ("optimizer.lr", adamw.lr),
        "optimizer.params.betas": ("optimizer.betas", list(adamw.betas)),
        "optimizer.params.eps": ("optimizer.eps", adamw.eps),
        "optimizer.params.weight_decay": ("optimizer.weight_decay", adamw.weight_decay),
    }


def _at(own: Mapping[str, Any], key: str) -> Any:
    found: Any = own
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def _same(said: Any, wanted: Any) -> bool:
    return said.lower() == wanted.lower() if isinstance(said, str) and isinstance(wanted, str) else bool(said == wanted)
