"""Writes checkpoints of a live training, keeps their names, and reads the newest verified one back."""

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
from finefit.artifacts.trainings import Stage, TrainState
from finefit.errors import FinefitError, Resumable, RunError
from finefit.model.kept import Kept, require_kept
from finefit.model.load import restore_weights, save_weights, weight_bytes, whole_weights
from finefit.step.engine import ALONE, Layout
from finefit.step.state import optimizer_tensors, random_state, restore_state, save_state, state_bytes
from finefit.train.ranks import ONE_RANK, Ranks

STATE = "finefit_state.json"
_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """What lies on several ranks, put together on the first."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random_of_ranks: Sequence[dict[str, Tensor]]


@dataclass(slots=True, kw_only=True)
class Saver:
    """Of every rank: all of them put a checkpoint together and take one up, the first one writes."""

    where: StageDir
    stage: Stage
    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: Layout = ALONE
    ranks: Ranks = ONE_RANK
    kept: Kept | None = None
    """Where the frozen weights of a part of a model are written from."""
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
            weights=whole_weights(self.model, self.layout.weight, keeps=keeps, kept=self.kept),
            optimizer=optimizer_tensors(self.model, self.optimizer, self.layout, keeps=keeps),
            random_of_ranks=self.ranks.gather(random_state()),
        )

    def _write(self, state: TrainState, checkpoint: Path, gathered: _Gathered | None) -> None:
        folder = self.where.checkpoints
        if self.last != state.step:
            write_checkpoint(
                folder,
                state.step,
                lambda staging: self._fill(staging, state, gathered),
                needed_bytes=self._needed_bytes(),
            )
        if state.best is not None:
            name_checkpoint(folder, "best", folder / f"checkpoint-{state.best.step}")
        if state.step == self.stage.total_steps:
            if self.kept is not None:
                require_kept(self.kept, checkpoint)
            name_checkpoint(folder, "final", checkpoint)
        protected = {
            state.step,
            *([state.best.step] if state.best else []),
            *([self.resumed_from] if self.resumed_from is not None else []),
        }
        rotate(folder, keep=self.stage.save.keep, protected=protected)

    def _fill(self, staging: Path, state: TrainState, gathered: _Gathered | None) -> None:
        save_weights(self.model, staging, gathered.weights if gathered else None, self.kept)
        shutil.copytree(self.where.tokenizer, staging, copy_function=shutil.copy, dirs_exist_ok=True)
        if gathered is None:
            save_state(staging, self.model, self.optimizer)
        else:
            save_state(
                staging,
                self.model,
                self.optimizer,
                gathered=gathered.optimizer,
                random_of_ranks=gathered.random_of_ranks,
            )
        write_record(staging / STATE, state)
        (staging / "README.md").write_text(_model_card(self.stage, state), encoding="utf-8")

    def _needed_bytes(self) -> int:
        tokenizer = sum(file.stat().st_size for file in self.where.tokenizer.rglob("*"))
        return weight_bytes(self.model, self.kept) + state_bytes(self.model) + tokenizer + _SLACK_BYTES


def _first_acts(ranks: Ranks, act: Callable[[], None]) -> None:
    """The others wait for it, and end with it where it fails."""
    error: FinefitError | None = None
    if ranks.is_first:
        try:
            act()
        except FinefitError as found:
            error = found
    told: Failure | None = ranks.gather(error and Failure.of(error))[0]
    if error is not None:
        raise error
    if told is not None:
        raise (Resumable if told.exit_code == Resumable.exit_code else RunError)(
            f"the first rank could not save: {told.problem}", told.remedy
        )


def find_checkpoint(where: StageDir, stage: Stage) -> tuple[Path | None, list[str]]:
    """The newest verified checkpoint of this stage. One of another model, template or adapter is refused, not skipped."""
    checkpoint, rejected = newest_verified(where.checkpoints)
    if checkpoint is None and list_checkpoints(where.checkpoints):
        raise RunError(
            "no checkpoint verifies:\n" + "\n".join(rejected),
            "remove the damaged checkpoints to start from the beginning",
        )
    if checkpoint is not None:
        _belongs(checkpoint, read_record(checkpoint / STATE, TrainState), stage)
    return checkpoint, rejected


def agreed_checkpoint(where: StageDir, stage: Stage, ranks: Ranks) -> tuple[Path | None, list[str]]:
    """Of all ranks the same: copies of different steps would train on together without a word."""
    checkpoint, rejected = find_checkpoint(where, stage)
    names = [name or "none" for name in ranks.gather(checkpoint.name if checkpoint else None)]
    if len(set(names)) > 1:
        seen = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise RunError(
            f"the ranks do not find the same checkpoint: {seen}",
            "see that every node reads the same run directory, then try again",
        )
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
            (
                "tuning",
                *(repr(tuning.model_dump(exclude={"adapter"})) for tuning in (state.tuning, stage.tuning)),
            ),  # its adapter by content, above
            ("step", str(state.step), str(step_of(checkpoint))),
        )
        if theirs != ours
    ]
    if differing:
        raise RunError(
            f"{checkpoint.name} belongs to another run: " + "; ".join(differing),
            "remove it from this run's checkpoints folder",
        )


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
