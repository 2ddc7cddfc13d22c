"""Finished runs that tests write by hand: records alone, no weights, no training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import Journal
from finefit.artifacts.forecasts import Plan, Resolved
from finefit.artifacts.records import Facts, Inputs, Levers, Run, read_record, write_record
from finefit.artifacts.rundir import RunDir, StageDir
from finefit.artifacts.stage_records import (
    DatasetScores,
    EvalItem,
    EvalRequest,
    EvalResult,
    EvalStage,
    Score,
    Stage,
    StageResult,
)
from finefit.facts.files import FileFact
from finefit.facts.machine import Machine
from finefit.spec.load import parse_spec, spec_to_json
from finefit.spec.models import FolderModel
from finefit.spec.schema import Evaluation, Single
from finefit.stats.metrics import Metric, rate
from tests.evals import LIMIT, SUBJECT, make_item, make_result
from tests.forecasts import make_forecast

SPEC = """\
name: tiny
seed: 7
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 4}
data:
  train: [{path: train.jsonl}]
  test: {path: test.jsonl}
optimizer: {lr: 1e-2}
"""
MACHINE = Machine(
    host="one",
    platform="Linux",
    python="3.11.2",
    cpu_model="a processor",
    num_cores=2,
    memory_bytes=2**34,
    cards=(),
    cards_problem=None,
    versions={"torch": "2.11.0", "rich": "14.0"},
)
FILE = FileFact(path="train.jsonl", size_bytes=1000, sha256="a" * 64)
HIT = rate("hit")


def make_run(
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    results: Mapping[str, Sequence[float | EvalItem]] | None = None,
    machine: Machine = MACHINE,
    train: FileFact = FILE,
    levers: Levers | None = None,
    status: Any = "finished",
    finefit: str = "0.5",
    **evaluation: Any,
) -> RunDir:
    """`results`: by checkpoint (base, checkpoint-6), the hits of items 0, 1, ... or the items themselves, of the task
    exact_match."""
    run, where = RunDir(folder), RunDir(folder).stage(1, "sft")
    spec = parse_spec(SPEC, where="spec.yaml", overrides=tuple(overrides))
    chosen = levers or Levers(micro_batch=2)
    (where.checkpoints / "checkpoint-6").mkdir(parents=True)
    (where.checkpoints / "final").symlink_to("checkpoint-6")
    run.spec_json.write_text(spec_to_json(spec), encoding="utf-8")
    stage = Stage(
        name="sft",
        seed=spec.seed,
        device="cpu",
        precision="fp32",
        deterministic=False,
        threads=1,
        model=FolderModel(kind="folder", path="model"),
        model_name="model",
        model_fingerprint=SUBJECT.model_fingerprint,
        tuning=spec.tuning,
        objective=spec.objective,
        engine=Single(kind="single"),
        template="chat",
        template_sha256=SUBJECT.template_sha256,
        optimizer=spec.optimizer,
        schedule="cosine",
        total_steps=6,
        warmup_steps=1,
        steps_per_epoch=6,
        num_rows=24,
        global_batch=spec.global_batch,
        levers=chosen,
        predicted_bytes=1,
        save=spec.save,
        validate_every=None,
        on_nan=spec.on_nan,
        evaluate=(),
        prepared={"test.jsonl": SUBJECT.items_sha256},
    )
    write_record(where.stage, stage)
    decided = {"device": "cpu", "precision": "fp32", "total_steps": 6, "levers.micro_batch": chosen.micro_batch}
    forecast = make_forecast(
        peak_bytes=2 * 2**30,
        step_seconds=2.0,
        tokens_per_second=50.0,
        total_seconds=12.0,
        price_per_hour=3.6,
        cost=0.012,
    )
    values = {key: Resolved(value=value, source="auto") for key, value in decided.items()}
    write_record(run.plan, Plan(stages={"sft": values}, forecasts={"sft": forecast}))
    inputs = Inputs(
        data={"train": ((train,),), "test": ((FILE,),)},
        model="model",
        model_fingerprint="f" * 64,
        template_sha256="e" * 64,
    )
    write_record(run.facts, Facts(machine=machine, inputs=inputs))
    write_record(
        run.run,
        Run(name=spec.name, digest="1" * 64, finefit=finefit, created="2026-01-01T00:00:00+00:00", status=status),
    )
    ended = StageResult(
        step=6,
        total_steps=6,
        checkpoint="checkpoint-6",
        trainable_parameters=1,
        parameters=2,
        tokens=600,
        seconds=15.0,
        peak_bytes=5 * 2**29,
    )
    write_record(where.result, ended)
    with Journal(where.metrics) as metrics:
        metrics.write(event="started", step=0)
        for step in range(1, 7):
            metrics.write(step=step, loss=3.0 / step, tokens=100, seconds=2.5)
        metrics.write(event="validated", step=6, validation_loss=0.7)
    for checkpoint, answered in (results or {}).items():
        write_result(where, checkpoint, answered, seed=spec.seed, **evaluation)
    return run


def split_by_dataset(run: RunDir, sizes: Mapping[str, int]) -> None:
    """So many items of the final checkpoint's result come from each, in their order; what is recorded of each is wrong
    on purpose."""
    path = run.stage(1, "sft").evaluation("exact_match", "checkpoint-6").result
    result = read_record(path, EvalResult)
    names = [name for name, size in sizes.items() for _ in range(size)]
    items = tuple(replace(item, dataset=name) for item, name in zip(result.items, names, strict=True))
    wrong = {name: DatasetScores(n=size, coverage=1.0, metrics=result.metrics) for name, size in sizes.items()}
    write_record(path, replace(result, items=items, by_dataset=wrong))


def make_bare(
    folder: Path,
    scores: Sequence[float],
    *,
    weights: str | None = None,
    manifest: str | None = None,
    name: str = "model",
    **evaluation: Any,
) -> RunDir:
    """A model that was only evaluated."""
    run, where = RunDir(folder), RunDir(folder).stage(1, "eval")
    where.path.mkdir(parents=True)
    subject = replace(SUBJECT, weights=weights, manifest_sha256=manifest)
    write_record(where.eval_stage, EvalStage(name=name, subject=subject, prompt_tokens=9, num_items=len(scores)))
    write_record(
        run.run,
        Run(
            name="eval-m",
            digest="2" * 64,
            finefit="0.5",
            created="2026-01-01T00:00:00+00:00",
            kind="eval",
            status="finished",
        ),
    )
    write_result(where, name, scores, weights=weights, manifest_sha256=manifest, **evaluation)
    return run


def write_result(
    where: StageDir,
    checkpoint: str,
    answered: Sequence[float | EvalItem],
    *,
    task: Any = "exact_match",
    metrics: tuple[Metric, ...] = (HIT,),
    limit: int | None = None,
    signature: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    **subject: Any,
) -> None:
    items = tuple(
        one if isinstance(one, EvalItem) else make_item(at, hit=float(one)) for at, one in enumerate(answered)
    )
    evaluation = Evaluation.model_validate({"task": task, "limit": limit, **(settings or {})})
    request = EvalRequest(
        checkpoint=checkpoint, evaluation=evaluation, subject=replace(SUBJECT, **subject), batch_limit=LIMIT
    )
    paths = where.evaluation(evaluation.label, checkpoint, limit)
    paths.folder.mkdir(parents=True, exist_ok=True)
    write_record(paths.request, request)
    recorded = {metric.name: Score(value=0.5, low=0.1, high=0.9) for metric in metrics}
    more = {
        "metrics": recorded,
        "definitions": metrics,
        "signature": dict(signature or {}),
        "peak_bytes": 2**29,
        "predicted_bytes": 2**29,
    }
    write_record(paths.result, make_result(checkpoint, items, task=evaluation.label, **more))


def spoil(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
