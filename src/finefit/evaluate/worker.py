"""Answers every item of a task with one model and writes one record. Entry point: `python -m finefit.evaluate.worker
REQUEST.json`. On several GPUs each process has a whole model and answers every n-th item. The first process is the
evaluation itself; the others (`--part k/n`) are its children: they end when it ends, and it fails when one of them
does."""

import argparse
import gc
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter
from torch import nn

from finefit import errors
from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.checkpoint import problems
from finefit.artifacts.processes import on_stop_signals, when_launcher_ends
from finefit.artifacts.reading import is_there
from finefit.artifacts.records import Failure, Levers, read_record, write_record
from finefit.artifacts.rundir import EvalPaths, StageDir
from finefit.artifacts.stage_records import EvalFailure, EvalItem, EvalRequest, EvalResult
from finefit.custom.inputs import processor_opener
from finefit.custom.model import load_custom_for_answers
from finefit.data.batch_workers import BatchWorkers, num_workers
from finefit.data.image_check import image_processor_of
from finefit.data.render import open_renderer
from finefit.data.rows import Row, is_asked, key_of, read_items
from finefit.errors import FinefitError, Interrupted, Resumable, RunError, WorkerDied, is_out_of_memory
from finefit.evaluate.batches import ImagePrefetch, require_images
from finefit.evaluate.generate import AnswerModel, ItemReply, generate
from finefit.evaluate.judge import judge_items, with_current_marks
from finefit.evaluate.reuse import answered
from finefit.evaluate.score import finished, score_item, summarise
from finefit.evaluate.server_answers import open_server
from finefit.facts.machine import read_peak_resident_bytes
from finefit.model.attention import attention_here, for_answers
from finefit.model.load import base_bits, load_for_answers, quiet, starting_adapter, weight_dtype
from finefit.model.resolve_model import ResolvedModel, has_tokenizer, resolve_start
from finefit.spec.models import CustomModel
from finefit.spec.served import Server
from finefit.step.levers import apply_levers
from finefit.tasks import Task
from finefit.tasks.make import make_task

log = logging.getLogger("finefit")
MODULE = "finefit.evaluate.worker"
_GRACE_SECONDS = 30.0  # for a child to end after SIGTERM
_ITEM = TypeAdapter(EvalItem)
Check = Callable[[], None]
Ask = Callable[[Task, Mapping[int, Row]], Iterator[ItemReply]]
"""(task, rows by number) -> their replies, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarningLine:
    warning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    where: StageDir
    path: Path
    """The path of the request; a user's own task file is beside it."""
    request: EvalRequest

    @property
    def paths(self) -> EvalPaths:
        settings = self.request.evaluation
        return self.where.evaluation(settings.label, self.request.checkpoint, settings.limit)

    def warn(self, words: str) -> None:
        with Journal(self.paths.warnings) as journal:
            journal.write(warning=words)

    @property
    def signature(self) -> dict[str, str]:
        """What an answer depends on, beside the task and the prompt."""
        settings, made_with = self.request.evaluation, self.request.made_with
        most = f"at most {settings.max_new_tokens} new tokens"
        if (server := settings.server) is None:
            return {**made_with, "decoding": f"greedy, {most}", "precision": self.request.subject.precision}
        asked = {"server": server.url, "served_model": server.model, "endpoint": server.endpoint}
        return {**made_with, **asked, "decoding": f"temperature 0, {most}"}


def read_job(path: Path) -> EvalJob:
    return EvalJob(where=StageDir(path.parents[2]), path=path, request=read_record(path, EvalRequest))


def evaluate(job: EvalJob) -> EvalResult:
    request, (task, rows, asked, chosen) = job.request, _items_of(job)
    limit, done = request.batch_limit, answered(job.paths)
    num_missing = sum(at not in done for at in chosen)
    share = ItemShare(of=1 if limit.is_split_over_cards else max(1, min(limit.devices, num_missing)))
    with other_shares(job.path, job.paths, share.of) as check_others:
        cost = answer_items(job, task, rows, share.missing(chosen, done), share, check_others)
        answered_at = time.perf_counter()
    seconds = cost.seconds + time.perf_counter() - answered_at
    gc.collect()
    torch.cuda.empty_cache()  # finishing the task may need a model of its own
    # what is counted once every item is answered: by the task itself, and by a judge
    done, judge = answered(job.paths), request.evaluation.judge
    items = finished(task, [(rows[at], with_current_marks(task, done[at])) for at in chosen])
    if judge is not None:
        items = judge_items(task, items, judge, verdicts=job.paths.verdicts, seed=request.subject.seed)
    result = summarise(task, request.checkpoint, items, available=len(asked), seconds=seconds)
    warnings = dict.fromkeys(line.warning for line in read_lines(job.paths.warnings, _WarningLine))
    predicted = limit.reserved_bytes if request.subject.device == "cuda" else limit.held_bytes
    memory: dict[str, Any] = {"loaded_bytes": cost.loaded_bytes, "peak_bytes": cost.peak_bytes}
    warned = (*warnings, *result.warnings)
    return replace(
        result, signature=result.signature | job.signature, warnings=warned, predicted_bytes=predicted, **memory
    )


def _items_of(job: EvalJob) -> tuple[Task, list[Row], list[int], list[int]]:
    """The task, all rows, the numbers of the rows that it uses, and the sample of these that is answered."""
    subject, settings = job.request.subject, job.request.evaluation
    rows = read_items(job.where.verified(subject.items, {subject.items: subject.items_sha256}))
    task = make_task(settings, form=subject.form, base=job.path.parent, run=job.where.run)
    asked = [at for at, row in enumerate(rows) if is_asked(row, settings.sources)]
    return task, rows, asked, sample(rows, settings.limit, among=asked)


def sample(rows: Sequence[Row], limit: int | None, *, among: Sequence[int] | None = None) -> list[int]:
    """Draws the same items for every model and run, whatever its seed; a smaller sample is part of a larger one."""
    everything = range(len(rows)) if among is None else among
    if limit is None or limit >= len(everything):
        return list(everything)
    drawn = sorted(everything, key=lambda at: hashlib.sha256(f"sample {key_of(rows[at])}".encode()).digest())
    return sorted(drawn[:limit])


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemShare:
    """This process's share of the items."""

    number: int = 0
    of: int = 1

    @classmethod
    def read(cls, text: str) -> "ItemShare":
        number, of = map(int, text.split("/"))
        return cls(number=number, of=of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def missing(self, items: Sequence[int], done: Container[int]) -> list[int]:
        """Items are divided by their place among all items, so that all processes divide alike whatever is answered
        already."""
        return [at for at in items[self.number :: self.of] if at not in done]


_ALONE = ItemShare()


def answer_share(job: EvalJob, share: ItemShare) -> None:
    task, rows, _, chosen = _items_of(job)
    answer_items(job, task, rows, share.missing(chosen, answered(job.paths)), share)


@contextmanager
def other_shares(request: Path, paths: EvalPaths, num_shares: int) -> Iterator[Check]:
    """Starts the other processes and waits for them at the end. Yields a check that raises the failure of one of them.
    The end of a child's standard input tells it that this process is gone; it inherits the run's lock."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    for number in range(1, num_shares):
        share = ItemShare(number=number, of=num_shares)
        command = [sys.executable, "-P", "-m", MODULE, str(request), "--part", str(share)]
        children[number] = subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)

    def check() -> None:
        for number, child in children.items():
            if child.poll() not in (None, 0):
                raise _share_failure(paths, number, num_shares, child.returncode)

    try:
        yield check
        for child in children.values():
            child.wait()
        check()
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()
        for child in children.values():
            try:
                child.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None:
                child.stdin.close()


def _share_failure(paths: EvalPaths, number: int, num_shares: int, code: int) -> FinefitError:
    who = f"process {number + 1} of {num_shares} that share the items"
    if is_there(paths.failure_of(number)):
        failure = read_record(paths.failure_of(number), EvalFailure).failure
        kind: type[FinefitError] = getattr(errors, failure.kind, FinefitError)
        return kind(f"{who}: {failure.problem}", failure.remedy)
    if code < 0:
        remedy = "give the same command again: the answers so far are kept"
        return WorkerDied(f"{who} was ended by {signal.Signals(-code).name}", remedy)
    problem = f"{who} ended with code {code}, which is a fault of finefit; see the run's log"
    return FinefitError(problem, "please report it with these lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCost:
    seconds: float = 0.0
    """Excludes loading."""
    loaded_bytes: int | None = None
    """Memory after the model was loaded and before the first question; counted as the peak is."""
    peak_bytes: int | None = None
    """Reserved on the fullest GPU, resident on a CPU."""


def answer_items(
    job: EvalJob, task: Task, rows: Sequence[Row], todo: Sequence[int], share: ItemShare, check: Check = lambda: None
) -> AnswerCost:
    """`check` is called after each item."""
    if not todo:
        return AnswerCost()
    subject, device = job.request.subject, job.request.subject.device
    require_images([rows[at] for at in todo])
    torch.manual_seed(subject.seed)
    torch.set_num_threads(max(1, subject.threads // share.of))
    if device == "cuda" and share.of > 1:  # each process on a GPU of its own
        if (found := torch.cuda.device_count()) < share.of:
            problem = f"the items are to be shared over {share.of} cards, and torch sees {found} here"
            raise RunError(problem, "`finefit doctor` says why")
        torch.cuda.set_device(share.number)
    server = job.request.evaluation.server
    opened = _open_model(job, share) if server is None else _open_server(job, server)
    with opened as replies, Journal(job.paths.items_of(share.number)) as items:
        loaded_bytes, began = held_bytes(device) if server is None else None, time.perf_counter()
        for one in replies(task, {at: rows[at] for at in todo}):
            new_tokens, is_cut = (one.answer.new_tokens, one.answer.is_cut) if one.answer else (None, False)
            row, prompt, reply = rows[one.at], one.prompt, one.reply
            item = score_item(task, one.at, row, prompt=prompt, reply=reply, new_tokens=new_tokens, is_cut=is_cut)
            items.write(**_ITEM.dump_python(item, mode="json"))
            check()
        seconds = time.perf_counter() - began
        peak_bytes = _peak_bytes(device) if server is None else None
        return AnswerCost(seconds=seconds, loaded_bytes=loaded_bytes, peak_bytes=peak_bytes)


@contextmanager
def _open_model(job: EvalJob, share: ItemShare) -> Iterator[Ask]:
    """A vision-language model gets processes that decode images; a user's own model gets images as they are."""
    subject, settings, limit, run = job.request.subject, job.request.evaluation, job.request.batch_limit, job.where.run
    resolved = resolve_start(subject.model, subject.tuning, run)
    if resolved.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    factory = processor_opener(subject.model, run, resolved.folder, subject.images)
    image_processor = image_processor_of(factory)
    with BatchWorkers(num_workers(share.of)) as workers:
        options: dict[str, Any] = {"template_options": subject.template_options, "image_processor": image_processor}
        renderer = open_renderer(job.where.tokenizer, subject.template, **options)
        if renderer.sha256() != subject.template_sha256:
            problem = "the prompt template of this run has changed since it was trained"
            raise RunError(f"{problem}: its scores would mean nothing")
        try:
            model = _load(job, resolved)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"{subject.model_name} does not fit in the free memory: {error}"
            raise Resumable(problem, "free the card and give the same command again") from None
        if limit.mlp_tiles > 1:
            apply_levers(model, Levers(micro_batch=1, mlp_tiles=limit.mlp_tiles))
        has_images = image_processor is not None and not isinstance(subject.model, CustomModel)
        answer_model = AnswerModel(
            model=model,
            renderer=renderer,
            batch_limit=limit,
            device=subject.device,
            max_new_tokens=settings.max_new_tokens,
            max_prompt_tokens=subject.max_prompt_tokens,
            warn=job.warn,
            images=ImagePrefetch(factory, workers.submit) if has_images else None,
        )
        yield partial(generate, answer_model)


@contextmanager
def _open_server(job: EvalJob, server: Server) -> Iterator[Ask]:
    """Without a tokenizer in the run directory the server gets the messages as they are."""
    subject, renderer = job.request.subject, None
    if has_tokenizer(job.where.tokenizer):
        renderer = open_renderer(job.where.tokenizer, subject.template, template_options=subject.template_options)
    with open_server(
        server,
        renderer=renderer,
        max_new_tokens=job.request.evaluation.max_new_tokens,
        max_prompt_tokens=subject.max_prompt_tokens,
        seed=subject.seed,
        warn=job.warn,
    ) as found:
        yield found.replies


def _load(job: EvalJob, resolved: ResolvedModel) -> nn.Module:
    subject, limit, run = job.request.subject, job.request.batch_limit, job.where.run
    path = None if subject.weights is None else run / subject.weights
    if path is not None and subject.manifest_sha256 is not None and (found := problems(path)):
        raise RunError(f"{path.name} does not verify: {'; '.join(found)}", "evaluate another checkpoint")
    dtype = torch.bfloat16 if subject.precision == "bf16" else weight_dtype(subject.precision, subject.tuning)
    start, device = starting_adapter(subject.tuning, run), subject.device
    if isinstance(subject.model, CustomModel):
        seed = subject.seed
        return load_custom_for_answers(subject.model, run, path, device=device, dtype=dtype, seed=seed, start=start)
    return load_for_answers(
        resolved.folder,
        path,
        device=device,
        dtype=dtype,
        attention=for_answers(attention_here(device, subject.precision, resolved.folder)),
        bits=base_bits(subject.tuning),
        start=start,
        num_cards=limit.devices if limit.is_split_over_cards else 1,
    )


def held_bytes(device: str) -> int:
    """Memory that this process holds now: reserved on the fullest GPU, resident on a CPU."""
    if device == "cuda":
        return max(torch.cuda.memory_reserved(card) for card in range(torch.cuda.device_count()))
    return int(psutil.Process().memory_info().rss)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return max(torch.cuda.max_memory_reserved(card) for card in range(torch.cuda.device_count()))
    return read_peak_resident_bytes()


def exit_code_of(act: Callable[[], None], failure: Path) -> int:
    """The exit code of all of a worker's work, which a signal or the end of its launcher stops. The reason of a failure
    becomes a record."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(f"stopped by {signal.Signals(number).name}")

    failure.unlink(missing_ok=True)
    signals = on_stop_signals(stop)
    try:
        when_launcher_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
        act()
    except FinefitError as error:
        for number in signals:  # one stop is enough
            signal.signal(number, signal.SIG_IGN)
        log.error("%s", error)
        write_record(failure, EvalFailure(failure=Failure.of(error)))
        return error.exit_code
    return 0


def work(path: Path, share: ItemShare = _ALONE) -> int:
    job = read_job(path)

    def act() -> None:
        if share.of > 1:
            answer_share(job, share)
        else:
            write_record(job.paths.result, evaluate(job))

    return exit_code_of(act, job.paths.failure_of(share.number))


def main() -> None:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("request", type=lambda text: Path(text).resolve())
    parser.add_argument("--part", type=ItemShare.read, default=_ALONE)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    quiet()
    sys.exit(work(args.request, args.part))


if __name__ == "__main__":
    main()
