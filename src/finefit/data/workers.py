"""`python -m finefit.data.workers PARENT`: processes that make batches where that takes long, since images are decoded for it. They see no card: CUDA
is hidden from them before torch is imported, and what reaches for one there is refused. They end with PARENT, which started them.

A call with its arguments goes in on standard input, what it returns comes back on standard output. Which of them makes a batch plays no part in it.
"""

import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Final, Literal, NamedTuple

import psutil

from finefit import errors
from finefit.artifacts.launcher import end_with_parent
from finefit.errors import FinefitError, ModelError, WorkerDied
from finefit.facts.machine import count_cores

_HIDDEN: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Several of them share the cores with the process that trains, so each takes one."""
_MOST: Final = 8
_SIZE: Final = struct.Struct("<Q")
_CARD: Final = re.compile(r"CUDA|NVIDIA|accelerator")
"""In what torch says where a card is asked for and none is there."""
_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def num_workers(num_ranks: int) -> int:
    """Of one rank, whose neighbours have as many."""
    return max(1, min(_MOST, count_cores() // num_ranks))


class _Failed(NamedTuple):
    kind: Literal["ours", "card", "memory", "other"]
    problem: str
    remedy: str = ""
    error: str = ""
    """The type, where it is one of ours."""


class Workers:
    """So many processes, each started when it is first needed; none outlives the `with` block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="workers")
        self._own = threading.local()
        self._lock, self._started, self._is_closed = threading.Lock(), list[subprocess.Popen[bytes]](), False

    def submit(self, call: Callable[..., Any], *args: object) -> "Future[Any]":
        """What `call` returns; it, its arguments and that have to be picklable, and known in a process that has only finefit imported."""
        return self._threads.submit(self._asked, pickle.dumps((call, args)))

    def _asked(self, request: bytes) -> Any:
        process = self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, request)
            answer = _read(process.stdout)
        except (OSError, ValueError):  # its end is closed, or ours
            answer = None
        if answer is None:
            raise _died(process)
        found = pickle.loads(answer)  # of a process of ours, over a pipe that nobody else holds
        if isinstance(found, _Failed):
            raise _raised(found)
        return found

    def _process(self) -> "subprocess.Popen[bytes]":
        """Of this thread."""
        if not hasattr(self._own, "process"):
            with self._lock:
                if self._is_closed:
                    raise FinefitError("a batch was asked of processes that have ended")
                command = [sys.executable, "-P", "-m", "finefit.data.workers", str(os.getpid())]
                self._own.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _HIDDEN
                )
                self._started.append(self._own.process)
        return self._own.process  # type: ignore[no-any-return]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        """They hold nothing that could be lost."""
        with self._lock:
            self._is_closed = True
        for process in self._started:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                _close(pipe)


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except BrokenPipeError:  # what was still to be written is not wanted any more
        pass


def _died(process: "subprocess.Popen[bytes]") -> WorkerDied:
    code, free = process.wait(), psutil.virtual_memory().available / 2**30
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return WorkerDied(
        f"a process that makes micro-batches {how}; {free:.1f} GiB of host memory are free now",
        "look for a lack of host memory (dmesg), close other programs, and give the same command again: it goes on from the last checkpoint",
    )


def _raised(failed: _Failed) -> Exception:
    match failed.kind:
        case "ours":
            kind: type[FinefitError] = getattr(errors, failed.error, FinefitError)
            return kind(failed.problem, failed.remedy)
        case "card":
            return ModelError(
                f"a process that makes micro-batches was asked for a card, and has none: {failed.problem}",
                "make batches on the CPU: they are moved to the card when the step takes them",
            )
        case "memory":
            return MemoryError(failed.problem)
        case "other":
            return FinefitError(
                f"a process that makes micro-batches failed:\n{failed.problem}", "please report it with these lines"
            )


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_SIZE.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """None where the other side has ended."""
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    content = pipe.read(size)
    return content if len(content) == size else None


def _answer(request: bytes) -> object:
    try:
        call, args = pickle.loads(request)
        return call(*args)
    except FinefitError as error:
        return _Failed("ours", error.problem, error.remedy, type(error).__name__)
    except MemoryError as error:
        return _Failed("memory", str(error))
    except (RuntimeError, AssertionError) as error:
        if _CARD.search(str(error)):
            return _Failed("card", f"{_where(error)}: {str(error).splitlines()[0]}")
        return _Failed("other", traceback.format_exc())
    except Exception:  # noqa: BLE001 whatever it is, it is told where the batch was asked for
        return _Failed("other", traceback.format_exc())


def _where(error: BaseException) -> str:
    """The last line of code that is not torch's own."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "in torch"


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    for name in (
        _SIGNALS
    ):  # it ends when its parent does, or is killed by it: a signal to the whole group is the parent's matter
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what is called here may print, and must not be taken for an answer
    os.dup2(2, 1)
    while (request := _read(requests)) is not None:
        try:
            _write(answers, pickle.dumps(_answer(request)))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    # under its own name, so that both sides mean the same types
    from finefit.data.workers import main as work

    work()
