"""Writes checkpoints of a training, names the best and the last, and restores the newest verified one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finefit.artifacts import checkpoint as checkpoints
from finefit.artifacts.records import Failure, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage, TrainState
from finefit.errors import FinefitError, Resumable, RunError
from finefit.model import saved_weights
from finefit.model.family import save_weights
from finefit.step.engine import SINGLE_PROCESS, Layout
from finefit.step.state import optimizer_tensors, random_state, restore_state, save_state, state_bytes
from finefit.train.ranks import ONE_RANK, Ranks

STATE = "finefit_state.json"
_SLACK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Saver:
    """Every rank has a saver: all gather and restore a checkpoint, and the first writes it."""

    where: StageDir
    stage: Stage
    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: Layout = SINGLE_PROCESS
    ranks: Ranks = ONE_RANK
    kept: saved_weights.FrozenWeights | None = None
    """The source of the frozen weights if only a part of the model is trained."""
    resumed_from: int | None = None
    last: int | None = None
    """The step of the newest checkpoint that this process wrote or resumed from."""

    def save(self, state: TrainState) -> Path:
        checkpoint = self.where.checkpoints / f"checkpoint-{state.step}"
        weights: dict[str, Tensor] | None = None
        gathered: dict[str, Any] = {}
        if self.last != state.step and self.ranks.size > 1:  # else the state is written as it is
            layout, keeps, only_trained = self.layout, self.ranks.is_first, self.kept is not None
            weights = saved_weights.whole_weights(self.model, layout.weight, keeps=keeps, only_trained=only_trained)
            gathered["gathered"] = optimizer_tensors(self.model, self.optimizer, layout, keeps=keeps)
            gathered["random_of_ranks"] = self.ranks.gather(random_state())
        first_acts(self.ranks, lambda: self._write(state, checkpoint, weights, gathered))
        self.last = state.step
        return checkpoint

    def restore(self, checkpoint: Path) -> TrainState:
        saved_weights.restore_weights(self.model, checkpoint, self.layout.put_weight)
        restore_state(checkpoint, self.model, self.optimizer, self.layout, rank=self.ranks.rank)
        state = read_record(checkpoint / STATE, TrainState)
        self.last = self.resumed_from = state.step
        return state

    def _write(
        self, state: TrainState, checkpoint: Path, weights: dict[str, Tensor] | None, gathered: dict[str, Any]
    ) -> None:
        def fill(staging: Path) -> None:
            save_weights(self.model, staging, weights, self.kept)
            shutil.copytree(self.where.tokenizer, staging, copy_function=shutil.copy, dirs_exist_ok=True)
            save_state(staging, self.model, self.optimizer, **gathered)
            write_record(staging / STATE, state)
            (staging / "README.md").write_text(_model_card(self.stage, state), encoding="utf-8")

        folder = self.where.checkpoints
        if self.last != state.step:
            tokenizer = sum(file.stat().st_size for file in self.where.tokenizer.rglob("*"))
            tensors = saved_weights.weight_bytes(self.model, self.kept) + state_bytes(self.model)
            needed_bytes = tensors + tokenizer + _SLACK_BYTES
            checkpoints.write_checkpoint(folder, state.step, fill, needed_bytes=needed_bytes)
        if state.best is not None:
            checkpoints.name_checkpoint(folder, "best", folder / f"checkpoint-{state.best.step}")
        if state.step == self.stage.total_steps:
            if self.kept is not None:
                saved_weights.require_frozen_unchanged(self.kept, checkpoint)
            checkpoints.name_checkpoint(folder, "final", checkpoint)
        others = (state.best.step if state.best else None, self.resumed_from)
        protected = {state.step, *(step for step in others if step is not None)}
        checkpoints.rotate(folder, keep=self.stage.save.keep, protected=protected)


def first_acts(ranks: Ranks, act: Callable[[], None]) -> None:
    """The other ranks wait for the first one and fail if it fails."""
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


def agreed_checkpoint(where: StageDir, stage: Stage, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint of this stage, and a line for each rejected one. A checkpoint of another model,
    template or adapter is an error. All ranks get the same one: copies of different steps would silently train on
    together."""
    checkpoint, rejected = checkpoints.newest_verified(where.checkpoints)
    if checkpoint is None and checkpoints.list_checkpoints(where.checkpoints):
        problem = "no checkpoint verifies:\n" + "\n".join(rejected)
        raise RunError(problem, "remove the damaged checkpoints to start from the beginning")
    if checkpoint is not None:
        _require_own(checkpoint, read_record(checkpoint / STATE, TrainState), stage)
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
        "step": (str(state.step), str(checkpoints.step_of(checkpoint))),
    }
    if differing := [f"{what}: the checkpoint has {a}, this stage {b}" for what, (a, b) in pairs.items() if a != b]:
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
