"""Answers of an OpenAI-compatible server to the items of a task, in the order in which they arrive. A chat server gets
the messages and applies its own template; a completions endpoint gets the tokens of the prompt as the run renders it.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import httpx
import PIL.Image

from finefit.bounded import parse_json
from finefit.data.image_check import read_content, with_placeholders
from finefit.data.render import Renderer
from finefit.data.rows import IMAGE_PLACEHOLDER, ImageRef, Message, Row
from finefit.errors import DataError, RunError, SpecError, first_line
from finefit.evaluate.batches import Answer, Warn
from finefit.evaluate.generate import ItemReply
from finefit.evaluate.openai_client import (
    MOST_BYTES,
    UNCOMPRESSED,
    OpenAiClient,
    RetryPolicy,
    ask_all,
    open_client,
    read_reply,
    text_of,
)
from finefit.spec.served import Server, require_plain_url
from finefit.tasks import Reply, Task

_KEPT = "the answers so far are kept, so give the same command again"
_LOOKUP_SECONDS, _SHOWN = 10.0, 5
_REPLY_BYTES, _TOKEN_BYTES = 1 << 16, 1 << 10
"""A reply may have so many bytes, and so many more for each token that it may contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerServer:
    client: OpenAiClient
    server: Server
    renderer: Renderer | None
    """Of the run's tokenizer and template; None if there is none, and then a completions endpoint cannot be asked."""
    max_new_tokens: int
    max_prompt_tokens: int | None
    seed: int
    warn: Warn
    cut_without_text: list[int] = field(default_factory=list)
    """The items whose answers reached max_new_tokens before the server gave any text."""

    def replies(self, task: Task, rows: Mapping[int, Row]) -> Iterator[ItemReply]:
        if not task.generates or any(any(task.candidates(row)) for row in rows.values()):
            problem = f"{task.name} needs likelihoods of given answers, which a server does not give"
            raise RunError(problem, "leave server out, or name a task that reads an answer")
        items = {at: _ServedItem(row=row, prompt=self._prompt(row)) for at, row in rows.items()}
        for at, answer in ask_all(self.client, items, self._ask, at_once=self.server.concurrency):
            if answer.is_cut and not answer.text:
                self.cut_without_text.append(at)
            yield ItemReply(at=at, prompt=items[at].shown, reply=Reply(text=answer.text), answer=answer)
        if self.cut_without_text:
            problem = f"{len(self.cut_without_text)} answers of {self.server.model} reached {self.max_new_tokens}"
            self.warn(f"{problem} tokens before any text: a model that reasons first needs a higher max_new_tokens")

    def _prompt(self, row: Row) -> "Sequence[Message] | list[int]":
        if row.text:
            raise DataError(f"{row.place} is plain text without a prompt to answer", "use rows with a prompt")
        if self.server.endpoint == "completions":
            return self._tokens(row)
        if row.tools or any(message.tool_calls for message in row.prompt):
            problem = f"{row.place} has tools, whose calls a chat server takes out of the text of its answers"
            raise DataError(problem, "set server.endpoint: completions")
        if self.renderer is None or self.max_prompt_tokens is None or row.image_refs:  # the server sizes images itself
            return with_placeholders(row.prompt, len(row.image_refs))
        return self.renderer.cut_prompt(row.prompt, max_tokens=self.max_prompt_tokens)

    def _tokens(self, row: Row) -> list[int]:
        if self.renderer is None:
            problem = "server.endpoint: completions needs the prompt as a template renders it, and none is known here"
            raise RunError(problem, "name the run or the model whose template it is, or set endpoint: chat")
        if row.image_refs:
            raise DataError(f"{row.place} shows an image, which a prompt of tokens cannot", "set endpoint: chat")
        return self.renderer.prompt_tokens(row.prompt, tools=row.tools, max_tokens=self.max_prompt_tokens)

    def _ask(self, item: "_ServedItem") -> Answer:
        body = {"model": self.server.model, "temperature": 0, "seed": self.seed, "max_tokens": self.max_new_tokens}
        at_most = _REPLY_BYTES + _TOKEN_BYTES * self.max_new_tokens
        how: dict[str, Any] = {"about": f" {item.row.place}", "at_most": at_most}
        if self.server.endpoint == "chat":
            body["messages"] = _chat(item.prompt, item.row.image_refs)  # type: ignore[arg-type]
            return self.client.ask("/chat/completions", body, self._read(_content), **how)
        assert self.renderer is not None
        body |= {"prompt": item.prompt, "stop": self.renderer.stop_texts}
        return self.client.ask("/completions", body, self._read(lambda choice: choice["text"]), **how)

    def _read(self, content: Callable[[Any], object]) -> Callable[[Any], Answer]:
        def read(reply: Any) -> Answer:
            choice = reply["choices"][0]
            text, is_cut = text_of(content(choice)), choice.get("finish_reason") == "length"
            new_tokens = _num_tokens(reply)
            if self.renderer is not None:
                text = self.renderer.answer_in(text, has_ended=not is_cut)
            return Answer(text=text, new_tokens=self.max_new_tokens if is_cut else new_tokens, is_cut=is_cut)

        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServedItem:
    row: Row
    prompt: Sequence[Message] | list[int]

    @property
    def shown(self) -> str:
        """The record's prompt: which template a server applies is not known here."""
        return "\n\n".join(message.content for message in self.row.prompt)


@contextmanager
def open_server(server: Server, *, retries: RetryPolicy | None = None, **how: Any) -> Iterator[AnswerServer]:
    """`how`: the other fields of the `AnswerServer`."""
    retries = retries or RetryPolicy(attempts=server.attempts, reply_seconds=server.timeout_seconds)
    with open_client(server, retries, role="server", kept=_KEPT) as client:
        yield AnswerServer(client=client, server=server, **how)


def _content(choice: Any) -> object:
    return choice["message"].get("content")


def _num_tokens(reply: Any) -> int | None:
    """What the server says; None if it says nothing that can be."""
    found = reply["usage"].get("completion_tokens") if isinstance(reply.get("usage"), dict) else None
    return found if type(found) is int and 0 <= found < 1 << 31 else None


def _chat(messages: Sequence[Message], image_refs: Sequence[ImageRef]) -> list[dict[str, Any]]:
    refs = iter(image_refs)

    def parts(text: str) -> str | list[dict[str, Any]]:
        if not image_refs or IMAGE_PLACEHOLDER not in text:
            return text
        first, *others = text.split(IMAGE_PLACEHOLDER)
        found: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for other in others:
            found += [
                {"type": "image_url", "image_url": {"url": _data_url(next(refs))}},
                {"type": "text", "text": other},
            ]
        return [part for part in found if part.get("text") != ""]

    return [{"role": message.role, "content": parts(message.content)} for message in messages]


def _data_url(ref: ImageRef) -> str:
    content = read_content(ref)
    with PIL.Image.open(BytesIO(content)) as image:
        kind = PIL.Image.MIME[image.format or "PNG"]
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def only_model_at(url: str) -> Server:
    """The server at this address, with the only model that it says it has."""
    try:
        require_plain_url(url)
    except ValueError as error:
        raise SpecError(f"--server {error}", "for instance http://localhost:8000/v1") from None
    named = f"--server '{{url: {url}, model: NAME}}'"
    try:
        with httpx.Client(headers=UNCOMPRESSED, timeout=_LOOKUP_SECONDS) as client:
            address = f"{url.rstrip('/')}/models"
            response, content = read_reply(client, "GET", address, at_most=MOST_BYTES, seconds=_LOOKUP_SECONDS)
        response.raise_for_status()
        models = [text_of(model["id"]) for model in parse_json(bytes(content[:MOST_BYTES]))["data"]]
    except httpx.HTTPError as error:
        problem = f"the server {url} does not say which models it has: {type(error).__name__} {first_line(error)}"
        raise RunError(problem, f"check that it runs, and name the model: {named}") from None
    except (ValueError, LookupError, TypeError):
        raise RunError(f"the server {url} does not say which models it has", f"name the model: {named}") from None
    if len(models) != 1:
        shown = ", ".join(models[:_SHOWN]) + (f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else "")
        raise RunError(f"the server {url} has {len(models)} models: {shown}", f"name one: {named}")
    return Server(url=url, model=models[0])
