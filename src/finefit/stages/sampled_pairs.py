"""Several answers of a model to each row, scored by a task: the best against the worst. Sampling is seeded by row.

Answers are journaled batch by batch. A stage that was killed asks only for the others, in the batches that they would
have been in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finefit.artifacts import cache
from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.artifacts.records import Levers, StageJob
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Subject
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row
from finefit.errors import Resumable, SpecError, is_out_of_memory
from finefit.evaluate.batches import answers, limit_for
from finefit.evaluate.decoding import ChooseTokens, sample_by, uniform_draws
from finefit.evaluate.external_model import ExternalModel, rows_spec, stage_model
from finefit.evaluate.score import finished, made_with, score_item
from finefit.evaluate.worker import held_bytes
from finefit.model.attention import attention_here, for_answers
from finefit.model.load import base_bits, load_for_answers, weight_dtype
from finefit.negatives.pairs import ScoredAnswer, UnusedRow, content_key, from_scored, pair_record, usable_rows
from finefit.plan.client import eval_limits_here
from finefit.spec.data import Data, Source
from finefit.spec.schema import Evaluation
from finefit.spec.stages import MakePairs, Sampled
from finefit.spec.tasks import LmEval, TruthfulQa
from finefit.stages.make_pairs import PairSplit, require_pairs, rows_of_splits, write_pairs
from finefit.step.levers import apply_levers
from finefit.tasks import NoResult, Reply, Task, make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    """A loaded model and its settings."""

    model: torch.nn.Module
    renderer: Renderer
    batch_limit: EvalBatchLimit
    """For the longest of all rows, also where only some are left."""
    task: Task
    method: Sampled
    device: str
    seed: int
    loaded_bytes: int
    journal: Path
    """Of answers."""
    by: str
    """A digest of device, precision and versions: only answers made the same way are reused."""


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """The journal beside `out` may hold answers of a process that was killed."""
    stage = job.stage
    assert isinstance(stage, MakePairs)
    method = stage.method
    assert isinstance(method, Sampled)
    task, rows = askable_rows(stage, method, Path(job.base), job.seed)
    asked = [row for kept, _ in rows.values() for row in kept]
    sampler = _sampler(job, method, task, asked, StageDir(out.parent).answers)
    splits = {
        split: _split(_scored(sampler, split, kept), unused, method.margin, job.seed)
        for split, (kept, unused) in rows.items()
    }
    return write_pairs(job, splits, out, loaded_bytes=sampler.loaded_bytes)


def askable_rows(
    stage: MakePairs, method: Sampled, base: Path, seed: int
) -> tuple[Task, dict[str, tuple[list[Row], list[UnusedRow]]]]:
    """The task that scores the answers, and for every split the rows that can be asked and those that cannot. A split
    without rows to ask is refused."""
    task = _task(method, base)
    found: dict[str, tuple[list[Row], list[UnusedRow]]] = {}
    for split, rows in rows_of_splits(stage, base, seed).items():
        kept, unused = usable_rows(rows, lambda row: _unusable(row, task))
        found[split] = list(kept.values()), unused
        if not kept:
            require_pairs({split: PairSplit(read=len(unused), used=0, pairs=(), unused=tuple(unused), audit=None)})
    return task, found


def _task(method: Sampled, base: Path) -> Task:
    """One that scores a generated answer by itself, and whose first metric is better when higher."""
    if not isinstance(method.task, LmEval | TruthfulQa):
        task = make_task(Evaluation(task=method.task, max_new_tokens=method.max_new_tokens), base=base)
        if task.generates and task.metrics[0].better == "higher":
            return task
    raise SpecError(
        f"method.task {method.task.kind} does not score a single generated answer",
        "name a task that does, such as rouge or exact_match",
    )


def _unusable(row: Row, task: Task) -> str | None:
    if row.images:
        return "has images, which are not shown to the model"
    try:
        task.require(row)
    except NoResult as reason:
        return f"has a reference that {task.name} cannot read: {reason}"
    return None


def _sampler(job: StageJob, method: Sampled, task: Task, rows: Sequence[Row], journal: Path) -> _Sampler:
    data = Data(train=(Source(path=""),), template=method.template)
    external = stage_model(job.name, job.models["method.model"], rows_spec(data, seed=job.seed))
    renderer = open_renderer(external.tokenizer, method.template)
    longest = max(len(renderer.prompt_tokens(row.prompt, tools=row.tools)) for row in rows)
    batch_limit = _batch_limit(job, method, external, longest=longest)
    model = _loaded(job, external, batch_limit)
    if batch_limit.mlp_tiles > 1:
        apply_levers(model, Levers(micro_batch=1, mlp_tiles=batch_limit.mlp_tiles))
    return _Sampler(
        model=model,
        renderer=renderer,
        batch_limit=limit_for(model, [longest + method.max_new_tokens], batch_limit),
        task=task,
        method=method,
        device=job.device,
        seed=job.seed,
        loaded_bytes=held_bytes(job.device),
        journal=journal,
        by=cache.content_key([job.device, job.precision, made_with()])[:16],
    )


def _loaded(job: StageJob, external: ExternalModel, batch_limit: EvalBatchLimit) -> torch.nn.Module:
    try:
        return load_for_answers(
            external.resolved.folder,
            external.weights,
            device=job.device,
            dtype=torch.bfloat16 if job.precision == "bf16" else weight_dtype(job.precision, external.tuning),
            attention=for_answers(attention_here(job.device, job.precision, external.resolved.folder)),
            bits=base_bits(external.tuning),
            num_cards=batch_limit.devices if batch_limit.is_spread else 1,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{external.resolved.name} does not fit in the memory that is free: {error}"
        raise Resumable(problem, "free the card and give the same command again") from None


def _batch_limit(job: StageJob, method: Sampled, external: ExternalModel, *, longest: int) -> EvalBatchLimit:
    """As for an evaluation of the same task."""
    subject = Subject(
        model=external.model,
        model_name=external.resolved.name,
        model_fingerprint=external.resolved.fingerprint,
        tuning=external.tuning,
        device=job.device,
        precision=job.precision,
        threads=torch.get_num_threads(),
        seed=job.seed,
        template=method.template,
        template_sha256="",
        items_sha256="",
    )
    evaluation = Evaluation(task=method.task, max_new_tokens=method.max_new_tokens)
    return eval_limits_here(subject, Path(job.base), (evaluation,), longest)[evaluation.label]


def _split(
    scored: Sequence[tuple[Row, list[ScoredAnswer]]], unused: list[UnusedRow], margin: float, seed: int
) -> PairSplit:
    found = from_scored(scored, seed=seed, margin=margin)
    pairs, missing = tuple(pair_record(pair) for pair in found.pairs), (*unused, *found.unused)
    return PairSplit(read=len(scored) + len(unused), used=len(pairs), pairs=pairs, unused=missing, audit=found.audit)


def _scored(sampler: _Sampler, split: str, rows: Sequence[Row]) -> list[tuple[Row, list[ScoredAnswer]]]:
    """An answer without a result gets the score that the task gives to no result."""
    task, texts = sampler.task, _texts(sampler, split, rows)
    metric = task.metrics[0]
    items = [
        (row, score_item(task, at, row, prompt="", reply=Reply(text=text)))
        for at, (row, text) in enumerate(
            (row, text) for row, answers in zip(rows, texts, strict=True) for text in answers
        )
    ]
    scores = [item.scores[metric.name] for item in finished(task, items)]
    samples = [ScoredAnswer(answer=item.answer, score=score) for (_, item), score in zip(items, scores, strict=True)]
    each = sampler.method.samples
    return [(row, samples[at * each : (at + 1) * each]) for at, row in enumerate(rows)]


def _texts(sampler: _Sampler, split: str, rows: Sequence[Row]) -> list[list[str]]:
    """The answers to each row. A killed process left whole batches, so the others are formed as they would have
    been."""
    each = sampler.method.samples
    asked = [(row, sample) for row in rows for sample in range(each)]
    found = {
        at: text
        for line in read_lines(sampler.journal)
        if (line["by"], line["split"]) == (sampler.by, split)
        for at, text in line["answers"]
    }
    todo = [at for at in range(len(asked)) if at not in found]
    with Journal(sampler.journal) as journal:
        for batch in _batches(sampler, [asked[at] for at in todo]):
            answered = {todo[at]: text for at, text in batch.items()}
            journal.write(by=sampler.by, split=split, answers=list(answered.items()))
            found |= answered
    return [[found[at * each + sample] for sample in range(each)] for at in range(len(rows))]


def _batches(sampler: _Sampler, asked: Sequence[tuple[Row, int]]) -> Iterator[dict[int, str]]:
    """Answers by index, one batch at a time."""
    method, renderer = sampler.method, sampler.renderer
    together: Sequence[int] = ()
    found: dict[int, str] = {}

    def choose(batch: Sequence[int]) -> ChooseTokens:
        nonlocal together
        together = batch
        said = [
            uniform_draws(sampler.seed, content_key(row), sample, steps=method.max_new_tokens)
            for row, sample in (asked[at] for at in batch)
        ]
        return sample_by(said, temperature=method.temperature, device=sampler.device)

    for at, answer in answers(
        sampler.model,
        renderer,
        [renderer.prompt_tokens(row.prompt, tools=row.tools) for row, _ in asked],
        max_new_tokens=method.max_new_tokens,
        batch_limit=sampler.batch_limit,
        device=sampler.device,
        warn=partial(print, "warning:"),
        choose=choose,
    ):
        found[at] = answer.text
        if len(found) == len(together):
            yield found
            found = {}
