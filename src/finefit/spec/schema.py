"""What a user may ask for. Frozen; an unknown key is an error.

A choice is a union on `kind`, so an option exists only where it means something.
"""

import re
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from finefit.spec.every import Every, Interval
from finefit.spec.models import Model, Tuning
from finefit.spec.part import LABEL, Part, Share
from finefit.spec.rows import Data
from finefit.spec.tasks import Judge, OwnTask, Task


class Sft(Part):
    """`sft`: the loss of a language model on the supervised tokens."""

    kind: Literal["sft"]


class Dpo(Part):
    """`dpo`: of each preference pair the chosen answer becomes likelier than the rejected one, measured from the starting model."""

    kind: Literal["dpo"]
    beta: float = Field(0.1, gt=0)
    """How strongly the model is held to where it started."""
    reference: Literal["auto", "cached"] = "auto"
    """Where the starting model's log-probabilities come from. `auto`: from the same weights without the adapter, or with a frozen copy of the adapter
    that training goes on from; `cached` (and always for tuning without an adapter): computed once for all rows before the first step."""


class Router(Part):
    """`router`: the language-model loss of a mixture of experts, and what keeps its router from sending every token to the same ones."""

    kind: Literal["router"]
    balance: float = Field(0.01, ge=0)
    """Weight of the balance of each row's tokens over the experts, a mean over the layers: 1 where they are spread evenly, as many as there are
    experts where all go to one. Computed row by row, so that the micro-batch does not change it; without effect where every expert answers."""


Objective = Annotated[Sft | Dpo | Router, Field(discriminator="kind")]


class AdamW(Part):
    kind: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """`adamw_8bit` (needs bitsandbytes and a CUDA device) keeps both moments in 8 bits: lossy, 2 bytes per trained parameter instead of 8.
    `paged_`: the moments move to host memory when the card is full."""
    lr: float = Field(gt=0)
    """The peak of the schedule, as written: never scaled by batch or number of cards."""
    weight_decay: float = Field(0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float | None = Field(1.0, gt=0)
    """Largest norm of the whole gradient; `null` for no clipping."""


class Schedule(Part):
    kind: Literal["cosine", "linear", "constant"] = "cosine"
    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    warmup: Share | Annotated[int, Field(ge=1)] = 0.03
    """Over which the learning rate rises from 0: a share of all steps below 1, or a whole number of steps."""

    @model_validator(mode="after")
    def _one_length(self) -> "Schedule":
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                "epochs and steps are both given; keep one (on the command line, --set schedule.epochs=null removes the other)"
            )
        return self


class Save(Part):
    every: Every = Interval(unit="steps", count=200)
    """`200 steps`, `epoch` or `15 minutes`; the end of the run is always saved."""
    keep: int = Field(3, ge=1)
    """Checkpoints kept, besides the best, the newest verified and the one that the run resumed from."""


class NanStop(Part):
    kind: Literal["stop"]


class NanSkip(Part):
    kind: Literal["skip"]
    at_most: int = Field(3, ge=1)
    """Steps left out over the whole run before it stops."""


class NanRollBack(Part):
    kind: Literal["roll_back"]
    at_most: int = Field(3, ge=1)
    """Returns to the last checkpoint over the whole run before it stops."""


OnNan = Annotated[NanStop | NanSkip | NanRollBack, Field(discriminator="kind")]


class Levers(Part):
    """Exact levers: none of them changes the gradient."""

    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows in memory at once; gradients are accumulated up to the global batch."""
    recompute: Annotated[int, Field(ge=0)] | Literal["auto", "none", "all"] = "auto"
    """Layers whose activations are computed again in backward instead of kept, counted from the first."""
    keep_attention: bool | Literal["auto"] = "auto"
    """Recomputed layers keep their attention outputs: a little memory against the dearest part of long rows."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto", "none"] = "auto"
    """Supervised tokens whose logits exist at once; `none` holds those of the whole micro-batch."""
    offload: Literal["auto", "none", "inputs"] = "auto"
    """`inputs`: the input of every recomputed layer waits in pinned host memory."""
    mlp_tiles: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Pieces of a row that pass an MLP one after the other, each computed again in backward; 1 for none."""
    adapter_inputs: Literal["auto", "bf16", "fp32"] = "auto"
    """What an adapter's input is kept in; peft's own fp32 copy holds no more than bf16 when the product is taken in bf16."""
    kernels: Literal["auto", "torch", "fused"] = "auto"
    """`fused`: an adapter in one autograd node with its layer, the gradient of a frozen head taken together with its loss, and on a card norms,
    rotary embedding and gated MLPs by Liger's kernels (needs liger-kernel). `torch`: the libraries' own operations."""
    update: Literal["auto", "after", "inside"] = "auto"
    """`inside`: each tensor is updated as soon as its gradient is there, which is then given back; only where it is asked for, without clipping and
    with the whole step in one micro-batch. `auto` is `after`."""
    compile: bool = False
    """Layers compiled by torch.compile, with `kernels: torch`; not those of a mixture of experts. Its memory is planned as that of the layers as they
    are, which need no less."""


class Single(Part):
    """One process."""

    kind: Literal["single"]


class Parallel(Part):
    """A whole copy of the model on each device; gradients are summed (torch's DDP)."""

    kind: Literal["ddp"]
    devices: int = Field(ge=1)
    """Processes, one for each card, or on a CPU as many as are asked for; of one node where there are several."""


class FullyShard(Part):
    """Weights, gradients and optimizer state divided over the devices (torch's fully_shard)."""

    kind: Literal["fsdp2"]
    devices: int = Field(ge=1)


class DeepSpeed(Part):
    """DeepSpeed's ZeRO: 2 divides gradients and optimizer state, 3 the weights too."""

    kind: Literal["deepspeed"]
    devices: int = Field(ge=1)
    stage: Literal[2, 3] = 2
    config: str | None = None
    """A DeepSpeed JSON of your own, relative to the spec file; what contradicts the spec is refused by name."""


class AutoEngine(Part):
    """One process for one device; for several the mildest sharding that fits: ddp, then fsdp2."""

    kind: Literal["auto"]
    devices: int | None = Field(None, ge=1)
    """None: one, or as many as `card` names."""


Engine = Annotated[AutoEngine | Single | Parallel | FullyShard | DeepSpeed, Field(discriminator="kind")]


class LocalLauncher(Part):
    kind: Literal["local"]


class SlurmLauncher(Part):
    kind: Literal["slurm"]
    nodes: int = Field(1, ge=1)
    partition: str | None = None
    minutes: int = Field(1440, ge=1)
    """Time limit of the job; before it ends the job saves, and is queued again."""
    account: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    """Further `#SBATCH` options by name, such as {constraint: a100}."""


Launcher = Annotated[LocalLauncher | SlurmLauncher, Field(discriminator="kind")]


class Tracker(Part):
    """Fed from the run's own metrics; whatever befalls a tracker, the run goes on."""

    kind: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str | None = None
    """By default the name of the run."""


class Evaluation(Part):
    task: Task
    """A name, or a mapping with `kind` and the task's own keys."""
    name: str | None = Field(None, pattern=LABEL)
    """Where one kind of task is evaluated in two ways."""
    limit: int | None = Field(None, ge=1)
    """A seeded sample of the test rows instead of all of them."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Which sources of `data.test` are asked, by name, where there are several: each data set has a metric of its own. By default all."""
    max_new_tokens: int = Field(256, ge=1)
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Answers generated at a time; `auto` is what the plan finds room for."""
    judge: Judge | None = None
    checkpoints: Literal["final", "all"] = "final"
    """Which of the run's checkpoints are scored at its end."""
    base: bool = True
    """Score the starting model too: a result without its baseline says little."""

    @property
    def label(self) -> str:
        """Names the evaluation in files and tables."""
        if self.name is not None:
            return self.name
        return PurePath(self.task.path).stem if isinstance(self.task, OwnTask) else self.task.kind

    @model_validator(mode="after")
    def _can_be_called(self) -> "Evaluation":
        if not re.fullmatch(LABEL, self.label):
            raise ValueError(
                f"a task is called as its file is, and {self.label!r} is no name; "
                "give name: with letters, digits, `_` and `-`, 64 at most, a letter or digit first"
            )
        return self


class Validation(Part):
    every: Every | None = None
    """Besides every save, which always validates: the best is chosen among the saved."""


class Common(Part):
    """What is said once, of one stage or of many."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run directory: runs/<name>-<n>."""
    seed: int = Field(42, ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device where there is one. `cuda` without one is refused, not replaced."""
    card: str = "auto"
    """What the plan is for: a card's name, `24GiB`, `8xA100-40GB`, `cpu`, or `auto` (what this machine has free now). A run takes the card
    that is there, and of a named one no more than its size."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto` is bf16 on a card that has it, fp16 with loss scaling on an older one, fp32 on a CPU."""
    deterministic: bool = False
    """Bit-identical resume on a card too, at some speed; a CPU always has it."""
    trackers: tuple[Tracker, ...] = ()


class Training(Part):
    """What is trained and how, whatever model it starts from."""

    tuning: Tuning
    data: Data
    objective: Objective = Sft(kind="sft")
    optimizer: AdamW
    schedule: Schedule = Schedule(epochs=1)
    global_batch: int = Field(16, ge=1)
    """Rows per optimizer step. The planner never changes it."""
    levers: Levers | Literal["auto"] = "auto"
    engine: Engine = AutoEngine(kind="auto")
    save: Save = Save()
    validation: Validation = Field(default=Validation(), alias="validate")
    on_nan: OnNan = NanStop(kind="stop")
    """A step whose loss or gradient is not finite is never applied; this says what follows."""
    evaluate: tuple[Evaluation, ...] = ()
    """Tasks that every finished run is scored on, in a process of its own."""

    @model_validator(mode="after")
    def _one_name_each(self) -> Self:
        require_labels(self.evaluate)
        self._require_sources()
        return self

    @model_validator(mode="after")
    def _routers_can_be_heard(self) -> Self:
        if isinstance(self.objective, Router) and isinstance(self.levers, Levers) and self.levers.compile:
            raise ValueError(
                "levers.compile: true hides what routers say, which objective router is computed from; set levers.compile: false"
            )
        return self

    def _require_sources(self) -> None:
        labels = [source.label for source in self.data.test_sources()]
        for evaluation in self.evaluate:
            if lost := [name for name in evaluation.sources if name not in labels]:
                raise ValueError(
                    f"evaluate: {evaluation.label} is asked of {', '.join(lost)}; data.test has {', '.join(labels) or 'no source'}"
                )

    def max_prompt_tokens(self) -> int | None:
        """Longer prompts of test rows are cut, so that an answer still ends within the lengths that were trained; None where nothing is cut."""
        if self.data.too_long != "cut_prompt":
            return None
        answer = max((evaluation.max_new_tokens for evaluation in self.evaluate), default=0)
        return self.data.max_tokens - min(answer, self.data.max_tokens // 2)


def require_labels(evaluations: tuple[Evaluation, ...]) -> None:
    labels = [evaluation.label for evaluation in evaluations]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"evaluate has two evaluations called {', '.join(twice)}; give them a name each")


class _Started(Common):
    """The keys of a spec that stand between those of all stages and those of a training."""

    model: Model
    launcher: Launcher = LocalLauncher(kind="local")
    """Where the processes are started: here, or by a SLURM scheduler (needs submitit)."""


class Spec(Training, _Started):
    """One stage. Several are a `Pipeline` (`spec/stages.py`)."""
