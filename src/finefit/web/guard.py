"""What stands between the network and a page.

A page that anybody on the web has open can send requests to this machine, under a name of its own that it lets point here. So the Host must be
one of ours, a request that changes something must come from our own page and be JSON, and nothing foreign may frame, read or keep an answer."""

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 64 << 10
LOGIN = "/api/login"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Who knows `secret` gets the cookie of this start; the secret itself is never stored in a browser."""

    secret: str = field(repr=False)
    port: int
    """Cookies know no ports: without it in their name, two reviews on one machine would take each other's away."""
    session: str = field(repr=False, default_factory=lambda: secrets.token_urlsafe(32))

    def opens(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.secret.encode())

    def knows(self, cookies: str) -> bool:
        """Other programs on this machine may have set odd ones, behind which the standard library's reader finds nothing more."""
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
    """ASGI around an application. `hosts`: every name, as a browser writes it with the port, that it may be called by."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], token: Token | None = None) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no lifespan and no sockets
            return
        sending = _with_headers(send)
        refused = self._refusal(scope)
        if refused is None and scope["method"] == "POST":
            body = await _read(receive)
            if body is None:
                refused = PlainTextResponse(f"more than {MAX_BODY_BYTES:,} bytes", 413)
            else:
                receive = _replayed(body)
        await (refused or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server does not go by that name", 421)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("there is only GET and POST", 405, headers={"Allow": "GET, HEAD, POST"})
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("asked by another site", 403)
        if scope["method"] == "POST":
            if headers.getlist("origin") != [f"http://{hosts[0]}"]:
                return PlainTextResponse("asked by another site, or by none", 403)
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return PlainTextResponse("the body must be application/json", 415)
        return self._stranger(scope, headers)

    def _stranger(self, scope: Scope, headers: Headers) -> PlainTextResponse | None:
        """The page itself holds nothing; whatever it asks for needs the cookie."""
        asks = scope["path"].startswith("/api/") and scope["path"] != LOGIN
        if self._token is None or not asks or self._token.knows(headers.get("cookie", "")):
            return None
        return PlainTextResponse("open the address that was printed at the start: it has the token", 401)


async def _read(receive: Receive) -> bytes | None:
    """None where it is too long; a sender need not say how long it is."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):  # at its end, or the sender is gone
            return bytes(body)


def _replayed(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if len(messages) > 1 else messages[0]

    return receive


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return sending
