"""Pages that other verbs make, each in a process of its own: this one's memory stays small, and what fails there fails
alone. A comparison and a report are made anew each time; a review runs until the page's server ends."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from finefit.errors import RunError
from finefit.web.server import TOKEN

CHILD_SECONDS = 120.0
FILE_OPTIONS = {"compare": "--html", "report": "--out"}
"""The verbs that make a page, with the option that names its file."""
_MAX_REVIEWS = 8
_REMEDY = "give the command in a terminal"
Child = subprocess.Popen[bytes]


class LinkedPages:
    """`host` is where reviews listen too; anywhere but on loopback each asks for a token of its own. The `with` block
    ends them."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = asyncio.Lock()  # one at a time: viewers wait for each other rather than for the training's cores
        self._reviews: dict[tuple[str, ...], tuple[Child, str]] = {}

    def __enter__(self) -> "LinkedPages":
        return self

    def __exit__(self, *_: object) -> None:
        for child, _address in self._reviews.values():
            child.terminate()
            child.communicate()

    async def made(self, verb: str, targets: Sequence[Path]) -> bytes:
        """The page as HTML, self-contained and without a script."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            await self.answered("finefit", verb, *map(str, targets), FILE_OPTIONS[verb], str(file))
            return file.read_bytes()

    async def answered(self, module: str, *arguments: str) -> bytes:
        """What a process of ours writes to its output; a RunError with what it says if it fails."""
        async with self._lock:
            return await run_in_threadpool(_answer_of, _start(module, *arguments))

    async def review(self, targets: Sequence[Path]) -> str:
        """The address of a review of one or two runs, which is opened if it is not open yet."""
        names = tuple(map(str, targets))
        async with self._lock:
            self._reviews = {key: one for key, one in self._reviews.items() if one[0].poll() is None}
            if names not in self._reviews:
                if len(self._reviews) >= _MAX_REVIEWS:
                    problem = f"{_MAX_REVIEWS} reviews are open already"
                    raise RunError(problem, "end this page's server and start it again")
                child = _start("finefit", "review", *names, "--host", self._host, "--json")
                self._reviews[names] = child, await run_in_threadpool(_address_of, child)
            return self._reviews[names][1]


def _start(module: str, *arguments: str) -> Child:
    """It ends with the thread that starts it, which must be that of the server. The token of this page is not handed
    on: a review makes its own."""
    words = (sys.executable, "-P", "-m", "finefit.artifacts.processes", str(os.getpid()), module, *arguments)
    environment = {name: value for name, value in os.environ.items() if name != TOKEN} | {"NO_COLOR": "1"}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(words, stdin=nothing, stdout=pipe, stderr=pipe, env=environment)


def _answer_of(child: Child) -> bytes:
    with child:
        try:
            answer, told = child.communicate(timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise RunError(f"no answer within {CHILD_SECONDS:.0f} s", _REMEDY) from None
    if child.returncode != 0:
        raise RunError(_words(told), _REMEDY)
    return answer


def _address_of(child: Child) -> str:
    assert child.stdout is not None
    too_late = threading.Timer(CHILD_SECONDS, child.kill)
    too_late.start()
    line = child.stdout.readline()  # empty if it ends without one
    try:
        address = str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        with child:
            raise RunError(_words(child.communicate()[1]), _REMEDY) from None
    finally:
        too_late.cancel()
    return address


def _words(told: bytes) -> str:
    return told.decode(errors="replace").strip()[-2000:] or "it failed without a word"
