"""A language model behind an OpenAI-compatible address marks every answer, once all answers are on disk. Verdicts are
saved one by one, so that a failing address loses nothing that was judged before."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.stage_records import EvalItem
from finefit.evaluate.openai_client import OpenAiClient, RetryPolicy, ask_all, open_client, text_of
from finefit.spec.served import Judge
from finefit.tasks import Task
from finefit.tasks.judge_marks import NOT_MARKED, counts_of_mark, judge_question, mark_in

_AT_ONCE = 8
_KEPT = "answers and verdicts so far are kept, so give the same command again"


_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgeLine:
    key: str
    verdict: str


def judge_items(
    task: Task,
    items: Sequence[EvalItem],
    judge: Judge,
    *,
    verdicts: Path,
    seed: int = 0,
    retries: RetryPolicy = _RETRY,
) -> list[EvalItem]:
    """Every item with a result gets a verdict and a mark. Items with a verdict in the file `verdicts` are not judged
    again."""
    keys, known = dict[int, str](), {line.key: line.verdict for line in read_lines(verdicts, _JudgeLine)}
    missing: dict[str, str] = {}  # by key, so that equal questions are asked once
    for item in items:
        if item.failure is None:
            question = judge_question(judge, prompt=item.prompt, answer=item.answer, reference=item.reference)
            key = hashlib.sha256(f"{judge.model}\n{judge.url}\n{question}".encode()).hexdigest()
            keys[item.item] = key
            if key not in known:
                missing[key] = question
    if missing:
        opened = open_client(judge, retries, role="judge", kept=_KEPT)
        with Journal(verdicts) as journal, opened as client:
            for key, verdict in ask_all(client, missing, partial(_verdict, client, seed=seed), at_once=_AT_ONCE):
                journal.write(key=key, verdict=verdict)
                known[key] = verdict

    def judged(item: EvalItem, verdict: str) -> EvalItem:
        counts = item.counts | counts_of_mark(mark_in(verdict))
        return replace(item, counts=counts, scores=task.scores(counts), verdict=verdict)

    return [judged(item, known[keys[item.item]]) if item.item in keys else item for item in items]


def with_current_marks(task: Task, item: EvalItem) -> EvalItem:
    """Answers are kept when a judge is added or removed; only the counts of marks are added to the item or removed from
    it."""
    is_judged = NOT_MARKED.keys() <= {name for metric in task.metrics for name in metric.counts}
    if is_judged == (NOT_MARKED.keys() <= item.counts.keys()):
        return item
    counts = {name: count for name, count in item.counts.items() if name not in NOT_MARKED}
    counts |= NOT_MARKED if is_judged else {}
    return replace(item, counts=counts, scores=task.scores(counts))


def _verdict(client: OpenAiClient, question: str, seed: int) -> str:
    """A reply without text holds no mark."""
    messages = [{"role": "user", "content": question}]
    body = {"model": client.served.model, "messages": messages, "temperature": 0, "seed": seed}
    return client.ask("/chat/completions", body, lambda reply: text_of(reply["choices"][0]["message"].get("content")))
