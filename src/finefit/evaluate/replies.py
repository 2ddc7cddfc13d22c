"""All that a task wants to hear of a model: an answer, the likelihoods of given ones, or both. An item is told as soon as it is complete."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from finefit.artifacts.forecasts import Room
from finefit.data.examples import Example
from finefit.data.render import Renderer
from finefit.data.rows import Message, Row
from finefit.data.tasks import Likelihood, Reply, Task
from finefit.errors import DataError
from finefit.evaluate.answers import Answer, answers
from finefit.evaluate.batches import Warn
from finefit.evaluate.gallery import Gallery
from finefit.evaluate.likelihood import examples_of, logprobs, num_counted
from finefit.evaluate.own import Asked, own_answers, require_own_answers
from finefit.model.custom import own_of

_SLICE = 16
"""Batches of items that are complete before the next ones begin, where an item is asked in two ways: what a stop can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    at: int
    prompt: str
    reply: Reply
    answer: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A model and how it is spoken to."""

    model: nn.Module
    renderer: Renderer
    room: Room
    device: str
    max_new_tokens: int
    max_prompt_tokens: int | None
    """Longer prompts are cut in the middle, as training rows are."""
    warn: Warn
    gallery: Gallery | None = None
    """Of a model that sees."""


@dataclass(slots=True, kw_only=True)
class _Item:
    at: int
    row: Row
    messages: Sequence[Message]
    tokens: "array[int]"
    """Of the prompt: so long ones take little."""
    right: list[Likelihood] = field(default_factory=list)
    wrong: list[Likelihood] = field(default_factory=list)
    waits_for: int = 0
    """Examples whose likelihood is not known yet."""


def replies(voice: Voice, task: Task, rows: Mapping[int, Row]) -> Iterator[Replied]:
    """Of every row, by its number; those with the longest prompts first."""
    items = sorted((_asked(voice, task, at, row) for at, row in rows.items()), key=lambda item: -len(item.tokens))
    candidates = {item.at: task.candidates(item.row) for item in items}
    weighs = any(right or wrong for right, wrong in candidates.values())
    if (own := own_of(voice.model)) is not None:
        require_own_answers(own, task.name, weighs=weighs or not task.generates)
    asks_twice = task.generates and weighs
    size = _SLICE * voice.room.rows if asks_twice else max(1, len(items))
    for part in (items[begin : begin + size] for begin in range(0, len(items), size)):
        complete = _weighed(voice, task, part, candidates)
        yield from (
            _answered(voice, list(complete)) if task.generates else (_told(voice, item, None) for item in complete)
        )


def _asked(voice: Voice, task: Task, at: int, row: Row) -> _Item:
    if row.text and task.generates:
        raise DataError(
            f"{row.place} is plain text: it asks nothing that could be answered",
            "take rows with a prompt and an answer, or another task",
        )
    messages: Sequence[Message] = row.prompt
    if row.text:
        return _Item(at=at, row=row, messages=messages, tokens=array("i"))
    if voice.max_prompt_tokens is not None:
        messages = voice.renderer.cut_prompt(
            messages, tools=row.tools, pictures=row.pictures, max_tokens=voice.max_prompt_tokens
        )
    tokens = voice.renderer.prompt_tokens(messages, tools=row.tools, pictures=row.pictures)
    return _Item(at=at, row=row, messages=messages, tokens=array("i", tokens))


def _answered(voice: Voice, items: Sequence[_Item]) -> Iterator[Replied]:
    if (own := own_of(voice.model)) is not None:
        asked = [Asked(at=item.at, tokens=item.tokens, pictures=item.row.pictures) for item in items]
        told = own_answers(
            own,
            voice.renderer,
            asked,
            max_new_tokens=voice.max_new_tokens,
            room=voice.room,
            device=voice.device,
            warn=voice.warn,
        )
        return (_told(voice, items[at], answer) for at, answer in told)
    found = answers(
        voice.model,
        voice.renderer,
        [item.tokens for item in items],
        max_new_tokens=voice.max_new_tokens,
        room=voice.room,
        device=voice.device,
        warn=voice.warn,
        gallery=voice.gallery,
        pictures=[item.row.pictures for item in items],
    )
    return (_told(voice, items[at], answer) for at, answer in found)


def _told(voice: Voice, item: _Item, answer: Answer | None) -> Replied:
    prompt = (
        ""
        if item.row.text
        else voice.renderer.prompt_text(item.messages, tools=item.row.tools, pictures=item.row.pictures)
    )
    reply = Reply(text=answer.text if answer else "", right=tuple(item.right), wrong=tuple(item.wrong))
    return Replied(at=item.at, prompt=prompt, reply=reply, answer=answer)


def _weighed(
    voice: Voice, task: Task, items: Sequence[_Item], candidates: Mapping[int, tuple[Sequence[str], Sequence[str]]]
) -> Iterator[_Item]:
    """The items with the likelihoods of their candidates, each when its last one is known."""
    examples, owners = list[Example](), list[tuple[_Item, list[Likelihood], int]]()
    for item in items:
        for texts, found in zip(candidates[item.at], (item.right, item.wrong), strict=True):
            for place, text in enumerate(texts):
                windows = examples_of(voice.renderer, item.row, text, prompt=item.messages, window=task.window)
                found.append(Likelihood(text=text, logprob=0.0, tokens=sum(map(num_counted, windows))))
                examples += windows
                owners += [(item, found, place)] * len(windows)
                item.waits_for += len(windows)
        if not item.waits_for:
            yield item
    if not examples:
        return
    known = logprobs(
        voice.model,
        examples,
        pad=voice.renderer.pad,
        room=voice.room,
        device=voice.device,
        warn=voice.warn,
        gallery=voice.gallery,
    )
    for index, logprob in known:
        item, found, place = owners[index]
        found[place] = replace(found[place], logprob=found[place].logprob + logprob)
        item.waits_for -= 1
        if not item.waits_for:
            yield item
