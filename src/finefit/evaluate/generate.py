"""Everything that a task needs from a model for its items: a generated answer, the likelihoods of given answers, or
both. Given answers are rendered as training rows are, and the tokens that count are the supervised ones: the answer
with its end. All of a plain text counts, window by window."""

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finefit.artifacts.forecasts import EvalBatchLimit
from finefit.custom.inputs import meta_twin
from finefit.custom.model import CustomFamily, custom_family_of
from finefit.data.collate import collate
from finefit.data.encode import Budget
from finefit.data.examples import Example
from finefit.data.image_check import load_image
from finefit.data.render import Renderer
from finefit.data.rows import Message, Row
from finefit.errors import DataError, ModelError
from finefit.evaluate import batches
from finefit.evaluate.decoding import causal_of, until_stop
from finefit.objective.batch import Batch, CustomRow, seed_of
from finefit.step.forward import bind
from finefit.tasks import Likelihood, Reply, Task

LOGITS_AT_ONCE = 256  # tokens whose logits exist at the same time
_SLICE = 16
"""Batches of items that are completed before the next begin, if an item needs both. A kill can lose at most this
many."""


Candidates = tuple[Sequence[str], Sequence[str]]
"""Right and wrong answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerModel:
    model: nn.Module
    renderer: Renderer
    batch_limit: EvalBatchLimit
    device: str
    max_new_tokens: int
    max_prompt_tokens: int | None
    """Longer prompts are cut in the middle, as training rows are."""
    warn: batches.Warn
    images: batches.ImagePrefetch | None = None
    """The images of a vision-language model's prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemReply:
    at: int
    prompt: str
    reply: Reply
    answer: batches.Answer | None


@dataclass(slots=True, kw_only=True)
class _Item:
    at: int
    row: Row
    messages: Sequence[Message]
    tokens: "array[int]"
    """The tokens of the prompt, in little memory."""
    right: list[Likelihood] = field(default_factory=list)
    wrong: list[Likelihood] = field(default_factory=list)
    num_missing: int = 0
    """The number of examples whose likelihood is not known yet."""


def generate(speaker: AnswerModel, task: Task, rows: Mapping[int, Row]) -> Iterator[ItemReply]:
    """The replies by row number, the rows with the longest prompts first."""
    items = sorted((_open_item(speaker, task, at, row) for at, row in rows.items()), key=lambda item: -len(item.tokens))
    candidates = {item.at: task.candidates(item.row) for item in items}
    weighs = any(right or wrong for right, wrong in candidates.values())
    if (family := custom_family_of(speaker.model)) is not None:
        if weighs or not task.generates:
            problem = f"{task.name} asks for likelihoods of given answers, which {family.name} does not compute"
            raise ModelError(problem, "evaluate a task that reads an answer")
        if not family.generates:
            problem = f"{task.name} needs answers, and {family.name} has no generate"
            raise ModelError(problem, "give the model a generate(inputs, *, max_new_tokens, stops)")
    size = _SLICE * speaker.batch_limit.rows if task.generates and weighs else max(1, len(items))
    for begin in range(0, len(items), size):
        weighed = _with_likelihoods(speaker, task, items[begin : begin + size], candidates)
        if task.generates:
            yield from _with_answers(speaker, list(weighed))
        else:
            yield from (_item_reply(speaker, item, None) for item in weighed)


def _open_item(speaker: AnswerModel, task: Task, at: int, row: Row) -> _Item:
    messages: Sequence[Message] = row.prompt
    if row.text:
        if task.generates:
            remedy = "use rows with a prompt and an answer, or another task"
            raise DataError(f"{row.place} is plain text without a prompt to answer", remedy)
        return _Item(at=at, row=row, messages=messages, tokens=array("i"))
    shown: dict[str, Any] = {"tools": row.tools, "image_refs": row.image_refs}
    if speaker.max_prompt_tokens is not None:
        messages = speaker.renderer.cut_prompt(messages, max_tokens=speaker.max_prompt_tokens, **shown)
    tokens = speaker.renderer.prompt_tokens(messages, **shown)
    return _Item(at=at, row=row, messages=messages, tokens=array("i", tokens))


def _with_answers(speaker: AnswerModel, items: Sequence[_Item]) -> Iterator[ItemReply]:
    if (family := custom_family_of(speaker.model)) is not None:
        found = _custom_answers(family, speaker, items)
    else:
        found = batches.answers(
            speaker.model,
            speaker.renderer,
            [item.tokens for item in items],
            max_new_tokens=speaker.max_new_tokens,
            batch_limit=speaker.batch_limit,
            device=speaker.device,
            warn=speaker.warn,
            images=speaker.images,
            image_refs=[item.row.image_refs for item in items],
        )
    return (_item_reply(speaker, items[at], answer) for at, answer in found)


def _custom_answers(
    family: CustomFamily, speaker: AnswerModel, items: Sequence[_Item]
) -> Iterator[tuple[int, batches.Answer]]:
    """Answers from the model's own `generate`, given what its `inputs` makes of the prompts. A row's random numbers are
    the same in every run."""
    stops, limit, renderer = frozenset(speaker.renderer.stop_tokens), speaker.max_new_tokens, speaker.renderer

    def row(item: _Item) -> CustomRow:
        tokens = np.asarray(item.tokens, dtype=np.int64)
        return CustomRow(
            tokens=tokens,
            supervised=np.zeros(len(tokens), np.bool_),
            images=tuple(load_image(ref) for ref in item.row.image_refs),
            seed=seed_of(0, "answer", item.at),
            is_prompt=True,
        )

    def answer(written: Sequence[int]) -> batches.Answer:
        tokens = until_stop(written, stops)
        # below the limit it has ended, with a stop token or without
        is_cut = len(tokens) >= limit and tokens[-1] not in stops
        text = renderer.decode_answer(tokens) if tokens else ""
        return batches.Answer(text=text, new_tokens=len(tokens), is_cut=is_cut)

    def compute(chosen: list[int]) -> list[batches.Answer]:
        inputs = meta_twin(family.source).inputs([row(items[at]) for at in chosen])
        with torch.inference_mode():
            here = {name: tensor.to(speaker.device) for name, tensor in inputs.items()}
            written = family.generate(here, rows=len(chosen), max_new_tokens=limit, stops=stops)
        return [answer(tokens) for tokens in written]

    lengths = [len(item.tokens) + limit for item in items]
    return batches.in_batches(lengths, speaker.batch_limit, compute, warn=speaker.warn)


def _item_reply(speaker: AnswerModel, item: _Item, answer: batches.Answer | None) -> ItemReply:
    row, prompt = item.row, ""
    if not row.text:
        prompt = speaker.renderer.prompt_text(item.messages, tools=row.tools, image_refs=row.image_refs)
    reply = Reply(text=answer.text if answer else "", right=tuple(item.right), wrong=tuple(item.wrong))
    return ItemReply(at=item.at, prompt=prompt, reply=reply, answer=answer)


def _with_likelihoods(
    speaker: AnswerModel, task: Task, items: Sequence[_Item], candidates: Mapping[int, Candidates]
) -> Iterator[_Item]:
    """The items with the likelihoods of their candidates, each as soon as its last one is known."""
    examples, owners = list[Example](), list[tuple[_Item, list[Likelihood], int]]()
    for item in items:
        for texts, found in zip(candidates[item.at], (item.right, item.wrong), strict=True):
            for place, text in enumerate(texts):
                windows = examples_of(speaker.renderer, item.row, text, prompt=item.messages, window=task.window)
                found.append(Likelihood(text=text, logprob=0.0, tokens=sum(map(num_counted, windows))))
                examples += windows
                owners += [(item, found, place)] * len(windows)
                item.num_missing += len(windows)
        if not item.num_missing:
            yield item
    if not examples:
        return
    pad, limit, images = speaker.renderer.pad, speaker.batch_limit, speaker.images
    for index, logprob in logprobs(
        speaker.model, examples, pad=pad, batch_limit=limit, device=speaker.device, warn=speaker.warn, images=images
    ):
        item, found, place = owners[index]
        found[place] = replace(found[place], logprob=found[place].logprob + logprob)
        item.num_missing -= 1
        if not item.num_missing:
            yield item


def examples_of(
    renderer: Renderer, row: Row, text: str, *, prompt: Sequence[Message], window: int
) -> tuple[Example, ...]:
    """The examples of a text after the prompt of a row: one, or the windows of a plain text."""
    budget = Budget(max_tokens=window if row.text else sys.maxsize, too_long="error", turns="last")
    if not row.text:  # the row's own answer keeps the reasoning and tool calls of its message
        answer = row.messages[-1] if text == row.answer else Message("assistant", text)
        row = replace(row, messages=(*prompt, answer), num_given=len(prompt), rejected=())
    (rendered,) = renderer.render([row], budget)
    if rendered.problem:
        problem = f"{row.place} has an answer whose likelihood cannot be computed: {rendered.problem}"
        raise DataError(problem, rendered.remedy)
    return rendered.examples


def logprobs(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    pad: int,
    batch_limit: EvalBatchLimit,
    device: str,
    warn: batches.Warn,
    images: batches.ImagePrefetch | None = None,
) -> Iterator[tuple[int, float]]:
    """(index, summed log-probability of the supervised tokens) of every example."""
    geometry, load = (None, None) if images is None else (images.geometry, images.load)
    forward, lengths = bind(model, loss_chunk=LOGITS_AT_ONCE), [len(example.tokens) for example in examples]
    *_, last = causal_of(model).base_model.parameters()  # of the final norm: a model over several GPUs ends there
    last_device = torch.device(last.device)

    def moved(batch: Batch) -> Batch:
        """A model over several GPUs takes tokens on its first one and answers on its last."""
        on_first = batch.moved(lambda tensor: tensor.to(device))
        positions_N, targets_N = batch.positions_N.to(last_device), batch.targets_N.to(last_device)
        return replace(on_first, positions_N=positions_N, targets_N=targets_N)

    def compute(chosen: list[int]) -> list[float]:
        batch = collate([examples[at] for at in chosen], pad=pad, geometry=geometry, load=load)
        with torch.inference_mode():
            found_N = forward(moved(batch)).to("cpu", torch.float64)
        parts: Sequence[Tensor] = torch.split(found_N, [num_counted(examples[at]) for at in chosen])
        return [float(part.sum()) for part in parts]

    ahead = batches.prefetching(images, [example.images for example in examples])
    return batches.in_batches(lengths, batches.limit_for(model, lengths, batch_limit), compute, warn=warn, ahead=ahead)


def num_counted(example: Example) -> int:
    """The first token never counts, because nothing predicts it."""
    return sum(example.supervised[1:])
