"""Review set, journals and runs for tests of reviews."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.stage_records import EvalItem, EvalRequest
from finefit.facts.files import sha256_of
from finefit.review.items import PromptMessage, ReviewItem, ReviewSet
from finefit.review.session import Session, open_session
from finefit.review.verdicts import JournalEntry, Reason, ReviewOpened, Verdict, VerdictChoice
from tests.evals import SUBJECT, make_item, make_request, make_result

MODELS = ("left-1:checkpoint-12", "right-1:checkpoint-12")


def make_review_set(num_items: int = 6, *, models: Sequence[str] = MODELS, **more: Any) -> ReviewSet:
    """Each answer says whose it is, so that a test can tell where it stands."""
    items = tuple(
        ReviewItem(
            key=f"item-{at}",
            prompt=(PromptMessage(role="user", text=f"question {at}"),),
            answers=tuple(f"{model} answers {at}" for model in models),
            reference=f"reference {at}",
            place=f"test.jsonl:{at + 1}",
        )
        for at in range(num_items)
    )
    return ReviewSet(name="review", task="summary", models=tuple(models), items=items, **more)


def make_single(num_items: int = 6) -> ReviewSet:
    return make_review_set(num_items, models=MODELS[:1])


OPENED = ReviewOpened(at="2026-01-01T00:00:00.000+00:00", seed=5, task="summary", models=MODELS)


def in_memory(
    review_set: ReviewSet, entries: Sequence[JournalEntry] = (), **more: Any
) -> tuple[Session, list[JournalEntry]]:
    """A session, and the list that it writes to."""
    written: list[JournalEntry] = [OPENED, *entries]
    return Session(review_set, list(written), written.append, **more), written


@contextmanager
def on_disk(review_set: ReviewSet, folder: Path, **more: Any) -> Iterator[Session]:
    with open_session(review_set, folder, **{"seed": 5} | more) as session:
        yield session


def make_verdict(
    review_set: ReviewSet,
    number: int,
    at: int,
    choice: VerdictChoice,
    *,
    rater: str = "ann",
    reasons: Sequence[Sequence[Reason]] = (),
    shown: tuple[int, ...] | None = None,
) -> Verdict:
    """On the item `at`."""
    item = review_set.items[at]
    marked = tuple(tuple(names) for names in reasons) or ((),) * len(review_set.models)
    return Verdict(
        number=number,
        at=OPENED.at,
        rater=rater,
        key=item.key,
        models=review_set.models,
        answers=item.digests,
        shown=shown or tuple(range(len(review_set.models))),
        choice=choice,
        reasons=marked,
    )


def side_of(answers: Sequence[str], model: str) -> int:
    """Where the model's answer stands, from 1."""
    return 1 + next(at for at, answer in enumerate(answers) if answer.startswith(model))


def make_run(
    folder: Path, results: Mapping[str, Sequence[EvalItem]], *, task: str = "json_match", final: str | None = None
) -> RunDir:
    """An evaluated run, by checkpoint."""
    run = RunDir(folder)
    where = run.stage(1, "sft")
    where.checkpoints.mkdir(parents=True, exist_ok=True)
    where.prepared("test.jsonl").parent.mkdir(exist_ok=True)
    rows = [
        [
            {"role": "user", "content": f"prompt {at}", "tool_calls": []},
            {"role": "assistant", "content": "[7]", "tool_calls": []},
        ]
        for at in range(40)
    ]
    where.prepared("test.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    sha256 = sha256_of(where.prepared("test.jsonl"))
    write_record(run.run, Run(name="tiny", digest="d", finefit="0.1.0", created=OPENED.at, status="finished"))
    for checkpoint, items in results.items():
        if checkpoint != "base":
            (where.checkpoints / checkpoint).mkdir(exist_ok=True)
        paths = where.evaluation(task, checkpoint)
        paths.folder.mkdir(parents=True, exist_ok=True)
        request = make_request(checkpoint, task=task)
        write_record(paths.request, replace(request, subject=replace(SUBJECT, items_sha256=sha256)))
        write_record(paths.result, make_result(checkpoint, tuple(items), task=task))
    if final:
        (where.checkpoints / "final").symlink_to(final)
    return run


def set_rows(run: RunDir, rows: Sequence[Mapping[str, Any]]) -> None:
    """The run's test rows are these; its requests know them."""
    where = run.stage(1, "sft")
    where.prepared("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sha256 = sha256_of(where.prepared("test.jsonl"))
    for paths in where.evaluations():
        request = read_record(paths.request, EvalRequest)
        write_record(paths.request, replace(request, subject=replace(request.subject, items_sha256=sha256)))


def make_items(num_items: int, answer: str = "answer", *, first: int = 0) -> tuple[EvalItem, ...]:
    return tuple(
        replace(
            make_item(at, all_fields=1.0), prompt=f"<|user|>prompt {at}<|end|>\n<|assistant|>", answer=f"{answer} {at}"
        )
        for at in range(first, first + num_items)
    )
