"""A browser that sends requests to a page's application behind its guard, without a network."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from finefit.web.server import Guard, Token

HOST = "127.0.0.1:8000"
ORIGIN = {"Origin": f"http://{HOST}"}


class Client:
    """Requests to the application itself, one after the other, with a browser's cookies."""

    def __init__(self, runner: asyncio.Runner, http: httpx.AsyncClient) -> None:
        self._runner = runner
        self._http = http

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self._runner.run(self._http.request(method, path, **more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)


@contextmanager
def client_of(app: ASGIApp, *, token: Token | None = None) -> Iterator[Client]:
    guard = Guard(app, hosts=[HOST, "localhost:8000"], token=token)
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(guard, raise_app_exceptions=False), base_url=f"http://{HOST}"
    )
    with asyncio.Runner() as runner:
        yield Client(runner, http)
        runner.run(http.aclose())
