"""A language model behind an OpenAI-compatible address marks every answer, once all answers are on disk. Verdicts are
saved one by one, so that a failing address loses nothing that was judged before."""

import hashlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.stage_records import EvalItem
from finefit.errors import Resumable, RunError
from finefit.spec.tasks import Judge
from finefit.tasks import Task
from finefit.tasks.judge_marks import NOT_MARKED, counts_of_mark, judge_question, mark_in

_AT_ONCE, _SHOWN = 8, 200
_KEPT = "answers and verdicts so far are kept, so give the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    attempts: int = 6
    first_seconds: float = 1.0
    """The pause before the second attempt; it doubles before each further one."""
    longest_seconds: float = 60.0
    reply_seconds: float = 300.0
    """The time limit of one reply; a judge that reasons takes long."""


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
        with Journal(verdicts) as journal, _open(judge, seed, retries) as client:
            for key, verdict in _ask_all(client, missing):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgeClient:
    client: httpx.Client
    judge: Judge
    secret: str | None
    seed: int
    retries: RetryPolicy
    is_over: threading.Event

    def ask(self, question: str) -> str:
        """The judge's reply. Temporary errors are retried after growing pauses; any other is reported at once."""
        address, messages = self.judge.url.rstrip("/") + "/chat/completions", [{"role": "user", "content": question}]
        body = {"model": self.judge.model, "messages": messages, "temperature": 0, "seed": self.seed}
        problem, wait = "", 0.0
        for attempt in range(self.retries.attempts):
            if self.is_over.wait(wait):
                break
            wait = min(self.retries.first_seconds * 2**attempt, self.retries.longest_seconds)
            try:
                response = self.client.post(address, json=body)
            except httpx.TransportError as error:
                problem = f"cannot be reached: {type(error).__name__} {self._shown(str(error))}"
                continue
            if response.status_code in (408, 429) or response.status_code >= 500:
                problem = f"answers {response.status_code}: {self._shown(response.text)}"
                asked = response.headers.get("retry-after", "")  # seconds; dates are ignored
                wait = max(wait, min(float(asked), self.retries.longest_seconds) if asked.isdigit() else 0.0)
                continue
            if response.status_code != httpx.codes.OK:
                refusal = f"{response.status_code} {self._shown(response.text)}"
                remedy = f"check judge.url, judge.model and judge.key; {_KEPT}"
                raise RunError(f"the judge {self.judge.model} at {self.judge.url} refuses: {refusal}", remedy)
            with suppress(ValueError, LookupError, TypeError, AttributeError):  # not a chat completion
                content = response.json()["choices"][0]["message"].get("content")
                if content is None or isinstance(content, str):
                    return content or ""  # a reply without text holds no mark
            problem = f"gives no chat completion: {self._shown(response.text)}"
        raise Resumable(
            f"the judge {self.judge.model} at {self.judge.url} {problem} ({self.retries.attempts} attempts)",
            "check that it runs and that judge.url is an OpenAI-compatible address, such as "
            f"http://localhost:8000/v1; {_KEPT}",
        )

    def _shown(self, text: str) -> str:
        """The secret never appears in a message, even if the other side repeats it."""
        hidden = text if self.secret is None else text.replace(self.secret, "***")
        return " ".join(hidden.split())[:_SHOWN]


@contextmanager
def _open(judge: Judge, seed: int, retries: RetryPolicy) -> Iterator[_JudgeClient]:
    secret, headers, is_over = None, dict[str, str](), threading.Event()
    if judge.key is not None:
        variable = f"judge.key names the environment variable {judge.key}, which"
        secret = os.environ.get(judge.key, "").strip()  # a secret read from a file often ends with a newline
        if not secret:
            raise RunError(f"{variable} is not set", f"export {judge.key}=...; {_KEPT}")
        if not (secret.isascii() and secret.isprintable()):
            problem = f"{variable} has characters other than printable ASCII"
            raise RunError(problem, f"export {judge.key}=... with the secret alone; {_KEPT}")
        headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(headers=headers, timeout=httpx.Timeout(retries.reply_seconds)) as client:
        try:
            yield _JudgeClient(client=client, judge=judge, secret=secret, seed=seed, retries=retries, is_over=is_over)
        finally:
            is_over.set()


def _ask_all(client: _JudgeClient, questions: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Requests run in parallel, and verdicts are yielded as they arrive. The first failure stops it, after the replies
    that have arrived by then."""
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, str | Exception]] = queue.SimpleQueue()
    for pair in questions.items():
        todo.put(pair)

    def work() -> None:
        while not client.is_over.is_set():
            try:
                key, question = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((key, client.ask(question)))
            except Exception as error:  # noqa: BLE001 raised again by the reader
                done.put((key, error))

    for _ in range(min(_AT_ONCE, len(questions))):
        threading.Thread(target=work, daemon=True).start()  # a hanging thread must not keep a stopped evaluation alive
    for _ in questions:
        key, reply = done.get()
        if isinstance(reply, Exception):
            while not done.empty():
                key, left = done.get()
                if isinstance(left, str):
                    yield key, left
            raise reply
        yield key, reply
