"""The spec of one training. A choice is a union on `kind`, so an option exists only where it has a meaning."""

import re
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from finefit.spec import LABEL, Every, Part, Period, Share, require_labels
from finefit.spec.data import Data
from finefit.spec.models import Full, Lora, Model, Subset, Tuning
from finefit.spec.served import Judge, Server
from finefit.spec.tasks import WITH_LIKELIHOODS, CustomTask, Task


class Sft(Part):
    """`sft`: the language-model loss on the supervised tokens."""

    kind: Literal["sft"]


class Dpo(Part):
    """`dpo`: in each preference pair, the chosen answer becomes likelier than the rejected one, relative to the
    starting model."""

    kind: Literal["dpo"]
    beta: float = Field(0.1, gt=0)
    """How strongly the model is held to its start."""
    reference: Literal["auto", "cached"] = "auto"
    """Source of the starting model's log-probabilities. `auto`: the same weights without the adapter, or with a frozen
    copy of the adapter that training continues from. `cached` (and always for tuning without an adapter): computed once
    for all rows before the first step."""


class Router(Part):
    """`router`: the language-model loss of a mixture of experts, with a loss that balances its routers."""

    kind: Literal["router"]
    balance: float = Field(0.01, ge=0)
    """Weight of the balance loss, a mean over the layers: 1 if a row's tokens are spread evenly over the experts, the
    number of experts if all go to one. Computed per row, so that the micro-batch does not change it; without effect if
    every expert answers."""


Objective = Annotated[Sft | Dpo | Router, Field(discriminator="kind")]
_LR_LIMIT = 0.1
"""No AdamW training is known to work near this learning rate."""


class AdamW(Part):
    kind: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """`adamw_8bit` (needs bitsandbytes and a CUDA device) stores both moments in 8 bits: lossy, 2 bytes per trained
    parameter instead of 8. `paged_`: the moments move to host memory when the card is full."""
    lr: float = Field(gt=0)
    """The peak of the schedule, below 0.1; never scaled by batch or number of cards. By default 2e-4 for LoRA, 1e-5 for
    any other tuning."""
    weight_decay: float = Field(0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0)
    """Largest norm of the whole gradient; `null` for no clipping."""

    @field_validator("lr")
    @classmethod
    def _can_converge(cls, lr: float) -> float:
        if lr >= _LR_LIMIT:
            problem = f"{lr:g} is far above what AdamW can train with, so it is probably a typo"
            remedy = f"give less than {_LR_LIMIT:g}: 2e-4 is usual for LoRA, 1e-5 for full fine-tuning"
            raise ValueError(f"{problem}; {remedy}")
        return lr


def usual_lr(tuning_kind: str) -> float:
    """Adapters start at zero and take larger steps than full weights."""
    return 2e-4 if tuning_kind == "lora" else 1e-5


def default_optimizer(tuning: Lora | Full | Subset) -> AdamW:
    return AdamW(lr=usual_lr(tuning.kind))


class Schedule(Part):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    epochs: int | float | None = Field(None, gt=0)
    """Passes over the training rows; 0.5 is the first half of the steps of an epoch."""
    steps: int | None = Field(None, ge=1)
    warmup: Share | Annotated[int, Field(ge=1)] = 0.03
    """The learning rate rises from 0 over a share of all steps (below 1), or over a whole number of steps."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            remedy = "keep one (on the command line, --set schedule.epochs=null removes the other)"
            raise ValueError(f"epochs and steps are both given; {remedy}")
        return self

    def num_steps(self, per_epoch: int) -> int:
        """Returns at least one step, however small the requested part of an epoch is."""
        return self.steps or max(1, round((self.epochs or 1) * per_epoch))


class Save(Part):
    every: Every = Period(unit="steps", count=200)
    """`200 steps`, `epoch` or `15 minutes`; the end of the run is always saved."""
    keep: int = Field(3, ge=1)
    """Checkpoints to keep besides the best, the newest verified and the one that the run resumed from."""


class NanStop(Part):
    kind: Literal["stop"]


class NanSkip(Part):
    kind: Literal["skip"]
    at_most: int = Field(3, ge=1)
    """Skipped steps over the whole run before it stops."""


class NanRollBack(Part):
    kind: Literal["roll_back"]
    at_most: int = Field(3, ge=1)
    """How often a run may return to its last checkpoint before it stops."""


OnNan = Annotated[NanStop | NanSkip | NanRollBack, Field(discriminator="kind")]


class LeverSettings(Part):
    """Exact levers: none of them changes the gradient."""

    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows in memory at once; gradients are accumulated up to the global batch."""
    recompute: Annotated[int, Field(ge=0)] | Literal["auto", "none", "all"] = "auto"
    """Layers whose activations are recomputed in backward instead of kept, counted from the first."""
    keep_attention: bool | Literal["auto"] = "auto"
    """Recomputed layers keep their attention outputs: little memory for the most expensive part of long rows."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto", "none"] = "auto"
    """Supervised tokens whose logits exist at once; `none`: those of the whole micro-batch."""
    offload: Literal["auto", "none", "inputs"] = "auto"
    """`inputs`: the inputs of recomputed layers are kept in pinned host memory."""
    mlp_tiles: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Pieces in which a row passes an MLP, each recomputed in backward; 1 for none."""
    adapter_inputs: Literal["auto", "bf16", "fp32"] = "auto"
    """Type in which adapter inputs are kept; peft's fp32 copy holds no more than bf16 if the product is in bf16."""
    kernels: Literal["auto", "torch", "fused"] = "auto"
    """`fused`: an adapter in one autograd node with its layer, the gradient of a frozen head together with its loss,
    and on a card norms, rotary embedding and gated MLPs by Liger's kernels (needs liger-kernel). `torch`: the
    libraries' own operations."""
    update: Literal["auto", "after", "inside"] = "auto"
    """`inside`: each tensor is updated as soon as its gradient exists, which is then freed; never chosen automatically,
    only without clipping and with the whole step in one micro-batch. `auto` is `after`."""
    compile: bool = False
    """Layers are compiled by torch.compile, with `kernels: torch`; not those of a mixture of experts. Memory is planned
    for the uncompiled layers, which need no less."""


class Single(Part):
    """One process."""

    kind: Literal["single"]


class Ddp(Part):
    """A full copy of the model on each device; gradients are summed (torch's DDP)."""

    kind: Literal["ddp"]
    devices: int = Field(ge=1)
    """Processes on each node: one per card, or on a CPU any number."""


class Fsdp2(Part):
    """Weights, gradients and optimizer state sharded over the devices (torch's fully_shard)."""

    kind: Literal["fsdp2"]
    devices: int = Field(ge=1)


class DeepSpeed(Part):
    """DeepSpeed's ZeRO: stage 2 shards gradients and optimizer state, 3 the weights too."""

    kind: Literal["deepspeed"]
    devices: int = Field(ge=1)
    stage: Literal[2, 3] = 2
    config: str | None = None
    """Your own DeepSpeed JSON, relative to the spec file; keys that contradict the spec are refused."""


class AutoEngine(Part):
    """One process for one device; for several, the least sharding that fits: ddp, then fsdp2."""

    kind: Literal["auto"]
    devices: int | None = Field(None, ge=1)
    """By default one, or as many as `card` names."""


Engine = Annotated[AutoEngine | Single | Ddp | Fsdp2 | DeepSpeed, Field(discriminator="kind")]


class LocalLauncher(Part):
    kind: Literal["local"]


class SlurmLauncher(Part):
    kind: Literal["slurm"]
    nodes: int = Field(1, ge=1)
    partition: str | None = None
    minutes: int = Field(1440, ge=1)
    """Time limit of the job; before it ends, the job saves and is queued again."""
    account: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    """Further `#SBATCH` options by name, such as {constraint: a100}."""


Launcher = Annotated[LocalLauncher | SlurmLauncher, Field(discriminator="kind")]


class Tracker(Part):
    """Fed from the run's own metrics; a failing tracker does not stop the run."""

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str | None = None
    """By default the name of the run."""


class Evaluation(Part):
    task: Task
    """A name, or a mapping with `kind` and the keys of the task."""
    name: str | None = Field(None, pattern=LABEL)
    """Needed if one kind of task is evaluated in two ways."""
    limit: int | None = Field(None, ge=1)
    """A seeded sample of the test rows instead of all of them."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Names of the sources of `data.test` to evaluate, if each has a metric of its own. By default all."""
    max_new_tokens: int = Field(256, ge=1)
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Answers generated at a time; `auto`: as many as fit."""
    judge: Judge | None = None
    server: Server | None = None
    checkpoints: Literal["final", "all"] = "final"
    """The run's checkpoints that are scored at its end."""
    base: bool = True
    """Also score the starting model: a result without its baseline says little."""

    @property
    def label(self) -> str:
        if self.name is not None:
            return self.name
        return PurePath(self.task.path).stem if isinstance(self.task, CustomTask) else self.task.kind

    @model_validator(mode="after")
    def _server_can_answer(self) -> "Evaluation":
        if self.server is not None and isinstance(self.task, WITH_LIKELIHOODS):
            problem = f"server: {self.task.kind} needs likelihoods of given answers, which a server does not give"
            raise ValueError(f"{problem}; leave server out, or name a task that reads an answer")
        return self

    @model_validator(mode="after")
    def _has_a_name(self) -> "Evaluation":
        if not re.fullmatch(LABEL, self.label):
            problem = f"a task is named after its file, and {self.label!r} is not a name"
            remedy = (
                "give name: with letters, digits, `_` and `-`, at most 64 characters, starting with a letter or digit"
            )
            raise ValueError(f"{problem}; {remedy}")
        return self


class Validation(Part):
    every: Every | None = None
    """In addition to every save, which always validates: the best is chosen among the saved."""


class Common(Part):
    """Keys that apply to one stage or to all."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run directory: `runs/<name>-<n>`. By default the name of the spec file."""
    seed: int = Field(42, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one. `cuda` without one is an error."""
    card: str = "auto"
    """The card to plan for: a card's name, `24GiB`, `8xA100-40GB`, `cpu`, or `auto` (what is free on this machine now).
    A run uses the card of the machine, and no more memory than a named card has."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto`: bf16 on a card that has it, fp16 with loss scaling on older ones, fp32 on a CPU."""
    deterministic: bool = False
    """Bit-identical resume on a card too, at some cost of speed; on a CPU it always is."""
    trackers: tuple[Tracker, ...] = ()


class Training(Part):
    """What is trained and how, from any starting model."""

    tuning: Tuning = Lora(kind="lora")
    data: Data
    objective: Objective = Sft(kind="sft")
    optimizer: AdamW = Field(default_factory=lambda asked: default_optimizer(asked["tuning"]))
    """By default AdamW with lr 2e-4 for LoRA, and with lr 1e-5 for any other tuning."""
    schedule: Schedule = Schedule(epochs=1)
    global_batch: int = Field(16, ge=1)
    """Rows per optimizer step. The planner never changes it."""
    levers: LeverSettings | Literal["auto"] = "auto"
    engine: Engine = AutoEngine(kind="auto")
    save: Save = Save()
    validation: Validation = Field(default=Validation(), alias="validate")
    on_nan: OnNan = NanStop(kind="stop")
    """What happens after a step whose loss or gradient is not finite; it is never applied."""
    evaluate: tuple[Evaluation, ...] = ()
    """Tasks that a finished run is scored on, each in a process of its own."""

    @model_validator(mode="after")
    def _can_be_trained_and_scored(self) -> Self:
        require_labels("evaluate has two evaluations", [evaluation.label for evaluation in self.evaluate])
        labels = [source.label for source in self.data.test_sources()]
        for evaluation in self.evaluate:
            if lost := [name for name in evaluation.sources if name not in labels]:
                there = ", ".join(labels) or "no source"
                raise ValueError(f"evaluate: {evaluation.label} names {', '.join(lost)}; data.test has {there}")
        if isinstance(self.objective, Router) and isinstance(self.levers, LeverSettings) and self.levers.compile:
            problem = "levers.compile: true hides the router outputs that objective router is computed from"
            raise ValueError(f"{problem}; set levers.compile: false")
        return self

    def max_prompt_tokens(self) -> int | None:
        """Longer prompts of test rows are cut, so that an answer ends within the trained lengths; None: no limit."""
        if self.data.too_long != "cut_prompt":
            return None
        answer = max((evaluation.max_new_tokens for evaluation in self.evaluate), default=0)
        return self.data.max_tokens - min(answer, self.data.max_tokens // 2)


class _Started(Common):
    """The keys of a spec that neither all stages nor all trainings have."""

    model: Model
    launcher: Launcher = LocalLauncher(kind="local")
    """Who starts the processes: finefit here, or a SLURM scheduler (needs submitit)."""


class Spec(Training, _Started):
    """One training. A spec with several stages is a `Pipeline`."""
