"""`python -m finefit.data.batch_workers PARENT`: worker processes that make batches, for data whose images take long to
decode. They see no GPU: CUDA is hidden from them before torch is imported, and code that requests a GPU fails. They end
when PARENT, which started them, ends.

A call with its arguments arrives on standard input, and its result is returned on standard output. A batch does not
depend on which worker makes it."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Final

import psutil

from finefit import errors
from finefit.artifacts.processes import end_with_parent
from finefit.errors import FinefitError, ModelError, WorkerDied, first_line
from finefit.facts.machine import count_cores

_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Several workers share the cores with the training process, so each uses one thread."""


def num_workers(num_ranks: int) -> int:
    """Workers of one rank; every rank on this machine has as many."""
    return max(1, min(8, count_cores() // num_ranks))


class BatchWorkers:
    """A fixed number of processes, each started when it is first needed; none outlives the `with` block."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="workers")
        self._own = threading.local()
        self._lock, self._started, self._is_closed = threading.Lock(), list[subprocess.Popen[bytes]](), False

    def submit(self, call: Callable[..., Any], *args: object) -> "Future[Any]":
        """The call, its arguments and its result must be picklable in a process that has only imported finefit."""
        return self._threads.submit(self._result, pickle.dumps((call, args)))

    def _result(self, request: bytes) -> Any:
        """The process of this thread makes the result."""
        if not hasattr(self._own, "process"):
            with self._lock:
                if self._is_closed:
                    raise FinefitError("a batch was requested from workers that have ended")
                command = [sys.executable, "-P", "-m", "finefit.data.batch_workers", str(os.getpid())]
                pipe, environment = subprocess.PIPE, os.environ | _ONE_THREAD | {"CUDA_VISIBLE_DEVICES": ""}
                self._own.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
                self._started.append(self._own.process)
        process: subprocess.Popen[bytes] = self._own.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, request)
            answer = _read(process.stdout)
        except (OSError, ValueError):  # one end of the pipe is closed
            answer = None
        if answer is None:
            code, free = process.wait(), psutil.virtual_memory().available / 2**30
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise WorkerDied(
                f"a process that makes micro-batches {how}; {free:.1f} GiB of host memory are free now",
                "look for a lack of host memory (dmesg), close other programs, and give the same command again, which "
                "resumes from the last checkpoint",
            )
        found = pickle.loads(answer)  # from our own process, over a pipe that nobody else holds
        if isinstance(found, Exception):
            raise found
        return found

    def __enter__(self) -> "BatchWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        """Workers hold nothing that could be lost, so they are killed."""
        with self._lock:
            self._is_closed = True
        for process in self._started:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):  # unsent data is no longer needed
                    pipe.close()


def _write(pipe: IO[bytes], content: bytes) -> None:
    pickle.dump(content, pipe)  # pickle stores the length, so the content may be anything
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Returns None if the other side has ended."""
    try:
        content: bytes = pickle.load(pipe)
        return content
    except (EOFError, pickle.UnpicklingError):
        return None


def _answer(request: bytes) -> object:
    """Returns the call's result, or the error to raise in the process that requested the batch."""
    try:
        call, args = pickle.loads(request)
        return call(*args)
    except FinefitError as error:
        kind: type[FinefitError] = getattr(errors, type(error).__name__, FinefitError)
        return kind(error.problem, error.remedy)
    except MemoryError as error:
        return MemoryError(str(error))
    except Exception as error:  # noqa: BLE001 any error is raised again in the parent
        # torch's message when code asks for a GPU and there is none
        if isinstance(error, RuntimeError | AssertionError) and re.search("CUDA|NVIDIA|accelerator", str(error)):
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
            where = f"{own[-1].filename}:{own[-1].lineno}" if own else "in torch"
            what = f"requested a GPU but has none: {where}: {first_line(error)}"
            remedy = "make batches on the CPU: the step moves them to the GPU"
            return ModelError(f"a process that makes micro-batches {what}", remedy)
        problem = f"a process that makes micro-batches failed:\n{traceback.format_exc()}"
        return FinefitError(problem, "please report it with these lines")


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        # it ends with its parent or is killed by it; a signal to the whole group is for the parent
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # called code may print, and its output must not be read as a result
    os.dup2(2, 1)
    while (request := _read(requests)) is not None:
        try:
            _write(answers, pickle.dumps(_answer(request)))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    # import it under its own name, so that both sides pickle the same types
    from finefit.data import batch_workers

    batch_workers.main()
