"""The local server: binding, serving, and the guard between the network and a page.

Any web page that a user has open can send requests to this machine, even under a host name of its own that resolves
here (DNS rebinding). So the Host must be one of ours, a request that changes something must be JSON and come from our
own page, and no other site may frame, read or cache a response.
"""

import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TypeVar

import psutil
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finefit.errors import UserError
from finefit.spec import Part

A = TypeVar("A", bound=Part)
TOKEN = "FINEFIT_TOKEN"
_SHORTEST_TOKEN = 16
MAX_BODY_BYTES = 64 << 10
MAX_HEADER_BYTES = 16 << 10
"""The limit of the address and all headers together; several times what a browser sends."""
LOGIN = "/api/login"
_HTTP = 80
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
POLICY = "Content-Security-Policy"
STATIC_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of a self-contained page with its styles in it, whose text is escaped and which has no script."""
_HEADERS = {
    POLICY: (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Whoever knows `secret` gets a session cookie; the secret itself is never stored in a browser."""

    secret: str = field(repr=False)
    port: int
    """Part of the cookie's name, since cookies ignore ports and two reviews on one machine would share theirs."""
    session: str = field(repr=False, default_factory=lambda: secrets.token_urlsafe(32))

    def opens(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.secret.encode())

    def knows(self, cookies: str) -> bool:
        """The cookie is parsed by hand, because the standard library stops at a malformed cookie, which another program
        may have set."""
        pairs = [pair.partition("=") for pair in cookies.split(";")]
        given = [value.strip() for name, _, value in pairs if name.strip() == self._name]
        return any(hmac.compare_digest(value.encode(), self.session.encode()) for value in given)

    @property
    def cookie(self) -> str:
        return f"{self._name}={self.session}; HttpOnly; SameSite=Strict; Path=/"

    @property
    def _name(self) -> str:
        return f"finefit-{self.port}"


class Guard:
    """An ASGI wrapper. `hosts` has every name with its port, as a browser writes it, that the server answers to."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], token: Token | None = None) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token
        self.is_ending: Callable[[], bool] = lambda: False
        """Whether the server was asked to end; a response without an end of its own must then end itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # neither lifespan nor websockets
            return
        scope["is_ending"] = self.is_ending

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refusal(scope)
        if refused is None and scope["method"] == "POST":
            body = await _read(receive)
            if body is None:
                refused = PlainTextResponse(f"more than {MAX_BODY_BYTES:,} bytes", 413)
            else:
                receive = _replayed(body)
        await (refused or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        sent = (
            scope.get("raw_path", b""),
            scope["query_string"],
            *(part for pair in scope["headers"] for part in pair),
        )
        if sum(map(len, sent)) > MAX_HEADER_BYTES:
            return PlainTextResponse(f"more than {MAX_HEADER_BYTES:,} bytes of headers", 431)
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server does not answer to that host name", 421)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("only GET and POST are allowed", 405, headers={"Allow": "GET, HEAD, POST"})
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("the request comes from another site", 403)
        if scope["method"] == "POST":
            if headers.getlist("origin") != [f"http://{hosts[0]}"]:
                return PlainTextResponse("the request does not come from this page", 403)
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return PlainTextResponse("the body must be application/json", 415)
        # the page itself holds no data; its requests need the cookie
        is_private = scope["path"].startswith("/api/") and scope["path"] != LOGIN
        if is_private and self._token is not None and not self._token.knows(headers.get("cookie", "")):
            return PlainTextResponse("open the address that was printed at the start: it contains the token", 401)
        return None


async def _read(receive: Receive) -> bytes | None:
    """None if the body is too long; a sender need not declare a length."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):  # complete, or the sender disconnected
            return bytes(body)


def _replayed(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if len(messages) > 1 else messages[0]

    return receive


class BadRequest(Exception):
    """The request's body is not one that our page sends."""


async def body_of(request: Request, kind: type[A]) -> A:
    try:
        return kind.model_validate(json.loads(await request.body()))
    except (ValueError, RecursionError):  # not JSON, not UTF-8, nested too deep, or other fields
        raise BadRequest from None


async def bad_request(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": "this request does not come from the page; reload it"}, 400)


class _Login(Part):
    token: str


def login_route(token: Token | None) -> Route:
    async def login(request: Request) -> Response:
        given = (await body_of(request, _Login)).token
        if token is None or not token.opens(given):
            return JSONResponse({"error": "this is not the token"}, 401)
        return Response(status_code=204, headers={"Set-Cookie": token.cookie})

    return Route(LOGIN, login, methods=["POST"])


def file_response(name: str) -> Response:
    """A file of `pages/`, of which only our own code gives the name."""
    content = files("finefit.web").joinpath("pages", *name.split("/")).read_bytes()
    return Response(content, media_type=f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8")


def file_routes(names: Mapping[str, str]) -> list[Route]:
    """The files of `pages/` by their paths, and no icon."""

    def route(path: str, name: str) -> Route:
        async def file(_: Request) -> Response:
            return file_response(name)

        return Route(path, file)

    async def no_icon(_: Request) -> Response:
        return Response(status_code=204)

    return [*(route(path, name) for path, name in names.items()), Route("/favicon.ico", no_icon)]


def is_loopback(host: str) -> bool:
    address = _ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


_ANOTHER_HOST = "name an address of this machine with --host, or leave it out for this machine alone"


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except TypeError as error:  # of a host that is no text to look up
            raise UserError(f"cannot listen on {host!r}: {error}", _ANOTHER_HOST) from None
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            remedy = "name another --port, or leave it out to get a free one" if is_port else _ANOTHER_HOST
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}", remedy) from None
        yield listening


def names_of(host: str, port: int) -> list[str]:
    """The host names that a browser may use, the one to show first: all names of this machine if the server listens
    everywhere."""
    reached = [host, *(["localhost"] if is_loopback(host) else [])]
    if host in ("0.0.0.0", "::"):
        interfaces = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
        found = (interface.address.partition("%")[0] for interface in interfaces)
        reached = [socket.gethostname(), *(address for address in found if _ip_address(address)), "localhost"]
    names = [f"[{name}]" if ":" in name else name for name in dict.fromkeys(reached)]
    bare = names if port == _HTTP else []  # a browser omits this port
    return bare + [f"{name}:{port}" for name in names]


def serve_page(
    make_app: Callable[[Token | None], ASGIApp],
    *,
    host: str,
    port: int,
    asks_token: bool,
    ready: Callable[[str, str], None],
    path: str = "/",
) -> None:
    """Serves an app behind the guard until Ctrl-C. Without loopback, or with `asks_token`, the token is that of the
    environment or a new one. `ready` is told the address of `path`, and what has to be added to it by hand."""
    given = os.environ.get(TOKEN)  # not an option, because everybody on the machine can see command lines
    if given is not None and len(given) < _SHORTEST_TOKEN:
        problem = f"${TOKEN} has {len(given)} characters and could be guessed"
        raise UserError(problem, f"give at least {_SHORTEST_TOKEN} characters, or unset it to get a new token")
    with bound(host, port) as listening:
        port = listening.getsockname()[1]
        token = None
        if asks_token or not is_loopback(host):
            token = Token(secret=given or secrets.token_urlsafe(24), port=port)
        hosts = names_of(host, port)
        address = f"http://{hosts[0]}{path}" + (f"#token={token.secret}" if token and not given else "")
        hint = f", followed by #token= and the value of ${TOKEN}" if token and given else ""
        with suppress(KeyboardInterrupt):  # the usual way to stop a server
            app = Guard(make_app(token), hosts=hosts, token=token)
            serve(app, listening, ready=lambda: ready(address, hint))


def serve(app: Guard, listening: socket.socket, *, ready: Callable[[], None] = lambda: None) -> None:
    """Runs until a signal. Nothing is logged, because an address may hold private data."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        http="h11",  # the other parser of uvicorn takes headers of any length
        h11_max_incomplete_event_size=256 << 10,  # what is longer is answered with 400 and never held in memory
    )
    listening.listen(64)
    ready()
    server = uvicorn.Server(config)
    app.is_ending = lambda: server.should_exit
    server.run(sockets=[listening])
