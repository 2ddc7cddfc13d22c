"""Writes checkpoints of a training, names the best and the last, and restores the newest verified one."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from finefit.artifacts.checkpoint import (
    list_checkpoints,
    name_checkpoint,
    newest_verified,
    rotate,
    step_of,
    write_checkpoint,
)
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage, TrainState
from finefit.errors import FinefitError, Resumable, RunError
from finefit.model.family import save_weights
from finefit.model.frozen_weights import FrozenWeights, require_frozen_unchanged, weight_bytes
from finefit.model.saved_weights import restore_weights, whole_weights
from finefit.step.engine import SINGLE_PROCESS, Layout
from finefit.step.state import optimizer_tensors, random_state, restore_state, save_state, state_bytes
from finefit.train.ranks import ONE_RANK, Ranks

STATE = "finefit_state.json"
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """The state of several ranks, gathered on the first."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random_of_ranks: Sequence[dict[str, Tensor]]


@dataclass(slots=True, kw_only=True)
class Saver:
    """All ranks have one: all gather and restore a checkpoint, the first one writes it."""

    where: StageDir
    stage: Stage
    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: Layout = SINGLE_PROCESS
    ranks: Ranks = ONE_RANK
    kept: FrozenWeights | None = None
    """The source of the frozen weights where only a part of a model is trained."""
    resumed_from: int | None = None
    last: int | None = None
    """The step of the newest checkpoint that this process wrote or resumed from."""

    def save(self, state: TrainState) -> Path:
        checkpoint = self.where.checkpoints / f"checkpoint-{state.step}"
        gathered = self._gathered() if self.last != state.step and self.ranks.size > 1 else None
        _first_acts(self.ranks, lambda: self._write(state, checkpoint, gathered))
        self.last = state.step
        return checkpoint

    def restore(self, checkpoint: Path) -> TrainState:
        """Model, optimizer and random numbers as they were when the checkpoint was written."""
        restore_weights(self.model, checkpoint, self.layout.put_weight)
        restore_state(checkpoint, self.model, self.optimizer, self.layout, rank=self.ranks.rank)
        state = read_record(checkpoint / STATE, TrainState)
        self.last = self.resumed_from = state.step
        return state

    def _gathered(self) -> _Gathered:
        keeps = self.ranks.is_first
        return _Gathered(
            weights=whole_weights(self.model, self.layout.weight, keeps=keeps, only_trained=self.kept is not None),
            optimizer=optimizer_tensors(self.model, self.optimizer, self.layout, keeps=keeps),
            random_of_ranks=self.ranks.gather(random_state()),
        )

    def _write(self, state: TrainState, checkpoint: Path, gathered: _Gathered | None) -> None:
        folder = self.where.checkpoints
        if self.last != state.step:
            tokenizer = sum(file.stat().st_size for file in self.where.tokenizer.rglob("*"))
            needed = weight_bytes(self.model, self.kept) + state_bytes(self.model) + tokenizer + _SLACK_BYTES
            write_checkpoint(
                folder, state.step, lambda staging: self._fill(staging, state, gathered), needed_bytes=needed
            )
        if state.best is not None:
            name_checkpoint(folder, "best", folder / f"checkpoint-{state.best.step}")
        if state.step == self.stage.total_steps:
            if self.kept is not None:
                require_frozen_unchanged(self.kept, checkpoint)
            name_checkpoint(folder, "final", checkpoint)
        others = (state.best.step if state.best else None, self.resumed_from)
        protected = {state.step, *(step for step in others if step is not None)}
        rotate(folder, keep=self.stage.save.keep, protected=protected)

    def _fill(self, staging: Path, state: TrainState, gathered: _Gathered | None) -> None:
        save_weights(self.model, staging, gathered.weights if gathered else None, self.kept)
        shutil.copytree(self.where.tokenizer, staging, copy_function=shutil.copy, dirs_exist_ok=True)
        state_of, numbers = (gathered.optimizer, gathered.random_of_ranks) if gathered else (None, None)
        save_state(staging, self.model, self.optimizer, gathered=state_of, random_of_ranks=numbers)
        write_record(staging / STATE, state)
        (staging / "README.md").write_text(_model_card(self.stage, state), encoding="utf-8")


def _first_acts(ranks: Ranks, act: Callable[[], None]) -> None:
    """The others wait for it, and fail with it."""
    error: FinefitError | None = None
    if ranks.is_first:
        try:
            act()
        except FinefitError as found:
            error = found
    failure: Failure | None = ranks.gather(error and Failure.of(error))[0]
    if error is not None:
        raise error
    if failure is not None:
        kind = Resumable if failure.exit_code == Resumable.exit_code else RunError
        raise kind(f"the first rank could not save: {failure.problem}", failure.remedy)


def find_checkpoint(where: StageDir, stage: Stage) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint of this stage. One of another model, template or adapter is an error, not
    skipped."""
    checkpoint, rejected = newest_verified(where.checkpoints)
    if checkpoint is None and list_checkpoints(where.checkpoints):
        problem = "no checkpoint verifies:\n" + "\n".join(rejected)
        raise RunError(problem, "remove the damaged checkpoints to start from the beginning")
    if checkpoint is not None:
        _require_own(checkpoint, read_record(checkpoint / STATE, TrainState), stage)
    return checkpoint, rejected


def agreed_checkpoint(where: StageDir, stage: Stage, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The same on all ranks: copies of different steps would silently train on together."""
    checkpoint, rejected = find_checkpoint(where, stage)
    names = [name or "none" for name in ranks.gather(checkpoint.name if checkpoint else None)]
    if len(set(names)) > 1:
        seen = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        problem = f"the ranks do not find the same checkpoint: {seen}"
        raise RunError(problem, "check that every node reads the same run directory, then try again")
    return checkpoint, rejected


def _require_own(checkpoint: Path, state: TrainState, stage: Stage) -> None:
    def model(of: TrainState | Stage) -> str:
        return f"{of.model_name} ({of.model_fingerprint[:12]})"

    def tuning(of: TrainState | Stage) -> str:
        return repr(of.tuning.model_dump(exclude={"adapter"}))  # the adapter is part of the model's fingerprint

    pairs = {
        "model": (model(state), model(stage)),
        "prompt template": (state.template_sha256[:12], stage.template_sha256[:12]),
        "tuning": (tuning(state), tuning(stage)),
        "step": (str(state.step), str(step_of(checkpoint))),
    }
    differing = [f"{what}: the checkpoint has {a}, this stage {b}" for what, (a, b) in pairs.items() if a != b]
    if differing:
        problem = f"{checkpoint.name} belongs to another run: " + "; ".join(differing)
        raise RunError(problem, "remove it from this run's checkpoints folder")


def _model_card(stage: Stage, state: TrainState) -> str:
    library = "peft" if stage.tuning.kind == "lora" else "transformers"
    return f"""---
base_model: {stage.model_name}
library_name: {library}
tags: [finefit, {stage.tuning.kind}]
---
Step {state.step} of {stage.total_steps} of a {stage.tuning.kind} fine-tuning of {stage.model_name} with finefit:
{state.tokens:,} tokens seen, {state.supervised_tokens:,} of them supervised; global batch {stage.global_batch}, learning rate {stage.optimizer.lr:g},
{stage.schedule} schedule, seed {stage.seed}, {stage.precision}. Prompt template {state.template_sha256[:12]} ({stage.template}).
"""  # noqa: E501
