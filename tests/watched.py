"""Runs as a page finds them, written by hand line by line as a training writes them."""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import Journal
from finefit.artifacts.checkpoint import name_checkpoint, write_checkpoint
from finefit.artifacts.forecasts import Plan
from finefit.artifacts.records import (
    FinishedStage,
    PipelineState,
    Run,
    StageMemory,
    StageState,
    read_record,
    write_record,
)
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import EvalItem, Stage
from finefit.spec import Period
from finefit.spec.load import parse_any, spec_to_json
from finefit.spec.schema import Evaluation
from tests.forecasts import GIB
from tests.runs import make_run

STEP_SECONDS = 2.0


@dataclass
class Watched:
    """A run of 120 steps in a training's own files; `steps` writes on."""

    run: RunDir
    rate: float = 1.0
    step: int = 0
    save_every: int = 20
    began: float = field(default_factory=lambda: time.time() - 240)

    def start(self) -> None:
        self.event("started", step=0)
        self.memory("start", 0, 2.1)
        self.memory("loaded", 0, 14.25)

    def event(self, kind: str, **values: Any) -> None:
        with Journal(self.run.stages()[0].metrics) as metrics:
            metrics.write(event=kind, **values)

    def memory(self, instant: str, step: int, gib: float) -> None:
        sizes = {"resident_bytes": int(3.1 * GIB), "allocated_bytes": int(gib * GIB), "reserved_bytes": int(gib * GIB)}
        sizes |= {"host_free_bytes": int(41.5 * GIB), "disk_free_bytes": (700 - step) * GIB}
        with Journal(self.run.stages()[0].memory) as memory:
            memory.write(instant=instant, step=step, time=self.began, peak_bytes=int(gib * GIB), **sizes)

    def steps(self, until: int, **more: Any) -> None:
        """With a validation and a checkpoint every few steps."""
        while self.step < until:
            self.step += 1
            self._step(self.step, **more)
            if self.step % self.save_every == 0:
                self.event("validated", step=self.step, validation_loss=round(self.loss_at(self.step) + 0.05, 4))
                self.save()

    def loss_at(self, step: int) -> float:
        return 1.1 + 2.2 * math.exp(-self.rate * step / 35)

    def _step(self, step: int, **more: Any) -> None:
        noise = random.Random(step).gauss(0, 0.08)
        with Journal(self.run.stages()[0].metrics) as metrics:
            line = {
                "step": step,
                "epoch": round(step / 60, 4),
                "loss": round(self.loss_at(step) + noise, 6),
                "learning_rate": 2e-4 * min(1.0, step / 10) * (1 - step / 130),
                "grad_norm": round(0.4 + abs(noise), 4),
                "tokens": 4096,
                "supervised_tokens": 1200 + step,
                "rows": 16,
                "seconds": STEP_SECONDS,
                "wait_seconds": 0.04,
                "forward_seconds": round(0.6 + noise / 4, 4),
                "backward_seconds": round(1.2 - noise / 4, 4),
                "update_seconds": 0.12,
                "tokens_per_second": round(2048 + 800 * noise, 1),
                "card_utilisation": round(0.93 + noise / 10, 3),
                "card_watts": round(310 + 80 * noise, 1),
                "card_celsius": round(71 - 12 * math.exp(-step / 15) + 4 * noise, 1),
                "time": round(self.began + STEP_SECONDS * step, 3),
                "batch": f"{step:016x}",
            }
            metrics.write(**line | more)
        self.memory("step", step, 20.0 + 0.004 * step)

    def save(self) -> None:
        folder = self.run.stages()[0].checkpoints

        def fill(staging: Path) -> None:
            (staging / "adapter_model.safetensors").write_bytes(b"w" * 200_000)

        checkpoint = write_checkpoint(folder, self.step, fill, needed_bytes=1)
        name_checkpoint(folder, "best", checkpoint)
        self.event("saved", step=self.step, checkpoint=checkpoint.name)

    def end(self) -> None:
        folder = self.run.stages()[0].checkpoints
        name_checkpoint(folder, "final", folder / f"checkpoint-{self.step}")
        write_record(self.run.run, replace(read_record(self.run.run, Run), status="finished"))


def make_watched(
    folder: Path,
    *,
    total_steps: int = 120,
    rate: float = 1.0,
    results: Mapping[str, Sequence[float | EvalItem]] | None = None,
) -> Watched:
    """A training on a card that has begun and made no step yet."""
    run = make_run(folder, status="running", results=results)
    where = run.stages()[0]
    for path in (where.metrics, where.result, where.checkpoints / "final"):
        path.unlink()
    (where.checkpoints / "checkpoint-6").rmdir()
    stage = read_record(where.stage, Stage)
    every = Period(unit="steps", count=20)
    changes: dict[str, Any] = {"total_steps": total_steps, "steps_per_epoch": 60, "validate_every": every}
    changes |= {"save": stage.save.model_copy(update={"every": every}), "device": "cuda"}
    changes |= {"evaluate": (Evaluation.model_validate({"task": "exact_match"}),)}
    plan = read_record(run.plan, Plan)
    changes["predicted_bytes"] = plan.forecasts["sft"].reserved_bytes
    write_record(where.stage, replace(stage, **changes))
    own: dict[str, Any] = {"peak_bytes": int(22.0 * GIB), "tokens_per_second": 2048.0, "step_seconds": STEP_SECONDS}
    forecasts = {name: replace(one, total_seconds=245.0, **own) for name, one in plan.forecasts.items()}
    write_record(run.plan, replace(plan, forecasts=forecasts))
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.log.write_text("step 0/120  loading the model\n", encoding="utf-8")
    run.spec_yaml.write_text("name: tiny\n", encoding="utf-8")
    watched = Watched(run, rate)
    watched.start()
    return watched


PIPELINE = """\
name: medical
defaults:
  data: {train: [{path: train.jsonl}]}
  optimizer: {lr: 1e-4}
stages:
  sft: {kind: train, model: {kind: folder, path: model}}
  pairs: {kind: make_pairs, train: [{path: train.jsonl}]}
  dpo:
    kind: train
    model: {kind: stage, name: sft}
    objective: {kind: dpo}
    data: {train: [{path: stage://pairs/train.jsonl}]}
  scores:
    kind: evaluate
    models: {dpo: {kind: stage, name: dpo}}
    data: {test: {path: test.jsonl}}
    evaluate: [{task: exact_match}]
"""


def make_watched_pipeline(folder: Path) -> RunDir:
    """SFT and pairs are done, DPO runs on both, and scores wait."""
    run, stages = RunDir(folder), folder / "stages"
    sft, dpo = make_watched(stages / "1-sft"), make_watched(stages / "3-dpo")
    sft.steps(120)
    sft.end()
    dpo.steps(64)
    (stages / "2-pairs").mkdir()
    memory = StageMemory(device="cuda", before_bytes=0, loaded_bytes=None, peak_bytes=20 * GIB, after_bytes=0)
    for place, kind, seconds in (("1-sft", "train", 2713.0), ("2-pairs", "make_pairs", 211.0)):
        own: dict[str, Any] = {"name": place[2:], "kind": kind, "seconds": seconds, "memory": memory}
        done = FinishedStage(key="k", inputs={}, output_digest="d", finefit="1", **own)
        write_record(StageDir(stages / place).done, done)
    StageDir(stages / "3-dpo").begun.write_text("{}", encoding="utf-8")
    states = (
        StageState(name="sft", kind="train", place="stages/1-sft", status="done"),
        StageState(name="pairs", kind="make_pairs", place="stages/2-pairs", status="done"),
        StageState(name="dpo", kind="train", place="stages/3-dpo", status="running"),
        StageState(name="scores", kind="evaluate", place="stages/4-scores", status="waiting"),
    )
    write_record(run.state, PipelineState(stages=states))
    record = read_record(sft.run.run, Run)
    write_record(run.run, replace(record, name="medical", kind="pipeline", status="running"))
    run.spec_yaml.write_text(PIPELINE, encoding="utf-8")
    run.spec_json.write_text(spec_to_json(parse_any(PIPELINE, where="spec.yaml")), encoding="utf-8")
    return run
