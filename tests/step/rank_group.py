"""One training as a single process does it and as one of two ranks does it, with what it leaves: gradients, losses,
weights, state, all whole."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from finefit.artifacts.records import Levers
from finefit.artifacts.stage_records import Stage
from finefit.data.order import rows_of_rank, rows_of_step
from finefit.model.load import make_trainable
from finefit.objective.batch import Batch, Forward
from finefit.objective.losses import sft_loss
from finefit.spec.models import FolderModel, Tuning
from finefit.spec.schema import AdamW, DeepSpeed, NanStop, Save, Sft, Single
from finefit.step.deepspeed import ZeroEngine, deepspeed_config
from finefit.step.engine import SINGLE_PROCESS, DdpEngine, FsdpEngine, TrainEngine
from finefit.step.forward import autocast_for, bind
from finefit.step.levers import apply_levers
from finefit.step.optimize import StepOutcome, optimizer_step
from finefit.step.state import make_optimizer
from finefit.train.ranks import ONE_RANK, ManyRanks, Ranks
from tests.conftest import make_model
from tests.micro_batches import micro_batches
from tests.step.conftest import FULL, LORA, RENDERER, trainable, tuned, unequal_examples

Kind = Literal["ddp", "fsdp2", "zero2", "zero3"]
Device = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = ("ddp", "fsdp2", "zero2", "zero3")
TUNINGS: dict[str, Tuning] = {"lora": LORA, "full": FULL}
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
CLIP = 0.5
STEPS = 10
LEFT_OUT = 4
"""A step whose update is not applied."""
GLOBAL_BATCH = 7
"""Of eight rows: a step of four rows and three, then one of one row and none."""
PULLED = Levers(micro_batch=1, recompute=2, loss_chunk=16, keep_attention=True)
PULLED_IN_THREE = replace(PULLED, keep_attention=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Of one training."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    weights: dict[str, Tensor]
    slots: dict[str, Tensor]
    logprobs: Tensor
    """Without gradients, after the last step."""
    facts: dict[str, Any] = field(default_factory=dict)


THREE = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 512, "stage3_max_reuse_distance": 1024}
"""Every tensor of the tiny model divided, and some of them gathered ahead."""


def make_engine(kind: Kind | None, ranks: Ranks, device: Device, *, halves: bool = False) -> TrainEngine:
    match kind:
        case None:
            return SINGLE_PROCESS
        case "ddp":
            return DdpEngine(ranks)
        case "fsdp2":
            return FsdpEngine(ranks, device=device, compute=torch.bfloat16 if halves else None)
        case "zero2":
            return ZeroEngine(ranks, device=device, config=zero_config(2, device))
        case "zero3":
            return ZeroEngine(ranks, device=device, config=zero_config(3, device, **THREE))


def zero_config(stage: Literal[2, 3], device: Device, **more: Any) -> dict[str, Any]:
    """As finefit makes it; `more` as a user's own file would say it."""
    asked = make_stage(engine=DeepSpeed(kind="deepspeed", devices=2, stage=stage), device=device)
    return deepspeed_config(asked, {"zero_optimization": {"reduce_bucket_size": 4096, **more}})


def make_stage(**changes: Any) -> Stage:
    values: dict[str, Any] = {
        "name": "sft",
        "seed": 7,
        "device": "cpu",
        "precision": "fp32",
        "deterministic": False,
        "threads": 1,
        "model": FolderModel(kind="folder", path="model"),
        "model_name": "tiny",
        "model_fingerprint": "f" * 64,
        "tuning": LORA,
        "objective": Sft(kind="sft"),
        "engine": Single(kind="single"),
        "template": "chat",
        "template_sha256": "t" * 64,
        "optimizer": ADAMW.model_copy(update={"clip": CLIP}),
        "schedule": "constant",
        "total_steps": STEPS,
        "warmup_steps": 0,
        "steps_per_epoch": 2,
        "num_rows": 8,
        "global_batch": GLOBAL_BATCH,
        "levers": PULLED_IN_THREE,
        "predicted_bytes": 0,
        "save": Save(),
        "validate_every": None,
        "on_nan": NanStop(kind="stop"),
        "evaluate": (),
        "prepared": {},
    }
    return Stage(**values | changes)


class Training:
    """A model, its optimizer and its engine."""

    def __init__(
        self,
        kind: Kind | None,
        ranks: Ranks,
        model: nn.Module,
        *,
        precision: str = "fp32",
        kernels: Literal["torch", "fused"] = "torch",
        device: Device = "cpu",
    ) -> None:
        self.kind, self.ranks, self.model, self.device = kind, ranks, model, device
        levers = PULLED_IN_THREE if kind == "zero3" else replace(PULLED, kernels=kernels)
        self.engine = make_engine(
            kind, ranks, device, halves=precision == "bf16" and isinstance(model, LlamaForCausalLM)
        )
        self.forward = self.engine.around(lambda: self._bind(levers, precision))
        self.optimizer = self.engine.prepare(model, lambda m: make_optimizer(m, ADAMW, device=device))
        self.forward = self.engine.around(lambda: self._bind(levers, precision))  # as when levers change
        self.examples = unequal_examples()

    def _bind(self, levers: Levers, precision: str) -> Forward:
        apply_levers(self.model, levers)
        autocast = autocast_for(self.device, precision)
        return bind(self.model, loss_chunk=levers.loss_chunk, autocast=autocast, is_fused=levers.kernels == "fused")

    def step(self, step: int, decide: Callable[[Tensor], bool] = bool, *, clip: float | None = CLIP) -> StepOutcome:
        """One row at a time."""
        order: dict[str, Any] = {"num_rows": len(self.examples), "global_batch": GLOBAL_BATCH, "seed": 3}
        rows = rows_of_rank(step, rank=self.ranks.rank, num_ranks=self.ranks.size, **order)
        own = self._cut(rows)
        most = max(self.ranks.gather(len(own)))
        return optimizer_step(
            own,
            forward=self.forward,
            objective=sft_loss,
            optimizer=self.optimizer,
            clip=clip,
            decide=decide,
            count=sum(batch.num_supervised for batch in self._cut(rows_of_step(step, **order))),
            engine=self.engine,
            idle=self._cut([0]) * (most - len(own)),
        )

    def _cut(self, rows: Sequence[int]) -> list[Batch]:
        batches = micro_batches([self.examples[row] for row in rows], micro_batch=1, pad=RENDERER.pad) if rows else []
        return [batch.moved(lambda tensor: tensor.to(self.device)) for batch in batches]

    def gradients(self) -> dict[str, Tensor]:
        return {name: self._whole_gradient(p).clone() for name, p in trainable(self.model).items()}

    def _whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        if self.kind in ("zero2", "zero3"):
            import deepspeed

            found: Tensor = deepspeed.utils.safe_get_full_grad(parameter)
            return found
        assert parameter.grad is not None
        return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad

    def weights(self) -> dict[str, Tensor]:
        return {name: self.engine.weight(p).clone() for name, p in self.model.named_parameters()}

    def slots(self) -> dict[str, Tensor]:
        return {
            f"{name}/{slot}": torch.as_tensor(value).clone()
            for name, p in trainable(self.model).items()
            for slot, value in self.engine.slots(self.optimizer, p).items()
        }

    def logprobs(self) -> Tensor:
        """Of all rows, on every rank."""
        with torch.no_grad():
            return torch.cat([self.forward(batch) for batch in self._cut(range(len(self.examples)))])

    def put(self, weights: dict[str, Tensor], slots: dict[str, Tensor]) -> None:
        self.optimizer.state.clear()
        for name, parameter in trainable(self.model).items():
            self.engine.put_weight(parameter, weights[name])
            kept = {
                key.rsplit("/", 1)[1]: value.clone() for key, value in slots.items() if key.rsplit("/", 1)[0] == name
            }
            self.engine.put_slots(self.optimizer, parameter, kept)


def train(training: Training, *, first: int = 0, steps: int = STEPS) -> Left:
    gradients: dict[str, Tensor] = {}

    def look(finite: Tensor) -> bool:
        gradients.update(training.gradients())
        return bool(finite)

    training.logprobs()  # what looks and does not learn may come in between
    outcomes = []
    for step in range(first, first + steps):
        decide = look if step == first else (lambda _: False) if step == LEFT_OUT else bool
        outcomes.append(training.step(step, decide))
    held = facts(training)
    return Left(
        losses=[outcome.loss.item() for outcome in outcomes],
        norms=[outcome.grad_norm.item() for outcome in outcomes],
        gradients=gradients,
        weights=training.weights(),
        slots=training.slots(),
        logprobs=training.logprobs(),
        facts=held,
    )


def facts(training: Training) -> dict[str, Any]:
    """How much of it this rank holds."""
    parameters = dict(training.model.named_parameters())
    return {
        "divided": sum(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in parameters.values()),
        "parameters": len(parameters),
        "values_here": sum(_held(p) for p in parameters.values()),
        "values": sum(training.engine.weight(p).numel() for p in parameters.values()),
        "state_here": sum(
            _held(v) for slots in training.optimizer.state.values() for name, v in slots.items() if name != "step"
        ),
        "state": sum(value.numel() for name, value in training.slots().items() if not name.endswith("/step")),
        "dtypes": {str(p.dtype) for p in parameters.values()},
    }


def _held(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        return tensor.to_local().numel()
    return tensor.numel() + (int(tensor.ds_tensor.numel()) if hasattr(tensor, "ds_tensor") else 0)


def mixed(seed: int = 0) -> nn.Module:
    """A frozen base in bf16 with adapters in fp32."""
    base = make_model(seed=seed).to(torch.bfloat16)
    model: nn.Module = make_trainable(base, LORA, name="tiny")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.manual_seed(len(name))
            nn.init.normal_(parameter, std=0.3)
    return model


def alone(folder: Path) -> None:
    """The reference, once for all engines: trainings, and how they go on."""
    for name, tuning in TUNINGS.items():
        training = Training(None, ONE_RANK, tuned(tuning))
        torch.save(train(training), folder / f"alone-{name}.pt")
        torch.save(train(training, first=STEPS, steps=3), folder / f"alone-{name}-on.pt")
    torch.save(train(Training(None, ONE_RANK, mixed(), precision="bf16"), steps=2), folder / "alone-mixed.pt")
    torch.save(train(Training(None, ONE_RANK, tuned(LORA), kernels="fused"), steps=2), folder / "alone-fused.pt")
    torch.save(train(Training(None, ONE_RANK, tuned(FULL), precision="bf16"), steps=2), folder / "alone-halves.pt")


def as_rank(rank: int, size: int, kind: Kind, folder: Path, port: int) -> None:
    """One process of two: the same trainings, then another model put into the reference's place that goes on from
    there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = dist.new_group(backend="gloo")
    assert group is not None
    ranks = ManyRanks(group)
    for name, tuning in TUNINGS.items():
        training = Training(kind, ranks, tuned(tuning))
        torch.save(train(training), folder / f"{kind}-{name}-{rank}.pt")
        other = Training(kind, ranks, tuned(tuning, seed=0))
        other.step(0)  # whatever it was, it is replaced
        reference: Left = torch.load(folder / f"alone-{name}.pt", weights_only=False)
        other.put(reference.weights, reference.slots)
        torch.save(train(other, first=STEPS, steps=3), folder / f"{kind}-{name}-on-{rank}.pt")
    torch.save(train(Training(kind, ranks, mixed(), precision="bf16"), steps=2), folder / f"{kind}-mixed-{rank}.pt")
    torch.save(train(Training(kind, ranks, tuned(LORA), kernels="fused"), steps=2), folder / f"{kind}-fused-{rank}.pt")
    if kind == "fsdp2":
        torch.save(
            train(Training(kind, ranks, tuned(FULL), precision="bf16"), steps=2), folder / f"{kind}-halves-{rank}.pt"
        )
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
