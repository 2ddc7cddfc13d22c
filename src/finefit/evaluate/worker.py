"""`python -m finefit.evaluate.worker REQUEST.json`: answers every item of a task with one checkpoint and leaves one record."""

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from pydantic import TypeAdapter

from finefit.artifacts.checkpoint import problems
from finefit.artifacts.journal import Journal, read_lines
from finefit.artifacts.launcher import on_stop_signals, when_launcher_ends
from finefit.artifacts.records import EvalFailure, EvalItem, EvalRequest, EvalResult, Failure, Subject, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.data.items import read_items
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Message
from finefit.data.tasks import Reply, make_task
from finefit.errors import FinefitError, Interrupted, RunError
from finefit.evaluate.answers import answers
from finefit.evaluate.score import score_item, summarise
from finefit.model.attention import attention_here
from finefit.model.load import base_bits, load_for_answers, quiet, starting_adapter, weight_dtype
from finefit.model.locate import locate_start

log = logging.getLogger("finefit")
_ITEM = TypeAdapter(EvalItem)


def evaluate(where: StageDir, request: EvalRequest, folder: Path) -> EvalResult:
    """`folder`: of the request, where a task file of the user's own lies too."""
    subject, settings = request.subject, request.evaluation
    task = make_task(settings, form=subject.form, base=folder)
    torch.set_num_threads(subject.threads)
    rows = read_items(where.verified("test.jsonl", {"test.jsonl": subject.items_sha256}))
    chosen = _sample(len(rows), settings.limit, subject.seed)
    items_path = where.evaluation(settings.label, request.checkpoint).items
    done = {item.item: item for item in (_ITEM.validate_python(line) for line in read_lines(items_path))}
    todo = [at for at in chosen if at not in done]
    began = time.perf_counter()
    if todo:
        renderer = open_renderer(where.tokenizer, subject.template, template_options=subject.template_options)
        if renderer.sha256() != subject.template_sha256:
            raise RunError("the prompt template of this run has changed since it was trained: answers would be worth nothing")
        model = _load(where, subject)
        asked = {at: _fitted(renderer, rows[at].prompt, rows[at].tools, subject.max_prompt_tokens) for at in todo}
        prompts = [renderer.prompt_tokens(asked[at], tools=rows[at].tools) for at in todo]
        with Journal(items_path) as journal:
            for index, answer in answers(
                model, renderer, prompts, max_new_tokens=settings.max_new_tokens, batch=request.room.rows, device=subject.device
            ):
                at = todo[index]
                prompt = renderer.prompt_text(asked[at], tools=rows[at].tools)
                item = score_item(task, at, rows[at], prompt=prompt, reply=Reply(text=answer))
                journal.write(**_ITEM.dump_python(item, mode="json"))
                done[at] = item
    seconds = time.perf_counter() - began
    return summarise(task, request.checkpoint, [done[at] for at in chosen], available=len(rows), seconds=seconds)


def _fitted(renderer: Renderer, messages: Sequence[Message], tools: str, max_tokens: int | None) -> Sequence[Message]:
    """Cut in the middle as training rows are, where those are cut."""
    return messages if max_tokens is None else renderer.cut_prompt(messages, tools=tools, max_tokens=max_tokens)


def _sample(num_rows: int, limit: int | None, seed: int) -> list[int]:
    if limit is None or limit >= num_rows:
        return list(range(num_rows))
    return sorted(random.Random(seed).sample(range(num_rows), limit))


def _load(where: StageDir, subject: Subject) -> torch.nn.Module:
    path = None if subject.weights is None else where.run / subject.weights
    if path is not None and subject.manifest_sha256 is not None and (found := problems(path)):
        raise RunError(f"{path.name} does not verify: {'; '.join(found)}", "evaluate another checkpoint")
    located = locate_start(subject.model, subject.tuning, where.run)
    if located.fingerprint != subject.model_fingerprint:
        raise RunError(f"the model {subject.model_name} has changed since this run began")
    dtype = torch.bfloat16 if subject.precision == "bf16" else weight_dtype(subject.precision, subject.tuning)
    return load_for_answers(
        located.folder,
        path,
        device=subject.device,
        dtype=dtype,
        attention=attention_here(subject.device, subject.precision, located.folder),
        bits=base_bits(subject.tuning),
        start=starting_adapter(subject.tuning, where.run),
    )


def _stop(number: int, _: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    quiet()
    sys.exit(work(Path(sys.argv[1]).resolve()))


def work(path: Path) -> int:
    """The exit code; the reason of a failure is in a record of its own."""
    where, request = StageDir(path.parents[2]), read_record(path, EvalRequest)
    paths = where.evaluation(request.evaluation.label, request.checkpoint, request.evaluation.limit)
    paths.failure.unlink(missing_ok=True)
    heeded = on_stop_signals(_stop)
    try:
        when_launcher_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
        write_record(paths.result, evaluate(where, request, path.parent))
    except FinefitError as error:
        for number in heeded:  # one stop is enough
            signal.signal(number, signal.SIG_IGN)
        log.error("%s", error)
        write_record(paths.failure, EvalFailure(failure=Failure.of(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
