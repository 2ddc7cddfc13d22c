"""Asks a model behind an OpenAI-compatible address. What may pass is tried again after growing pauses; what an address
says is read within limits of bytes and time, wherever it redirects nothing is sent, and its key appears in no message.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx

from finefit.bounded import parse_json
from finefit.errors import Resumable, RunError
from finefit.spec.served import ServedModel

K = TypeVar("K")
Q = TypeVar("Q")
A = TypeVar("A")
MOST_BYTES = 16 << 20
"""Of one reply."""
UNCOMPRESSED = {"Accept-Encoding": "identity"}
"""A compressed reply could be larger than what is read of it."""
_SHOWN, _SHOWN_BYTES = 200, 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    attempts: int = 6
    first_seconds: float = 1.0
    """The pause before the second attempt; it doubles before each further one."""
    longest_seconds: float = 60.0
    reply_seconds: float = 300.0
    """The time limit of one reply; a model that reasons takes long."""

    def pause_after(self, attempt: int) -> float:
        return min(self.first_seconds * 2.0 ** min(attempt, 30), self.longest_seconds)


class NotAnswered(Exception):
    """One attempt failed in a way that may pass; `seconds` is how long the address asks to wait."""

    def __init__(self, problem: str, seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.seconds = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiClient:
    client: httpx.Client
    served: ServedModel
    role: Literal["judge", "server"]
    """Also the spec's key that names the address."""
    kept: str
    """What an interrupted evaluation keeps, in words."""
    secret: str | None
    retries: RetryPolicy
    is_over: threading.Event

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], A],
        *,
        about: str = "",
        at_most: int = MOST_BYTES,
    ) -> A:
        """What `read` finds in the reply; it raises a ValueError, LookupError, TypeError or AttributeError if that is
        not what was asked for. `about` names the item in a refusal. `at_most`: bytes of the reply."""
        problem, wait = "", 0.0
        for attempt in range(self.retries.attempts):
            if self.is_over.wait(wait):
                break
            try:
                return self._attempt(path, body, read, about=about, at_most=at_most)
            except NotAnswered as reason:
                problem = str(reason)
                wait = max(self.retries.pause_after(attempt), min(reason.seconds, self.retries.longest_seconds))
        tried = f"({self.retries.attempts} attempts)"
        runs = f"check that it runs and that {self.role}.url is an OpenAI-compatible address"
        remedy = f"{runs}, such as http://localhost:8000/v1; {self.kept}"
        raise Resumable(f"{self._name} {problem} {tried}", remedy)

    @property
    def _name(self) -> str:
        return f"the {self.role} {self.served.model} at {self.served.url}"

    def _attempt(self, path: str, body: Mapping[str, Any], read: Callable[[Any], A], *, about: str, at_most: int) -> A:
        try:
            response, content = read_reply(
                self.client,
                "POST",
                self.served.url.rstrip("/") + path,
                body,
                at_most=at_most,
                seconds=self.retries.reply_seconds,
            )
        except httpx.TransportError as error:
            raise NotAnswered(f"cannot be reached: {type(error).__name__} {self._shown(str(error))}") from None
        status, text = response.status_code, self._shown(content[:_SHOWN_BYTES].decode("utf-8", "replace"))
        if status in (408, 429) or status >= 500:
            asked = response.headers.get("retry-after", "")  # seconds; dates are ignored
            raise NotAnswered(f"answers {status}: {text}", float(asked) if asked.isdecimal() else 0.0)
        if response.is_redirect:
            problem = f"{self._name} redirects to {self._shown(response.headers.get('location', 'nowhere'))}"
            remedy = f"give {self.role}.url the address that is meant: nothing is sent to another one; {self.kept}"
            raise RunError(problem, remedy)
        if status != httpx.codes.OK:
            named = f"check {self.role}.url, {self.role}.model and {self.role}.key; {self.kept}"
            raise RunError(f"{self._name} refuses{about}: {status} {text}", named)
        if len(content) > at_most:
            raise NotAnswered(f"gives no completion, but more than {at_most:,} bytes: {text}")
        try:
            return read(parse_json(bytes(content)))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise NotAnswered(f"gives no chat completion: {text}") from None

    def _shown(self, text: str) -> str:
        """The secret never appears in a message, even if the other side repeats it."""
        hidden = text if self.secret is None else text.replace(self.secret, "***")
        return " ".join(hidden.split())[:_SHOWN]


def read_reply(
    client: httpx.Client,
    method: Literal["GET", "POST"],
    address: str,
    body: Mapping[str, Any] | None = None,
    *,
    at_most: int,
    seconds: float,
) -> tuple[httpx.Response, bytearray]:
    """The reply with a little more than `at_most` bytes at the most; httpx limits the time of each read, and this their
    sum."""
    content, ends = bytearray(), time.monotonic() + seconds
    with client.stream(method, address, json=body) as response:
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > at_most:
                break
            if time.monotonic() > ends:
                raise httpx.ReadTimeout(f"the reply has not ended after {seconds:g} seconds")
    return response, content


@contextmanager
def open_client(
    served: ServedModel, retries: RetryPolicy, *, role: Literal["judge", "server"], kept: str
) -> Iterator[OpenAiClient]:
    secret, is_over = _secret_of(served, role, kept), threading.Event()
    headers = UNCOMPRESSED | ({"Authorization": f"Bearer {secret}"} if secret else {})
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(retries.reply_seconds)
    with httpx.Client(headers=headers, limits=limits, timeout=timeout) as client:
        try:
            yield OpenAiClient(
                client=client, served=served, role=role, kept=kept, secret=secret, retries=retries, is_over=is_over
            )
        finally:
            is_over.set()


def _secret_of(served: ServedModel, role: str, kept: str) -> str | None:
    if served.key is None:
        return None
    variable = f"{role}.key names the environment variable {served.key}, which"
    secret = os.environ.get(served.key, "").strip()  # a secret read from a file often ends with a newline
    if not secret:
        raise RunError(f"{variable} is not set", f"export {served.key}=...; {kept}")
    if not (secret.isascii() and secret.isprintable()):
        problem = f"{variable} has characters other than printable ASCII"
        raise RunError(problem, f"export {served.key}=... with the secret alone; {kept}")
    return secret


def ask_all(
    client: OpenAiClient, questions: Mapping[K, Q], ask: Callable[[Q], A], *, at_once: int
) -> Iterator[tuple[K, A]]:
    """Requests run in parallel, and replies are yielded as they arrive. The first failure stops it, after the replies
    that have arrived by then."""
    todo: queue.SimpleQueue[tuple[K, Q]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[K, A | None, Exception | None]] = queue.SimpleQueue()
    for pair in questions.items():
        todo.put(pair)

    def work() -> None:
        while not client.is_over.is_set():
            try:
                key, question = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((key, ask(question), None))
            except Exception as error:  # noqa: BLE001 raised again by the reader
                done.put((key, None, error))
                client.is_over.set()

    for _ in range(min(at_once, len(questions))):
        threading.Thread(target=work, daemon=True).start()  # a hanging thread must not keep a stopped evaluation alive
    for _ in questions:
        key, reply, error = done.get()
        if error is not None:
            while not done.empty():
                key, left, _missing = done.get()
                if left is not None:
                    yield key, left
            raise error
        assert reply is not None
        yield key, reply


def text_of(content: object) -> str:
    """A message's content, which may be null. Half a surrogate pair, which no file can hold, is replaced."""
    if content is None:
        return ""
    if not isinstance(content, str):
        raise TypeError("the content is not text")
    return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
