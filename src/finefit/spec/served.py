"""Models behind OpenAI-compatible addresses: a judge that rates answers, and a server that gives them."""

import re
from typing import Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, field_validator, model_validator

from finefit.spec import Part

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class ServedModel(Part):
    url: str
    """The base URL, for instance http://localhost:8000/v1."""
    model: str
    key: str | None = None
    """The environment variable that holds the secret; the secret itself belongs in no file."""

    @field_validator("key")
    @classmethod
    def _is_a_name(cls, key: str | None) -> str | None:
        """The value is repeated in no message: it may be the secret itself."""
        if key is not None and not _VARIABLE.fullmatch(key):
            problem = "this is not the name of an environment variable"
            raise ValueError(f"{problem}; name one, such as OPENAI_API_KEY: the secret itself belongs in no file")
        return key

    @model_validator(mode="after")
    def _has_a_plain_url(self) -> Self:
        require_plain_url(self.url)
        return self


class Judge(ServedModel):
    """A language model behind an OpenAI-compatible URL that rates every answer; optional, and always recorded."""

    question: str | None = None
    """The judge's instructions, with {prompt}, {answer} and {reference}; it must reply `Mark: N`, from 1 to 5."""

    @model_validator(mode="after")
    def _sees_the_answer(self) -> Self:
        if self.question is not None and "{answer}" not in self.question:
            raise ValueError("question: it lacks {answer}, so the judge would not see what it judges")
        return self


class Server(ServedModel):
    """An OpenAI-compatible server (vLLM, SGLang, llama.cpp, ollama) that gives the answers instead of a model loaded
    here. They are scored next to those of the run's checkpoints."""

    endpoint: Literal["chat", "completions"] = "chat"
    """`chat` sends the messages, and the server applies its own template; `completions` sends the tokens of the prompt
    as this run renders it, so the server must have the same tokenizer."""
    concurrency: int = Field(8, ge=1, le=1024)
    """Requests at a time."""
    timeout_seconds: float = Field(300.0, gt=0, le=86_400)
    """The longest wait for one answer."""
    attempts: int = Field(6, ge=1, le=100)
    """How often a question is sent before the evaluation stops, with pauses that double from one second to a minute."""


def require_plain_url(url: str) -> None:
    parts = _parts_of(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"url: {url!r} is not a URL; give one such as http://localhost:8000/v1")
    if "@" in parts.netloc or parts.query:
        problem = "url: it holds a user or a query, which every reader of the run could see"
        raise ValueError(f"{problem}; name an environment variable with key instead")


def _parts_of(url: str) -> SplitResult | None:
    """None if nothing can be sent there: to a host that no name server can be asked for, say."""
    import httpx  # takes longer than all else that reads a spec

    try:
        httpx.URL(url).host.encode("idna")  # as it is encoded to be looked up
        parts = urlsplit(url)
        parts.port  # noqa: B018 raises a ValueError if it is too large
    except (ValueError, httpx.InvalidURL):
        return None
    return parts
