"""Binding and serving: on loopback at a free port, unless the user asks for more."""

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import uvicorn

from finefit.errors import UserError
from finefit.web.guard import Guard

LOOPBACK = "127.0.0.1"
_HTTP = 80


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """`port` 0: any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise UserError(
                f"{host}:{port} cannot be listened on: {error.strerror}",
                "name another --port, or leave it away for a free one",
            ) from None
        yield listening


def names_of(host: str, port: int) -> list[str]:
    """By which a browser may call us, the one to show first. Listening everywhere, those are all of this machine's addresses and its name."""
    names = [_written(name) for name in _reached_by(host)]
    bare = names if port == _HTTP else []  # a browser leaves this port away
    return bare + [f"{name}:{port}" for name in names]


def _reached_by(host: str) -> list[str]:
    if host in ("0.0.0.0", "::"):
        machine = socket.gethostname()
        found = [
            address.address.partition("%")[0]
            for addresses in psutil.net_if_addrs().values()
            for address in addresses
            if _is_address(address.address)
        ]
        return list(dict.fromkeys([machine, *found, "localhost"]))
    return list(dict.fromkeys([host, *(["localhost"] if is_loopback(host) else [])]))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def serve(app: Guard, listening: socket.socket, *, ready: Callable[[], None] = lambda: None) -> None:
    """Until a signal. Nothing is logged: an address may hold what is nobody else's business."""
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
        h11_max_incomplete_event_size=32 << 10,
    )
    listening.listen(64)
    ready()
    uvicorn.Server(config).run(sockets=[listening])
