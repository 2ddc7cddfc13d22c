"""A hub on this machine that speaks what huggingface_hub sends when a folder is uploaded: create, preupload, git LFS,
commit. It keeps what it is sent, and fails on request."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standinTokenForTests0123456789"
_LARGE = (".safetensors", ".gguf")
"""Files that the hub takes by git LFS."""


@dataclass
class Hub:
    address: str = ""
    visibility: dict[str, str] = field(default_factory=dict)
    """Of each repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Committed, by path."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Of LFS, by digest."""
    uploads: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    """A status instead of an answer, by the kind of request; 0 drops the connection."""
    said: str = ""
    """What a refusal says."""


@contextmanager
def open_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the name is http.server's
            pass

        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_GET

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind, path = _kind(self.path), self.path.partition("?")[0]
            if kind != "upload" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._refuse(401, "Invalid credentials in Authorization header")
            if (status := hub.answers.get(kind)) == 0:
                self.close_connection = True
                return self._drop()
            if status is not None:
                return self._refuse(status, hub.said)
            return self._send(*_reply(hub, kind, path, body))

        def _drop(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)

        def _refuse(self, status: int, said: str) -> None:
            self._send(status, {"error": said}, {"X-Error-Message": said})

        def _send(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _kind(path: str) -> str:
    named = {
        "/api/repos/create": "create",
        "/api/validate-yaml": "yaml",
        "/preupload/": "preupload",
        "/info/lfs/objects/batch": "batch",
        "/upload/": "upload",
        "/commit/": "commit",
    }
    return next((kind for part, kind in named.items() if part in path), "info")


def _reply(hub: Hub, kind: str, path: str, body: bytes) -> tuple[int, Any]:
    match kind:
        case "create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            status = 409 if name in hub.visibility else 200
            hub.visibility.setdefault(name, asked.get("visibility", "public"))
            return status, {"url": f"{hub.address}/{name}"}
        case "info":
            name = path.removeprefix("/api/models/")
            return 200, {"id": name, "private": hub.visibility.get(name) == "private", "sha": "0" * 40}
        case "yaml":
            return 200, {"errors": [], "warnings": []}
        case "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(_LARGE) else "regular" for name in names}
            return 200, {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]}
        case "batch":
            return 200, {"transfer": "basic", "objects": [_action(hub, one) for one in json.loads(body)["objects"]]}
        case "upload":
            hub.blobs[path.rpartition("/")[2]] = body
            hub.uploads += 1
            return 200, {}
        case _:
            for line in map(json.loads, body.splitlines()):
                _commit(hub, line["key"], line["value"])
            url = f"{hub.address}/{path.removeprefix('/api/models/').partition('/commit/')[0]}/commit/{'1' * 40}"
            return 200, {"commitUrl": url, "commitOid": "1" * 40, "pullRequestUrl": None}


def _action(hub: Hub, asked: dict[str, Any]) -> dict[str, Any]:
    """What the hub has already, it does not want again."""
    wanted = (
        {} if asked["oid"] in hub.blobs else {"actions": {"upload": {"href": f"{hub.address}/upload/{asked['oid']}"}}}
    )
    return {"oid": asked["oid"], "size": asked["size"], **wanted}


def _commit(hub: Hub, key: str, value: dict[str, Any]) -> None:
    if key == "file":
        hub.files[value["path"]] = base64.b64decode(value["content"])
    elif key == "lfsFile":
        content = hub.blobs[value["oid"]]
        assert sha256(content).hexdigest() == value["oid"]
        hub.files[value["path"]] = content
