"""Writes checkpoints of a live training, keeps their names, and reads the newest verified one back."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from finefit.artifacts.checkpoint import list_checkpoints, name_checkpoint, newest_verified, rotate, step_of, write_checkpoint
from finefit.artifacts.records import Stage, TrainState, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import RunError
from finefit.model.load import restore_weights, save_weights, weight_bytes
from finefit.step.state import restore_state, save_state, state_bytes

STATE = "finefit_state.json"
_SLACK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Saver:
    where: StageDir
    stage: Stage
    model: nn.Module
    optimizer: torch.optim.Optimizer
    resumed_from: int | None = None
    last: int | None = None
    """The step of the newest checkpoint that this process wrote or resumed from."""

    def save(self, state: TrainState) -> Path:
        folder = self.where.checkpoints
        checkpoint = folder / f"checkpoint-{state.step}"
        if self.last != state.step:
            write_checkpoint(folder, state.step, lambda staging: self._fill(staging, state), needed_bytes=self._needed_bytes())
            self.last = state.step
        if state.best is not None:
            name_checkpoint(folder, "best", folder / f"checkpoint-{state.best.step}")
        if state.step == self.stage.total_steps:
            name_checkpoint(folder, "final", checkpoint)
        protected = {
            state.step,
            *([state.best.step] if state.best else []),
            *([self.resumed_from] if self.resumed_from is not None else []),
        }
        rotate(folder, keep=self.stage.save.keep, protected=protected)
        return checkpoint

    def restore(self, checkpoint: Path) -> TrainState:
        """Model, optimizer and random numbers as they were when the checkpoint was written."""
        restore_weights(self.model, checkpoint)
        restore_state(checkpoint, self.model, self.optimizer)
        state = read_record(checkpoint / STATE, TrainState)
        self.last = self.resumed_from = state.step
        return state

    def _fill(self, staging: Path, state: TrainState) -> None:
        save_weights(self.model, staging)
        for file in self.where.tokenizer.iterdir():
            shutil.copy(file, staging / file.name)
        save_state(staging, self.model, self.optimizer)
        write_record(staging / STATE, state)
        (staging / "README.md").write_text(_model_card(self.stage, state), encoding="utf-8")

    def _needed_bytes(self) -> int:
        tokenizer = sum(file.stat().st_size for file in self.where.tokenizer.iterdir())
        return weight_bytes(self.model) + state_bytes(self.model) + tokenizer + _SLACK_BYTES


def find_checkpoint(where: StageDir, stage: Stage) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint of this stage. One of another model, template or adapter is refused, not skipped."""
    checkpoint, rejected = newest_verified(where.checkpoints)
    if checkpoint is None and list_checkpoints(where.checkpoints):
        raise RunError("no checkpoint verifies:\n" + "\n".join(rejected), "remove the damaged checkpoints to start from the beginning")
    if checkpoint is not None:
        _belongs(checkpoint, read_record(checkpoint / STATE, TrainState), stage)
    return checkpoint, rejected


def _belongs(checkpoint: Path, state: TrainState, stage: Stage) -> None:
    differing = [
        f"{what}: the checkpoint has {theirs}, this stage {ours}"
        for what, theirs, ours in (
            (
                "model",
                f"{state.model_name} ({state.model_fingerprint[:12]})",
                f"{stage.model_name} ({stage.model_fingerprint[:12]})",
            ),
            ("prompt template", state.template_sha256[:12], stage.template_sha256[:12]),
            ("tuning", repr(state.tuning), repr(stage.tuning)),
            ("step", str(state.step), str(step_of(checkpoint))),
        )
        if theirs != ours
    ]
    if differing:
        raise RunError(f"{checkpoint.name} belongs to another run: " + "; ".join(differing), "remove it from this run's checkpoints folder")


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
"""
