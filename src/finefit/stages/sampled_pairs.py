"""Samples several answers of a model to each row and scores them by a task: the best is paired against the worst.
Sampling is seeded by row. Answers are journaled batch by batch: a stage that was killed requests only the missing ones,
in the same batches."""

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
from finefit.stages.worker import serve
from finefit.step.levers import apply_levers
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    model: torch.nn.Module
    renderer: Renderer
    batch_limit: EvalBatchLimit
    """The limit for the longest of all rows, even if only some rows are left."""
    task: Task
    method: Sampled
    job: StageJob
    loaded_bytes: int
    journal: Path
    """The journal of answers."""
    by: str
    """A digest of device, precision and versions: only answers made the same way are reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledLine:
    """A batch of answers in the journal, each with its number."""

    by: str
    split: str
    answers: list[tuple[int, str]]


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """The journal beside `out` may contain answers of a process that was killed."""
    stage = job.stage
    assert isinstance(stage, MakePairs)
    method = stage.method
    assert isinstance(method, Sampled)
    task, rows = askable_rows(stage, method, Path(job.base), job.seed)
    asked = [row for kept, _ in rows.values() for row in kept]
    sampler = _sampler(job, method, task, asked, StageDir(out.parent).answers)
    splits = {}
    for split, (kept, unused) in rows.items():
        found = from_scored(_scored(sampler, split, kept), seed=job.seed, margin=method.margin)
        read, pairs, left = len(kept) + len(unused), list(map(pair_record, found.pairs)), (*unused, *found.unused)
        splits[split] = PairSplit(read=read, used=len(pairs), pairs=pairs, unused=left, audit=found.audit)
    return write_pairs(job, splits, out, loaded_bytes=sampler.loaded_bytes)


def askable_rows(
    stage: MakePairs, method: Sampled, base: Path, seed: int
) -> tuple[Task, dict[str, tuple[list[Row], list[UnusedRow]]]]:
    """The scoring task and, by split, the rows that can be sampled and the others. It is an error if none can."""
    evaluation, task = Evaluation(task=method.task, max_new_tokens=method.max_new_tokens), None
    if not isinstance(method.task, LmEval | TruthfulQa):
        task = make_task(evaluation, base=base)
    if task is None or not task.generates or task.metrics[0].better != "higher":
        problem = f"method.task {method.task.kind} does not score a single generated answer"
        raise SpecError(problem, "name a task that does, such as rouge or exact_match")
    found: dict[str, tuple[list[Row], list[UnusedRow]]] = {}
    for split, rows in rows_of_splits(stage, base, seed).items():
        kept, unused = usable_rows(rows, lambda row: _unusable(row, task))
        found[split] = list(kept.values()), unused
        if not kept:
            require_pairs({split: PairSplit(read=len(unused), used=0, pairs=(), unused=unused, audit=None)})
    return task, found


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
    batch_limit = eval_limits_here(subject, Path(job.base), (evaluation,), longest)[evaluation.label]
    model = _loaded(job, external, batch_limit)
    if batch_limit.mlp_tiles > 1:
        apply_levers(model, Levers(micro_batch=1, mlp_tiles=batch_limit.mlp_tiles))
    return _Sampler(
        model=model,
        renderer=renderer,
        batch_limit=limit_for(model, [longest + method.max_new_tokens], batch_limit),
        task=task,
        method=method,
        job=job,
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
            num_cards=batch_limit.devices if batch_limit.is_split_over_cards else 1,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = f"{external.resolved.name} does not fit in the memory that is free: {error}"
        raise Resumable(problem, "free the card and give the same command again") from None


def _scored(sampler: _Sampler, split: str, rows: Sequence[Row]) -> list[tuple[Row, list[ScoredAnswer]]]:
    """Several answers to each row. A killed process left only whole batches, so the remaining ones are formed as they
    would have been. An answer without a result gets the score that the task gives to no result."""
    task, each = sampler.task, sampler.method.samples
    asked = [(row, sample) for row in rows for sample in range(each)]
    texts = {
        at: text
        for line in read_lines(sampler.journal, _SampledLine)
        if (line.by, line.split) == (sampler.by, split)
        for at, text in line.answers
    }
    todo = [at for at in range(len(asked)) if at not in texts]
    with Journal(sampler.journal) as journal:
        for batch in _batches(sampler, [asked[at] for at in todo]):
            answered = {todo[at]: text for at, text in batch.items()}
            journal.write(by=sampler.by, split=split, answers=list(answered.items()))
            texts |= answered
    replies = [(at, row, Reply(text=texts[at])) for at, (row, _) in enumerate(asked)]
    items = [(row, score_item(task, at, row, prompt="", reply=reply)) for at, row, reply in replies]
    scores = [item.scores[task.metrics[0].name] for item in finished(task, items)]
    samples = [ScoredAnswer(answer=item.answer, score=score) for (_, item), score in zip(items, scores, strict=True)]
    return [(row, samples[at * each : (at + 1) * each]) for at, row in enumerate(rows)]


def _batches(sampler: _Sampler, asked: Sequence[tuple[Row, int]]) -> Iterator[dict[int, str]]:
    """Answers by index, one batch at a time."""
    method, renderer = sampler.method, sampler.renderer
    together: Sequence[int] = ()
    found: dict[int, str] = {}

    def choose(batch: Sequence[int]) -> ChooseTokens:
        nonlocal together
        together = batch
        said = [
            uniform_draws(sampler.job.seed, content_key(row), sample, steps=method.max_new_tokens)
            for row, sample in (asked[at] for at in batch)
        ]
        return sample_by(said, temperature=method.temperature, device=sampler.job.device)

    for at, answer in answers(
        sampler.model,
        renderer,
        [renderer.prompt_tokens(row.prompt, tools=row.tools) for row, _ in asked],
        max_new_tokens=method.max_new_tokens,
        batch_limit=sampler.batch_limit,
        device=sampler.job.device,
        warn=partial(print, "warning:"),
        choose=choose,
    ):
        found[at] = answer.text
        if len(found) == len(together):
            yield found
            found = {}


if __name__ == "__main__":
    serve(make)
