"""A real address on this machine, which answers as a test says, and fails as such addresses do."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[int, dict[str, Any]], tuple[int, str]]
"""(how many were asked before, what is asked) -> status and body."""


@dataclass
class Address:
    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def address(
    answer: Answer,
    *,
    seconds: float = 0.0,
    dripping: float | None = None,
    headers: dict[str, str] | None = None,
    models: str = "",
) -> Iterator[Address]:
    """`seconds`: before each answer; `dripping`: between its bytes. `models`: what it says it has."""
    lock, state, now = threading.Lock(), Address(""), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                before = len(state.asked)
                state.asked.append(body | {"path": self.path})
                state.headers.append({name.lower(): value for name, value in self.headers.items()})
                now[0] += 1
                state.most_at_once = max(state.most_at_once, now[0])
            time.sleep(seconds)
            status, text = answer(before, body)
            with lock:
                now[0] -= 1
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self._write(text)

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" and models else 404)
            self.end_headers()
            self._write(models)

        def _write(self, text: str) -> None:
            with suppress(ConnectionError):  # who asked may be gone
                for part in [text] if dripping is None else text:
                    self.wfile.write(part.encode())
                    time.sleep(dripping or 0.0)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def said(text: str | None) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
