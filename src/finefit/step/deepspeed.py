"""DeepSpeed's ZeRO: stage 2 divides gradients and optimizer state over the ranks, stage 3 also the weights.

DeepSpeed reduces, divides and updates; the step decides when a step ends, what its norm is and whether it is applied,
as for every engine. DeepSpeed averages over ranks, so a loss is multiplied by their number. Gradients, weights and
state are read and written where DeepSpeed keeps them; its own pickled checkpoints are not used.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from finefit import bounded
from finefit.artifacts.atomic import write_text
from finefit.artifacts.reading import is_there, read_document
from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Stage
from finefit.errors import SpecError
from finefit.model.attention import backbone_name
from finefit.model.saved_weights import full_shape
from finefit.objective.batch import Batch, Forward
from finefit.spec.schema import AdamW, DeepSpeed, Engine
from finefit.step.engine import Bind, MakeOptimizer, Peers, Root, ShardedEngine, Slots
from finefit.step.levers import layers_of
from finefit.vision import without_adapter

_STEP = -1
"""Registered as a user of a weight, it keeps ZeRO-3 from dividing the weight again before the update."""


def import_deepspeed(device: str) -> Any:
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, at import
    # one line for each call that torch has renamed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        import deepspeed  # an extra: finefit[deepspeed]
    except ImportError as error:
        problem = f"engine.kind deepspeed needs deepspeed, which cannot be imported: {error}"
        remedy = "pip install 'finefit[deepspeed]', or set engine.kind: fsdp2, which divides the same"
        raise SpecError(problem, remedy) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device == "cpu":  # an operation for inference, which DeepSpeed would compile for minutes at the first start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroEngine(ShardedEngine):
    def __init__(self, peers: Peers, *, device: str, config: Mapping[str, Any]) -> None:
        self._deepspeed = import_deepspeed(device)
        super().__init__(peers, device)
        self._config = dict(config)
        self._divides_weights = config["zero_optimization"]["stage"] == 3
        self._engine: Any = None
        self._trained: list[nn.Parameter] = []
        self._outside: list[nn.Parameter] = []
        self._is_complete = False
        """Whether the existing gradients are those of a whole step."""

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    def around(self, bind: Bind) -> Forward:
        forward = bind()

        def through(batch: Batch) -> Tensor:
            if self._is_complete and torch.is_grad_enabled():
                self._forget()
            for parameter in self._outside:
                parameter.ds_active_sub_modules.add(_STEP)  # type: ignore[attr-defined]
                parameter.all_gather()  # type: ignore[attr-defined] # returns at once where it is whole already
            found: Tensor = self._engine(forward, batch)
            return found

        return through

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        local = torch.cuda.current_device() if self._device == "cuda" else self._peers.rank
        os.environ.setdefault("LOCAL_RANK", str(local))  # DeepSpeed insists on it
        root = Root(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(model)
        if self._divides_weights:  # tensor by tensor, so that no card ever holds all of them
            self._deepspeed.zero.Init(module=root, config_dict_or_path=self._config)
            for buffer in root.buffers():
                buffer.data = buffer.data.to(self._device)
        self._engine, *_ = self._deepspeed.initialize(
            model=root, optimizer=optimizer, config=self._config, dist_init_required=False
        )
        if self._divides_weights:
            inside = {id(p) for layer in layers_of(model) for p in layer.parameters()}
            self._outside = [p for p in model.parameters() if id(p) not in inside]  # embedding, last norm, head
            # A chunked loss calls the head once per chunk, on one rank more often than on another, but ZeRO-3 expects
            # every rank to call the same modules, and gathers by what was called before. So it does not see the calls
            # beside the backbone; the weights that they need are gathered beforehand.
            causal = without_adapter(model)
            backbone = set(getattr(causal, str(backbone_name(causal))).modules())
            for module in causal.modules():
                if module not in backbone:
                    module._forward_pre_hooks.clear()
                    module._forward_hooks.clear()
        inner: torch.optim.Optimizer = self._zero.optimizer
        return inner

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._peers.size, scale_wrt_gas=False)
        self._is_complete = is_last

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's parts. The optimizer's own tensors, which DeepSpeed has flattened, stand for all trained ones."""
        known = {id(p) for p in self._trained}
        asked = [p for p in parameters if id(p) in known] or self._trained
        if self._divides_weights:
            parts = [self._deepspeed.utils.safe_get_local_grad(p) for p in asked]
        else:
            here: list[Any] = [p for p in asked if p._hp_mapping is not None]  # type: ignore[attr-defined]
            parts = [p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group) for p in here]
        return [part for part in parts if part is not None]

    def update(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._engine.step()

    def _forget(self) -> None:
        """Drops the gradients of a step that was not applied."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self._divides_weights:
            zero.averaged_gradients = {}
        else:
            zero.micro_step_id = -1
            for kept in (zero.averaged_gradients, zero.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
        self._is_complete = False

    def weight(self, parameter: nn.Parameter) -> Tensor:
        if not self._divides_weights:
            return parameter.detach()
        self._divide(parameter)
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()

    def put_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        whole = value.to(device=self._flats()[0].device)
        if not self._divides_weights:
            parameter.detach().copy_(whole)
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, whole)
            return
        self._divide(parameter)
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.detach().copy_(whole)
        self._deepspeed.utils.safe_set_local_fp32_param(parameter, self._own(parameter, whole))

    def _divide(self, parameter: nn.Parameter) -> None:
        """Divides weights again that a forward left gathered."""
        if any(p.numel() for p in (parameter, *self._outside)):
            self._zero.parameter_offload.partition_all_parameters()

    def slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Slots:
        kept = optimizer.state.get(self._flat(parameter), {})
        return {
            name: value.cpu().clone() if name == "step" else self._whole_slot(parameter, name, value).cpu()
            for name, value in kept.items()
        }

    def _whole_slot(self, parameter: nn.Parameter, name: str, kept: Tensor) -> Tensor:
        if self._divides_weights:
            found: Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, name)
            return found
        whole = torch.zeros(parameter.numel(), dtype=kept.dtype, device=kept.device)
        if (place := _place(parameter)) is not None:
            inside, outside = place
            whole[inside] = kept[outside]
        dist.all_reduce(whole)
        return whole.view(parameter.shape)

    def put_slots(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slots: Slots) -> None:
        flat = self._flat(parameter)
        for name, value in slots.items():
            if name == "step":
                optimizer.state[flat][name] = value
                continue
            kept = optimizer.state[flat].setdefault(name, torch.zeros_like(flat))
            if self._divides_weights:
                own = self._own(parameter, value.to(flat.device))
                self._deepspeed.utils.safe_set_local_optimizer_state(parameter, own, name)
            elif (place := _place(parameter)) is not None:
                inside, outside = place
                kept[outside] = value.flatten()[inside].to(flat.device)

    def _flats(self) -> list[Tensor]:
        name = "fp32_partitioned_groups_flat" if self._divides_weights else "single_partition_of_fp32_groups"
        found: list[Tensor] = getattr(self._zero, name)
        return found

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the parameter's group."""
        groups = self._zero.fp16_groups if self._divides_weights else self._zero.bit16_groups
        found = zip(self._flats(), groups, strict=True)
        return next(flat for flat, group in found if any(p is parameter for p in group))

    def _own(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a tensor; the last part is padded."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        filled = pad(whole.flatten(), (0, size * self._peers.size - full_shape(parameter).numel()))
        return filled.narrow(0, size * self._peers.rank, size)


def _place(parameter: nn.Parameter) -> tuple[slice, slice] | None:
    """The location of this rank's part of a parameter under ZeRO-2: within the parameter, and within the rank's flat
    part."""
    place = parameter._hp_mapping  # type: ignore[attr-defined]
    if place is None:
        return None
    inside, outside = place.lp_fragment_address, place.hp_fragment_address
    return slice(inside.start, inside.start + inside.numel), slice(outside.start, outside.start + outside.numel)


# The DeepSpeed JSON of a stage: what finefit chooses, and what the user's own file adds. The spec decides batch sizes,
# precision, optimizer, clipping and schedule; a file that contradicts it is refused, with all contradictions at once.

DEEPSPEED_FILE = "deepspeed.json"
"""The file's name in the stage directory."""
_BUCKET_VALUES = (25 << 20) // 4
"""The size of buckets of gradients in transit between ranks: 25 MiB in fp32, as planned. DeepSpeed's default is 2
GB."""
_LIVE_VALUES = 250_000_000
"""The number of weights that ZeRO-3 leaves whole because they are used again soon; 1 GB in fp32."""
_AUTO = "auto"
_SPECS = ("optimizer", "scheduler", "gradient_clipping", "fp16", "bf16", "amp", "torch_autocast", "data_types")
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_FOREIGN = (
    *("amp", "torch_autocast", "data_types", "elasticity", "curriculum_learning", "data_efficiency"),
    *("compression_training", "progressive_layer_drop", "sequence_parallel_size", "tensor_parallel", "pipeline"),
    *("eigenvalue", "autotuning"),
)
"""Keys that would change the numbers or the rows of a step and have no counterpart in the spec."""


class DecidedValues(Protocol):
    """Decisions that a file may contradict: fields of a stage or, before it exists, of the spec and its forecast."""

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
    """The config in the stage directory, which is written at the first start. The path of the user's own file is
    relative to `run`."""
    path = folder / DEEPSPEED_FILE
    if is_there(path):
        return read_document(path)
    config = deepspeed_config(stage, user_config(stage.engine, run))
    if writes:
        write_text(path, json.dumps(config, indent=1) + "\n")
    return config


def user_config(engine: Engine, base: Path) -> dict[str, Any]:
    """The content of the user's file, empty if there is none. Its path is relative to `base`."""
    return _read(base / engine.config) if isinstance(engine, DeepSpeed) and engine.config is not None else {}


def _read(path: Path) -> dict[str, Any]:
    remedy = "fix it, or leave engine.config out"
    try:
        found = bounded.read_json(path)
    except FileNotFoundError:
        raise SpecError(f"engine.config: there is no {path}", "its path is relative to the spec file") from None
    except OSError as error:
        raise SpecError(f"engine.config: {path} cannot be read: {error.strerror}", remedy) from None
    except ValueError as error:
        raise SpecError(f"engine.config: {path.name} is not JSON: {error}", remedy) from None
    if not isinstance(found, dict):
        raise SpecError(f"engine.config: {path.name} holds {type(found).__name__} instead of an object", remedy)
    return found


def deepspeed_config(stage: Stage, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` is the user's file, which is kept where it does not contradict the spec."""
    if odd := list(config_contradictions(stage, own)):
        raise SpecError(
            "engine.config contradicts the spec:\n" + "\n".join(f"  {line}" for line in odd),
            'take these out of it, or write "auto"; the spec decides',
        )
    assert isinstance(stage.engine, DeepSpeed)
    zero: dict[str, Any] = {
        "stage": stage.engine.stage,
        "overlap_comm": stage.device == "cuda",
        "contiguous_gradients": True,
        "reduce_bucket_size": _BUCKET_VALUES,
    }
    if stage.engine.stage == 2:
        zero["allgather_bucket_size"] = _BUCKET_VALUES
    else:
        zero |= {
            "stage3_prefetch_bucket_size": _BUCKET_VALUES,
            "stage3_max_live_parameters": _LIVE_VALUES,
            "stage3_max_reuse_distance": _LIVE_VALUES,
            # keeps no 16-bit copy of a weight, but rounds differently from torch; frozen weights have 16 bits already
            "memory_efficient_linear": stage.tuning.kind != "lora" and stage.precision != "fp32",
        }
    zero |= {key: value for key, value in own.get("zero_optimization", {}).items() if value != _AUTO}
    kept = {key: value for key, value in own.items() if key not in (*_SPECS, *_BATCHES)}
    return kept | {
        "train_micro_batch_size_per_gpu": stage.levers.micro_batch,
        "gradient_accumulation_steps": 1,  # finefit itself knows the last micro-batch of a step
        "gradient_clipping": 0.0,  # and clips by the norm that it reports
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def config_contradictions(stage: DecidedValues, own: Mapping[str, Any]) -> Iterator[str]:
    engine, adamw = stage.engine, stage.optimizer
    assert isinstance(engine, DeepSpeed)
    per_micro_batch = stage.levers.micro_batch * (stage.num_ranks or engine.devices)
    decided: dict[str, tuple[str, Any]] = {  # by DeepSpeed's key: the key in the spec, and its value
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
    for key, (where, wanted) in decided.items():
        said = _at(own, key)
        same = said.lower() == wanted.lower() if isinstance(said, str) and isinstance(wanted, str) else said == wanted
        if said not in (None, _AUTO) and not same:
            yield f"{key} is {json.dumps(said)}, {where} is {json.dumps(wanted)}"
    if own.get("scheduler") not in (None, {}):
        yield "scheduler is set, but schedule decides the learning rate"
    for key in _FOREIGN:
        value = own.get(key)
        if value and not (isinstance(value, Mapping) and value.get("enabled") is False) and value != 1:
            yield f"{key} is set, but nothing in the spec requests it"
    for key in ("offload_optimizer", "offload_param"):
        device = _at(own, f"zero_optimization.{key}.device")
        if device not in (None, "none"):
            where = "state stays on its device; levers.offload moves activations"
            yield f"zero_optimization.{key}.device is {json.dumps(device)}, and {where}"


def _at(own: Mapping[str, Any], key: str) -> Any:
    found: Any = own
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found
