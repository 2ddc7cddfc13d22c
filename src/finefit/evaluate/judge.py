"""A language model behind an OpenAI-compatible address marks every answer, once all answers are on disk. Verdicts are
kept one by one, so that a failing address costs nothing that was judged before."""

import hashlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from finefit.artifacts.atomic import Journal, read_lines
from finefit.artifacts.stage_records import EvalItem
from finefit.errors import Resumable, RunError
from finefit.spec.tasks import Judge
from finefit.tasks import Task
from finefit.tasks.judge_marks import NOT_MARKED, counts_of_mark, judge_question, mark_in

_AT_ONCE = 8
_SHOWN = 200
_KEPT = "answers and verdicts so far are kept, so give the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    attempts: int = 6
    first_seconds: float = 1.0
    """Before the second attempt; twice as long before each further one."""
    longest_seconds: float = 60.0
    reply_seconds: float = 300.0
    """For one reply; a judge that reasons takes long."""


def judge_items(
    task: Task,
    items: Sequence[EvalItem],
    judge: Judge,
    *,
    verdicts: Path,
    seed: int = 0,
    patience: RetryPolicy | None = None,
) -> list[EvalItem]:
    """Every item with a result gets a verdict and a mark. `verdicts`: the file that keeps them; what it holds is not
    asked again."""
    questions = {
        item.item: judge_question(judge, prompt=item.prompt, answer=item.answer, reference=item.reference)
        for item in items
        if item.failure is None
    }
    who = f"{judge.model}\n{judge.url}"
    keys = {at: hashlib.sha256(f"{who}\n{question}".encode()).hexdigest() for at, question in questions.items()}
    known = {str(line["key"]): str(line["verdict"]) for line in read_lines(verdicts)}
    missing = {key: questions[at] for at, key in keys.items() if key not in known}  # equal questions are asked once
    if missing:
        with Journal(verdicts) as journal, _open(judge, seed, patience or RetryPolicy()) as client:
            for key, verdict in _replies(client, missing):
                journal.write(key=key, verdict=verdict)
                known[key] = verdict
    return [_judged(task, item, known[keys[item.item]]) if item.item in keys else item for item in items]


def with_current_marks(task: Task, item: EvalItem) -> EvalItem:
    """Answers are kept when a judge is added or removed: the item gets or loses the counts of marks."""
    is_judged = NOT_MARKED.keys() <= {name for metric in task.metrics for name in metric.counts}
    if is_judged == (NOT_MARKED.keys() <= item.counts.keys()):
        return item
    counts = {name: count for name, count in item.counts.items() if name not in NOT_MARKED}
    counts |= NOT_MARKED if is_judged else {}
    return replace(item, counts=counts, scores=task.scores(counts))


def _judged(task: Task, item: EvalItem, verdict: str) -> EvalItem:
    counts = item.counts | counts_of_mark(mark_in(verdict))
    return replace(item, counts=counts, scores=task.scores(counts), verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgeClient:
    client: httpx.Client
    judge: Judge
    secret: str | None
    seed: int
    patience: RetryPolicy
    is_over: threading.Event

    def ask(self, question: str) -> str:
        """Its reply. What may pass is tried again with growing pauses; anything else is reported at once."""
        problem, wait = "", 0.0
        for attempt in range(self.patience.attempts):
            if self.is_over.wait(wait):
                break
            wait = min(self.patience.first_seconds * 2**attempt, self.patience.longest_seconds)
            try:
                response = self._post(question)
            except httpx.TransportError as error:
                problem = f"cannot be reached: {type(error).__name__} {self._shown(str(error))}"
                continue
            if response.status_code in (408, 429) or response.status_code >= 500:
                problem = f"answers {response.status_code}: {self._shown(response.text)}"
                wait = max(wait, _asked_to_wait(response, self.patience))
                continue
            if response.status_code != httpx.codes.OK:
                refusal = f"{response.status_code} {self._shown(response.text)}"
                remedy = f"check judge.url, judge.model and judge.key; {_KEPT}"
                raise RunError(f"the judge {self.judge.model} at {self.judge.url} refuses: {refusal}", remedy)
            content = _content(response)
            if content is not None:
                return content
            problem = f"gives no chat completion: {self._shown(response.text)}"
        raise Resumable(
            f"the judge {self.judge.model} at {self.judge.url} {problem} ({self.patience.attempts} attempts)",
            "check that it runs and that judge.url is an OpenAI-compatible address, such as "
            f"http://localhost:8000/v1; {_KEPT}",
        )

    def _post(self, question: str) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        body = {"model": self.judge.model, "messages": messages, "temperature": 0, "seed": self.seed}
        return self.client.post(self.judge.url.rstrip("/") + "/chat/completions", json=body)

    def _shown(self, text: str) -> str:
        """The secret never appears in a message, even where the other side repeats it."""
        hidden = text if self.secret is None else text.replace(self.secret, "***")
        return " ".join(hidden.split())[:_SHOWN]


def _content(response: httpx.Response) -> str | None:
    """Empty for a reply without text, which holds no mark; None where it is not a chat completion."""
    try:
        content: Any = response.json()["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return content if isinstance(content, str) else "" if content is None else None


def _asked_to_wait(response: httpx.Response, patience: RetryPolicy) -> float:
    """By the server, in seconds; dates are ignored."""
    asked = response.headers.get("retry-after", "")
    return min(float(asked), patience.longest_seconds) if asked.isdigit() else 0.0


@contextmanager
def _open(judge: Judge, seed: int, patience: RetryPolicy) -> Iterator[_JudgeClient]:
    secret, is_over = _secret(judge), threading.Event()
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with httpx.Client(headers=headers, timeout=httpx.Timeout(patience.reply_seconds)) as client:
        try:
            yield _JudgeClient(client=client, judge=judge, secret=secret, seed=seed, patience=patience, is_over=is_over)
        finally:
            is_over.set()


def _secret(judge: Judge) -> str | None:
    if judge.key is None:
        return None
    secret = os.environ.get(judge.key, "").strip()  # a secret read from a file often ends with a newline
    if not secret:
        problem = f"judge.key names the environment variable {judge.key}, which is not set"
        raise RunError(problem, f"export {judge.key}=...; {_KEPT}")
    if not (secret.isascii() and secret.isprintable()):
        problem = (
            f"judge.key names the environment variable {judge.key}, which has characters other than printable ASCII"
        )
        raise RunError(problem, f"export {judge.key}=... with the secret alone; {_KEPT}")
    return secret


def _replies(client: _JudgeClient, questions: dict[str, str]) -> Iterator[tuple[str, str]]:
    """In parallel, as they come. The first failure ends it, after the replies that have arrived by then."""
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
