"""One process answers its items: the model is loaded, every item is asked, scored, and written down as soon as it is complete."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from pydantic import TypeAdapter
from torch import nn

from finefit.artifacts.checkpoint import problems
from finefit.artifacts.evaluations import EvalItem, EvalRequest, Subject
from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.records import Levers, read_record
from finefit.artifacts.rundir import EvalPaths, StageDir
from finefit.data.looking import See, eye_of
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row
from finefit.data.tasks import Task
from finefit.data.workers import Workers, num_workers
from finefit.errors import Resumable, RunError
from finefit.evaluate.gallery import Gallery, require_pictures
from finefit.evaluate.replies import Voice, replies
from finefit.evaluate.score import score_item
from finefit.evaluate.sharing import Part
from finefit.model.attention import attention_here, for_answers
from finefit.model.load import base_bits, load_custom_for_answers, load_for_answers, starting_adapter, weight_dtype
from finefit.model.locate import Located, locate_start
from finefit.spec.models import CustomModel
from finefit.step.custom_eye import see_of
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
    loaded_bytes: int | None = None
    """When the model was there and nothing was asked yet; counted as the peak is."""
    peak_bytes: int | None = None
    """Reserved on the fullest card, resident on a CPU."""


def read_work(path: Path) -> Work:
    return Work(where=StageDir(path.parents[2]), path=path, request=read_record(path, EvalRequest))


def answered(paths: EvalPaths) -> dict[int, EvalItem]:
    """What was written down before, by whichever process."""
    found = (_ITEM.validate_python(line) for path in paths.answered() for line in read_lines(path))
    return {item.item: item for item in found}


def answer(
    work: Work,
    task: Task,
    rows: Sequence[Row],
    todo: Sequence[int],
    *,
    part: Part,
    look: Callable[[], None] = lambda: None,
) -> Taken:
    """`look` is called after every item: the others that share them may have failed."""
    if not todo:
        return Taken()
    subject = work.request.subject
    require_pictures([rows[at] for at in todo])
    _settle(subject, part)
    with _speaking(work, part) as voice, Journal(work.paths.items_of(part.number)) as items:
        loaded_bytes = held_bytes(subject.device)
        began = time.perf_counter()
        for told in replies(voice, task, {at: rows[at] for at in todo}):
            new_tokens, is_cut = (told.answer.new_tokens, told.answer.is_cut) if told.answer else (None, False)
            item = score_item(
                task, told.at, rows[told.at], prompt=told.prompt, reply=told.reply, new_tokens=new_tokens, is_cut=is_cut
            )
            items.write(**_ITEM.dump_python(item, mode="json"))
            look()
        return Taken(
            seconds=time.perf_counter() - began, loaded_bytes=loaded_bytes, peak_bytes=_peak_bytes(subject.device)
        )


def _settle(subject: Subject, part: Part) -> None:
    """Each on a card of its own; on a CPU with its share of the threads."""
    torch.manual_seed(subject.seed)
    torch.set_num_threads(max(1, subject.threads // part.of))
    if subject.device == "cuda" and part.of > 1:
        if (there := torch.cuda.device_count()) < part.of:
            raise RunError(
                f"the items are to be shared over {part.of} cards, and torch sees {there} here",
                "`finefit doctor` says why",
            )
        torch.cuda.set_device(part.number)


@contextmanager
def _speaking(work: Work, part: Part) -> Iterator[Voice]:
    """With processes that decode images, where the model sees; each is started when the first image is asked of it."""
    located = _located(work)
    see = _see(work, located)
    with Workers(num_workers(part.of)) as workers:
        is_own = isinstance(work.request.subject.model, CustomModel)  # which is given images as they are
        yield _voice(work, located, see, None if see is None or is_own else Gallery(see, workers.submit))


def _located(work: Work) -> Located:
    subject = work.request.subject
    located = locate_start(subject.model, subject.tuning, work.where.run)
    if located.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    return located


def _see(work: Work, located: Located) -> See | None:
    """None for a model that sees nothing."""
    subject = work.request.subject
    see = see_of(subject.model, work.where.run, located.folder, subject.images)
    return None if eye_of(see) is None else see


def _voice(work: Work, located: Located, see: See | None, gallery: Gallery | None) -> Voice:
    subject, settings, room = work.request.subject, work.request.evaluation, work.request.room
    renderer = _renderer(work, see)
    try:
        model = _load(work, located)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise Resumable(
            f"{subject.model_name} does not fit in the memory that is free: {error}",
            "free the card and give the same command again",
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
        gallery=gallery,
    )


def _warn(path: Path, words: str) -> None:
    with Journal(path) as journal:
        journal.write(warning=words)


def _renderer(work: Work, see: See | None) -> Renderer:
    subject, eye = work.request.subject, None if see is None else eye_of(see)
    renderer = open_renderer(work.where.tokenizer, subject.template, template_options=subject.template_options, eye=eye)
    if renderer.sha256() != subject.template_sha256:
        raise RunError(
            "the prompt template of this run has changed since it was trained: answers would be worth nothing"
        )
    return renderer


def _load(work: Work, located: Located) -> nn.Module:
    subject, room, run = work.request.subject, work.request.room, work.where.run
    path = None if subject.weights is None else run / subject.weights
    if path is not None and subject.manifest_sha256 is not None and (found := problems(path)):
        raise RunError(f"{path.name} does not verify: {'; '.join(found)}", "evaluate another checkpoint")
    dtype = torch.bfloat16 if subject.precision == "bf16" else weight_dtype(subject.precision, subject.tuning)
    start = starting_adapter(subject.tuning, run)
    if isinstance(subject.model, CustomModel):
        return load_custom_for_answers(
            subject.model, run, path, device=subject.device, dtype=dtype, seed=subject.seed, start=start
        )
    return load_for_answers(
        located.folder,
        path,
        device=subject.device,
        dtype=dtype,
        attention=for_answers(attention_here(subject.device, subject.precision, located.folder)),
        bits=base_bits(subject.tuning),
        start=start,
        num_cards=room.devices if room.is_spread else 1,
    )


def held_bytes(device: str) -> int:
    """By this process at this instant: reserved on the fullest card, resident on a CPU."""
    if device == "cuda":
        return max(torch.cuda.memory_reserved(card) for card in range(torch.cuda.device_count()))
    return int(psutil.Process().memory_info().rss)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return max(torch.cuda.max_memory_reserved(card) for card in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
