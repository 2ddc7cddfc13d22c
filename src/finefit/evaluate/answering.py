"""One process answers its items: the model is loaded, every item is asked, scored, and written down as soon as it is complete."""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from finefit.artifacts.checkpoint import problems
from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.records import EvalItem, EvalRequest, Levers, Subject, read_record
from finefit.artifacts.rundir import EvalPaths, StageDir
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row
from finefit.data.tasks import Task
from finefit.errors import Resumable, RunError
from finefit.evaluate.replies import Voice, replies
from finefit.evaluate.score import score_item
from finefit.evaluate.sharing import Part
from finefit.model.attention import attention_here, for_answers
from finefit.model.load import base_bits, load_for_answers, starting_adapter, weight_dtype
from finefit.model.locate import locate_start
from finefit.step.levers import pull
from finefit.step.shortage import is_shortage

_ITEM = TypeAdapter(EvalItem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request with what belongs to it."""

    where: StageDir
    path: Path
    """Of the request; a task file of the user's own lies beside it."""
    request: EvalRequest

    @property
    def paths(self) -> EvalPaths:
        settings = self.request.evaluation
        return self.where.evaluation(settings.label, self.request.checkpoint, settings.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What answering took in this process."""

    seconds: float = 0.0
    """Loading excluded."""
    peak_bytes: int | None = None
    """Reserved on the fullest card, resident on a CPU."""


def read_work(path: Path) -> Work:
    return Work(where=StageDir(path.parents[2]), path=path, request=read_record(path, EvalRequest))


def answered(paths: EvalPaths) -> dict[int, EvalItem]:
    """What was written down before, by whichever process."""
    found = (_ITEM.validate_python(line) for path in paths.answered() for line in read_lines(path))
    return {item.item: item for item in found}


def answer(work: Work, task: Task, rows: Sequence[Row], todo: Sequence[int], *, part: Part, look: Callable[[], None] = lambda: None) -> Taken:
    """`look` is called after every item: the others that share them may have failed."""
    if not todo:
        return Taken()
    subject = work.request.subject
    _settle(subject, part)
    voice = _voice(work)
    began = time.perf_counter()
    with Journal(work.paths.items_of(part.number)) as items:
        for told in replies(voice, task, {at: rows[at] for at in todo}):
            new_tokens, is_cut = (told.answer.new_tokens, told.answer.is_cut) if told.answer else (None, False)
            item = score_item(task, told.at, rows[told.at], prompt=told.prompt, reply=told.reply, new_tokens=new_tokens, is_cut=is_cut)
            items.write(**_ITEM.dump_python(item, mode="json"))
            look()
    return Taken(seconds=time.perf_counter() - began, peak_bytes=_peak_bytes(subject.device))


def _settle(subject: Subject, part: Part) -> None:
    """Each on a card of its own; on a CPU with its share of the threads."""
    torch.manual_seed(subject.seed)
    torch.set_num_threads(max(1, subject.threads // part.of))
    if subject.device == "cuda" and part.of > 1:
        if (there := torch.cuda.device_count()) < part.of:
            raise RunError(f"the items are to be shared over {part.of} cards, and torch sees {there} here", "`finefit doctor` says why")
        torch.cuda.set_device(part.number)


def _voice(work: Work) -> Voice:
    subject, settings, room = work.request.subject, work.request.evaluation, work.request.room
    renderer = _renderer(work)
    try:
        model = _load(work)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise Resumable(
            f"{subject.model_name} does not fit in the memory that is free: {error}", "free the card and give the same command again"
        ) from None
    if room.mlp_tiles > 1:
        pull(model, Levers(micro_batch=1, mlp_tiles=room.mlp_tiles))
    return Voice(
        model=model,
        renderer=renderer,
        room=room,
        device=subject.device,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=subject.max_prompt_tokens,
        warn=partial(_warn, work.paths.warnings),
    )


def _warn(path: Path, words: str) -> None:
    with Journal(path) as journal:
        journal.write(warning=words)


def _renderer(work: Work) -> Renderer:
    subject = work.request.subject
    renderer = open_renderer(work.where.tokenizer, subject.template, template_options=subject.template_options)
    if renderer.sha256() != subject.template_sha256:
        raise RunError("the prompt template of this run has changed since it was trained: answers would be worth nothing")
    return renderer


def _load(work: Work) -> nn.Module:
    subject, room, run = work.request.subject, work.request.room, work.where.run
    path = None if subject.weights is None else run / subject.weights
    if path is not None and subject.manifest_sha256 is not None and (found := problems(path)):
        raise RunError(f"{path.name} does not verify: {'; '.join(found)}", "evaluate another checkpoint")
    located = locate_start(subject.model, subject.tuning, run)
    if located.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    return load_for_answers(
        located.folder,
        path,
        device=subject.device,
        dtype=torch.bfloat16 if subject.precision == "bf16" else weight_dtype(subject.precision, subject.tuning),
        attention=for_answers(attention_here(subject.device, subject.precision, located.folder)),
        bits=base_bits(subject.tuning),
        start=starting_adapter(subject.tuning, run),
        num_cards=room.devices if room.is_spread else 1,
    )


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return max(torch.cuda.max_memory_reserved(card) for card in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
