"""A language model behind an OpenAI-compatible address marks every answer, once all answers are safe on disk.

Verdicts are kept one by one, so that an address that fails costs nothing that was judged before.
"""

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

from finefit.artifacts.evaluations import EvalItem
from finefit.artifacts.journal import Journal, read_lines
from finefit.data.tasks import Task
from finefit.data.tasks.judged import NOT_MARKED, asked, counts_of_mark, mark_in
from finefit.errors import Resumable, RunError
from finefit.spec.tasks import Judge

_AT_ONCE = 8
_SHOWN = 200
_KEPT = "answers and verdicts so far are kept, so give the same command again"
_Done = queue.SimpleQueue[tuple[str, str | Exception]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    attempts: int = 6
    first_seconds: float = 1.0
    """Before the second attempt; twice as long before each further one."""
    longest_seconds: float = 60.0
    reply_seconds: float = 300.0
    """For one reply; a judge that thinks takes its time."""


def judge_items(
    task: Task,
    items: Sequence[EvalItem],
    judge: Judge,
    *,
    verdicts: Path,
    seed: int = 0,
    patience: Patience | None = None,
) -> list[EvalItem]:
    """Every item with a result gets its verdict and its mark. `verdicts`: where they are kept; what is there already is not asked again."""
    questions = {
        item.item: asked(judge, prompt=item.prompt, answer=item.answer, reference=item.reference)
        for item in items
        if item.failure is None
    }
    keys = {
        at: hashlib.sha256(f"{judge.model}\n{judge.url}\n{question}".encode()).hexdigest()
        for at, question in questions.items()
    }
    known = {str(line["key"]): str(line["verdict"]) for line in read_lines(verdicts)}
    missing = {key: questions[at] for at, key in keys.items() if key not in known}  # equal questions are asked once
    if missing:
        with Journal(verdicts) as journal, _open(judge, seed, patience or Patience()) as line:
            for key, verdict in _replies(line, missing):
                journal.write(key=key, verdict=verdict)
                known[key] = verdict
    return [_judged(task, item, known[keys[item.item]]) if item.item in keys else item for item in items]


def marks_made_fit(task: Task, item: EvalItem) -> EvalItem:
    """An answer outlives a change of mind about judges: one that was written down with, or without, counts what the task counts now."""
    known = {name for metric in task.metrics for name in metric.counts}
    foreign, missing = (
        (NOT_MARKED.keys() - known) & item.counts.keys(),
        (NOT_MARKED.keys() & known) - item.counts.keys(),
    )
    if not foreign and not missing:
        return item
    counts = {name: count for name, count in item.counts.items() if name not in foreign} | {
        name: NOT_MARKED[name] for name in sorted(missing)
    }
    return replace(item, counts=counts, scores=task.scores(counts))


def _judged(task: Task, item: EvalItem, verdict: str) -> EvalItem:
    counts = item.counts | counts_of_mark(mark_in(verdict))
    return replace(item, counts=counts, scores=task.scores(counts), verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """To the judge."""

    client: httpx.Client
    judge: Judge
    secret: str | None
    seed: int
    patience: Patience
    is_over: threading.Event

    def ask(self, question: str) -> str:
        """Its reply. What may pass is tried again, later and later; what will not is told at once."""
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
                raise RunError(
                    f"the judge {self.judge.model} at {self.judge.url} refuses: {response.status_code} {self._shown(response.text)}",
                    f"check judge.url, judge.model and judge.key; {_KEPT}",
                )
            content = _content(response)
            if content is not None:
                return content
            problem = f"gives no chat completion: {self._shown(response.text)}"
        raise Resumable(
            f"the judge {self.judge.model} at {self.judge.url} {problem} ({self.patience.attempts} attempts)",
            f"check that it runs and that judge.url is an OpenAI-compatible address, such as http://localhost:8000/v1; {_KEPT}",
        )

    def _post(self, question: str) -> httpx.Response:
        body = {
            "model": self.judge.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "seed": self.seed,
        }
        return self.client.post(self.judge.url.rstrip("/") + "/chat/completions", json=body)

    def _shown(self, text: str) -> str:
        """The secret stays out of every word of ours, even where the other side repeats it."""
        hidden = text if self.secret is None else text.replace(self.secret, "***")
        return " ".join(hidden.split())[:_SHOWN]


def _content(response: httpx.Response) -> str | None:
    """Of a reply without any text the empty one, which holds no mark; None where it is no reply of a chat."""
    try:
        content: Any = response.json()["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return content if isinstance(content, str) else "" if content is None else None


def _asked_to_wait(response: httpx.Response, patience: Patience) -> float:
    """By the address itself, in seconds; its dates are not heeded."""
    told = response.headers.get("retry-after", "")
    return min(float(told), patience.longest_seconds) if told.isdigit() else 0.0


@contextmanager
def _open(judge: Judge, seed: int, patience: Patience) -> Iterator[_Line]:
    secret, is_over = _secret(judge), threading.Event()
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    with httpx.Client(headers=headers, timeout=httpx.Timeout(patience.reply_seconds)) as client:
        try:
            yield _Line(client=client, judge=judge, secret=secret, seed=seed, patience=patience, is_over=is_over)
        finally:
            is_over.set()


def _secret(judge: Judge) -> str | None:
    if judge.key is None:
        return None
    secret = os.environ.get(judge.key, "").strip()  # read from a file it often ends with the line
    if not secret:
        raise RunError(
            f"judge.key names the environment variable {judge.key}, which is not set",
            f"export {judge.key}=...; {_KEPT}",
        )
    if not (secret.isascii() and secret.isprintable()):
        raise RunError(
            f"judge.key names the environment variable {judge.key}, which holds characters that no header can carry: only printable ASCII can",
            f"export {judge.key}=... with the secret alone; {_KEPT}",
        )
    return secret


def _replies(line: _Line, questions: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Some at once, as they come. The first that fails ends it; what the others have brought by then is given first."""
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    done: _Done = queue.SimpleQueue()
    for pair in questions.items():
        todo.put(pair)

    def work() -> None:
        while not line.is_over.is_set():
            try:
                key, question = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((key, line.ask(question)))
            except Exception as error:  # noqa: BLE001 raised again by the one that waits
                done.put((key, error))

    for _ in range(min(_AT_ONCE, len(questions))):
        threading.Thread(
            target=work, daemon=True
        ).start()  # nobody waits for one that hangs when the evaluation is stopped
    for _ in questions:
        key, reply = done.get()
        if isinstance(reply, Exception):
            yield from _left(done)
            raise reply
        yield key, reply


def _left(done: "_Done") -> Iterator[tuple[str, str]]:
    while not done.empty():
        key, reply = done.get()
        if isinstance(reply, str):
            yield key, reply
