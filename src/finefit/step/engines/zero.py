"""DeepSpeed's ZeRO: 2 divides gradients and optimizer state over the ranks, 3 the weights too.

DeepSpeed reduces, divides and updates; when a step ends, what its norm is and whether it is applied is decided by the step, as for every engine. It
averages over ranks, so a loss is multiplied by their number. Gradients, weights and state are read and written where DeepSpeed keeps them: its own
pickled checkpoints are not used.
"""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from finefit.errors import SpecError
from finefit.objective.batch import Batch, Forward
from finefit.step.engine import Bind, MakeOptimizer, Peers, Slots, whole_shape
from finefit.step.engines.parts import Root, around_backbone, clip_parts, norm_of_parts, outside_layers, summed

_SHARED_MEMORY = "deepspeed_shm_comm"
"""An operation for inference that DeepSpeed would otherwise compile at the first start on a CPU, for minutes and only where there is a compiler."""
_STEP = -1
"""Named as a module that uses a weight, it keeps ZeRO-3 from dividing the weight again until the update."""


def import_deepspeed(device: str) -> Any:
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, at import
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch.distributed"
    )  # calls that torch has renamed, one line for each
    try:
        import deepspeed  # an extra: finefit[deepspeed]
    except ImportError as error:
        raise SpecError(
            f"engine.kind deepspeed needs deepspeed, which cannot be imported: {error}",
            "pip install 'finefit[deepspeed]', or set engine.kind: fsdp2, which divides the same",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device == "cpu":
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    return deepspeed


class Zero:
    def __init__(self, peers: Peers, *, device: str, config: Mapping[str, Any]) -> None:
        self._deepspeed = import_deepspeed(device)
        self._peers, self._device, self._config = peers, device, dict(config)
        self._divides_weights = config["zero_optimization"]["stage"] == 3
        self._engine: Any = None
        self._trained: list[nn.Parameter] = []
        self._outside: list[nn.Parameter] = []
        self._is_complete = False
        """Whether the gradients that are there are those of a whole step."""

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    def around(self, bind: Bind) -> Forward:
        forward = bind()

        def through(batch: Batch) -> Tensor:
            if self._is_complete and torch.is_grad_enabled():
                self._forget()
            self._gather_outside()
            found: Tensor = self._engine(forward, batch)
            return found

        return through

    def _gather_outside(self) -> None:
        for parameter in self._outside:
            parameter.ds_active_sub_modules.add(_STEP)  # type: ignore[attr-defined]
            parameter.all_gather()  # type: ignore[attr-defined] # returns at once where it is whole already

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        os.environ.setdefault(
            "LOCAL_RANK", str(torch.cuda.current_device() if self._device == "cuda" else self._peers.rank)
        )  # it insists
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
            self._outside = outside_layers(model)
            _leave_alone(around_backbone(model))
        inner: torch.optim.Optimizer = self._zero.optimizer
        return inner

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._peers.size, scale_wrt_gas=False)
        self._is_complete = is_last

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's parts. The optimizer's own tensors, which DeepSpeed has flattened, stand for all of the model's."""
        known = {id(p) for p in self._trained}
        asked = [p for p in parameters if id(p) in known] or self._trained
        return [part for p in asked if (part := self._part(p)) is not None]

    def _part(self, parameter: nn.Parameter) -> Tensor | None:
        if self._divides_weights:
            found: Tensor = self._deepspeed.utils.safe_get_local_grad(parameter)
            return found
        place = parameter._hp_mapping  # type: ignore[attr-defined]
        return None if place is None else place.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_of_parts(gradients, torch.device(self._device))

    def clip(self, parameters: Sequence[nn.Parameter], most: float, grad_norm: Tensor) -> None:
        clip_parts(self.gradients(parameters), most, grad_norm)

    def update(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._engine.step()

    def _forget(self) -> None:
        """Of a step that was not applied; after one that was, nothing is left."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self._divides_weights:
            zero.averaged_gradients = {}
        else:
            zero.micro_step_id = -1
            for kept in (zero.averaged_gradients, zero.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
        self._is_complete = False

    def sum(self, value: Tensor) -> Tensor:
        return summed(value)

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
        """What a forward has left whole."""
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
                self._deepspeed.utils.safe_set_local_optimizer_state(
                    parameter, self._own(parameter, value.to(flat.device)), name
                )
            elif (place := _place(parameter)) is not None:
                inside, outside = place
                kept[outside] = value.flatten()[inside].to(flat.device)

    def _flats(self) -> list[Tensor]:
        zero = self._zero
        found: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self._divides_weights else zero.single_partition_of_fp32_groups
        )
        return found

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the group that the parameter is in."""
        groups = self._zero.fp16_groups if self._divides_weights else self._zero.bit16_groups
        return next(
            flat for flat, group in zip(self._flats(), groups, strict=True) if any(p is parameter for p in group)
        )

    def _own(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a tensor; the last part is filled up."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        filled = pad(whole.flatten(), (0, size * self._peers.size - whole_shape(parameter).numel()))
        return filled.narrow(0, size * self._peers.rank, size)


def _leave_alone(modules: Sequence[nn.Module]) -> None:
    """A loss in chunks calls the head once a chunk, on one rank more often than on another; ZeRO-3 expects every rank to call the same modules, and
    gathers by what was called before. So it is not told of these calls; what they need is whole before."""
    for module in modules:
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def _place(parameter: nn.Parameter) -> tuple[slice, slice] | None:
    """Of what this rank keeps of a parameter under ZeRO-2: where in the parameter, and where in the rank's flat part."""
    place = parameter._hp_mapping  # type: ignore[attr-defined]
    if place is None:
        return None
    inside, outside = place.lp_fragment_address, place.hp_fragment_address
    return slice(inside.start, inside.start + inside.numel), slice(outside.start, outside.start + outside.numel)
