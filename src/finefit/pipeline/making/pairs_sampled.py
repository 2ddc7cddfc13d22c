"""Several answers of a model to each row, scored by a task: the best against the worst. Chance is seeded by row, whatever stands around it.

Answers are written down batch by batch. A stage that was killed asks for the others alone, in the batches that they would have been in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from finefit.artifacts.evaluations import Subject
from finefit.artifacts.forecasts import Room
from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.pipelines import Order
from finefit.artifacts.records import Levers
from finefit.data.falsify.make import Unused, content_key
from finefit.data.falsify.scored import Sample, from_scored
from finefit.data.falsify.written import pair_record
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Row
from finefit.data.tasks import NoResult, Reply, Task, make_task
from finefit.errors import Resumable, SpecError
from finefit.evaluate.answering import held_bytes
from finefit.evaluate.answers import answers, room_for
from finefit.evaluate.decoding import Choose
from finefit.evaluate.sampling import chances, drawn_by
from finefit.evaluate.score import finished, score_item
from finefit.evaluate.versions import made_with
from finefit.model.attention import attention_here, for_answers
from finefit.model.load import base_bits, load_for_answers, weight_dtype
from finefit.pipeline.bare import Bare, wired_bare
from finefit.pipeline.forecasting import rooms_here
from finefit.pipeline.making.pair_splits import Split, require_pairs, rows_of_splits
from finefit.pipeline.questions import plain_spec
from finefit.pipeline.stage_keys import digest
from finefit.spec.rows import Data, Source
from finefit.spec.schema import Evaluation
from finefit.spec.stages import MakePairs, Sampled
from finefit.spec.tasks import LmEval, TruthfulQa
from finefit.step.levers import pull
from finefit.step.shortage import is_shortage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampler:
    """A loaded model and how it is asked."""

    model: torch.nn.Module
    renderer: Renderer
    room: Room
    """For the longest of all rows, whatever is left to be asked."""
    task: Task
    method: Sampled
    device: str
    seed: int
    loaded_bytes: int
    journal: Path
    """Of answers."""
    by: str
    """What made them, in short: others are not taken for its own."""


def sampled_splits(order: Order, stage: MakePairs, method: Sampled, journal: Path) -> tuple[dict[str, Split], int]:
    """And what was held when the model was there and nothing was asked yet. `journal` may hold answers of a process that was killed at the same
    work."""
    task, rows = rows_to_ask(stage, method, Path(order.base), order.seed)
    sampler = _sampler(order, method, task, [row for kept, _ in rows.values() for row in kept], journal)
    splits = {
        split: _split(len(kept) + len(unused), _scored(sampler, split, kept), unused, method.margin, order.seed)
        for split, (kept, unused) in rows.items()
    }
    return splits, sampler.loaded_bytes


def rows_to_ask(
    stage: MakePairs, method: Sampled, base: Path, seed: int
) -> tuple[Task, dict[str, tuple[list[Row], list[Unused]]]]:
    """What the answers will be scored by; of every split the rows that can be asked, and those that cannot. A split without the first is refused."""
    task = _task(method, base)
    found = {split: _sorted_out(rows, task) for split, rows in rows_of_splits(stage, base, seed).items()}
    nothing = {split: unused for split, (kept, unused) in found.items() if not kept}
    require_pairs(
        {
            split: Split(read=len(rows), used=0, pairs=(), unused=tuple(rows), audit=None)
            for split, rows in nothing.items()
        }
    )
    return task, found


def _task(method: Sampled, base: Path) -> Task:
    """One that reads a generated answer alone, and calls more of its first metric better."""
    if not isinstance(method.task, LmEval | TruthfulQa):
        task = make_task(Evaluation(task=method.task, max_new_tokens=method.max_new_tokens), base=base)
        if task.generates and task.metrics[0].better == "higher":
            return task
    raise SpecError(
        f"method.task {method.task.kind} does not say of a written answer alone how good it is",
        "name a task that does, such as rouge or exact_match",
    )


def _sorted_out(rows: Sequence[Row | BadRow], task: Task) -> tuple[list[Row], list[Unused]]:
    kept: dict[str, Row] = {}
    unused: list[Unused] = []
    for row in rows:
        reason = _unfit(row, task)
        key = "" if isinstance(row, BadRow) or reason else content_key(row)
        if key in kept:
            reason = f"says the same as {kept[key].place}"
        if reason:
            unused.append(Unused(place=row.place, reason=reason))
        elif isinstance(row, Row):
            kept[key] = row
    return list(kept.values()), unused


def _unfit(row: Row | BadRow, task: Task) -> str | None:
    if isinstance(row, BadRow):
        return row.reason
    if row.kind == "text":
        return "is plain text, without a prompt and an answer"
    if row.is_good is False:
        return "has an answer that is judged wrong"
    if row.images:
        return "has images, which are not shown to the model"
    try:
        task.require(row)
    except NoResult as reason:
        return f"has a reference that {task.name} cannot read: {reason}"
    return None


def _sampler(order: Order, method: Sampled, task: Task, rows: Sequence[Row], journal: Path) -> _Sampler:
    data = Data(train=(Source(path=""),), template=method.template)
    bare = wired_bare(order.name, order.models["method.model"], plain_spec(data, seed=order.seed))
    renderer = open_renderer(bare.tokenizer, method.template)
    longest = max(len(renderer.prompt_tokens(row.prompt, tools=row.tools)) for row in rows)
    room = _room(order, method, bare, longest=longest)
    model = _loaded(order, bare, room)
    if room.mlp_tiles > 1:
        pull(model, Levers(micro_batch=1, mlp_tiles=room.mlp_tiles))
    return _Sampler(
        model=model,
        renderer=renderer,
        room=room_for(model, [longest + method.max_new_tokens], room),
        task=task,
        method=method,
        device=order.device,
        seed=order.seed,
        loaded_bytes=held_bytes(order.device),
        journal=journal,
        by=digest([order.device, order.precision, made_with()])[:16],
    )


def _loaded(order: Order, bare: Bare, room: Room) -> torch.nn.Module:
    try:
        return load_for_answers(
            bare.located.folder,
            bare.weights,
            device=order.device,
            dtype=torch.bfloat16 if order.precision == "bf16" else weight_dtype(order.precision, bare.tuning),
            attention=for_answers(attention_here(order.device, order.precision, bare.located.folder)),
            bits=base_bits(bare.tuning),
            num_cards=room.devices if room.is_spread else 1,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        problem = f"{bare.located.name} does not fit in the memory that is free: {error}"
        raise Resumable(problem, "free the card and give the same command again") from None


def _room(order: Order, method: Sampled, bare: Bare, *, longest: int) -> Room:
    """As an evaluation of the same task would get it."""
    subject = Subject(
        model=bare.model,
        model_name=bare.located.name,
        model_fingerprint=bare.located.fingerprint,
        tuning=bare.tuning,
        device=order.device,
        precision=order.precision,
        threads=torch.get_num_threads(),
        seed=order.seed,
        template=method.template,
        template_sha256="",
        items_sha256="",
    )
    evaluation = Evaluation(task=method.task, max_new_tokens=method.max_new_tokens)
    return rooms_here(subject, Path(order.base), (evaluation,), longest)[evaluation.label]


def _split(
    read: int, scored: Sequence[tuple[Row, list[Sample]]], unused: list[Unused], margin: float, seed: int
) -> Split:
    found = from_scored(scored, seed=seed, margin=margin)
    pairs = tuple(pair_record(pair) for pair in found.pairs)
    missing = (*unused, *found.unused)
    return Split(read=read, used=len(pairs), pairs=pairs, unused=missing, audit=found.audit)


def _scored(sampler: _Sampler, split: str, rows: Sequence[Row]) -> list[tuple[Row, list[Sample]]]:
    """An answer without a result counts as the task counts nothing found."""
    task, texts = sampler.task, _texts(sampler, split, rows)
    metric = task.metrics[0]
    items = [
        (row, score_item(task, at, row, prompt="", reply=Reply(text=text)))
        for at, (row, text) in enumerate(
            (row, text) for row, answers in zip(rows, texts, strict=True) for text in answers
        )
    ]
    scores = [item.scores[metric.name] for item in finished(task, items)]
    samples = [Sample(answer=item.answer, score=score) for (_, item), score in zip(items, scores, strict=True)]
    each = sampler.method.samples
    return [(row, samples[at * each : (at + 1) * each]) for at, row in enumerate(rows)]


def _texts(sampler: _Sampler, split: str, rows: Sequence[Row]) -> list[list[str]]:
    """The answers to each row, by number of the sample. A killed process left whole batches, so the others are formed as they would have been."""
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
    """Answers by index, as many as were computed together."""
    method, renderer = sampler.method, sampler.renderer
    together: Sequence[int] = ()
    found: dict[int, str] = {}

    def choose(batch: Sequence[int]) -> Choose:
        nonlocal together
        together = batch
        said = [
            chances(sampler.seed, content_key(row), sample, steps=method.max_new_tokens)
            for row, sample in (asked[at] for at in batch)
        ]
        return drawn_by(said, temperature=method.temperature, device=sampler.device)

    for at, answer in answers(
        sampler.model,
        renderer,
        [renderer.prompt_tokens(row.prompt, tools=row.tools) for row, _ in asked],
        max_new_tokens=method.max_new_tokens,
        room=sampler.room,
        device=sampler.device,
        warn=partial(print, "warning:"),
        choose=choose,
    ):
        found[at] = answer.text
        if len(found) == len(together):
            yield found
            found = {}
