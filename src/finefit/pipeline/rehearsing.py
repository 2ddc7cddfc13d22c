"""The process that rehearses, from outside. It imports torch once, which takes longer than most rehearsals: where many questions are to be asked, one
process answers them all. Nothing here imports torch."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

from finefit.artifacts.forecasts import Answer, Question
from finefit.artifacts.records import read_record, write_record
from finefit.errors import FinefitError, ModelError

_TAIL_LINES = 12


class Rehearser:
    """Answers one question after the other; ended by a fault inside torch, it is started anew for the next one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="finefit-plan-")
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Question) -> Answer:
        asked, answered = (Path(self._folder.name) / name for name in ("question.json", "answer.json"))
        answered.unlink(missing_ok=True)
        write_record(asked, question)
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            print(asked, answered, sep="\t", file=process.stdin, flush=True)
            process.stdout.readline()  # it says that it is done, or is gone
        if answered.exists():
            return read_record(answered, Answer)
        code, self._process = self._end(process), None
        raise _died(code, self._words)

    @property
    def _words(self) -> Path:
        return Path(self._folder.name) / "stderr"

    def _started(self) -> "subprocess.Popen[str]":
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", "-m", "finefit.plan.worker"]
        with self._words.open("w") as words:
            pipe = subprocess.PIPE
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=words, text=True, errors="replace", env=environment
            )

    def _end(self, process: "subprocess.Popen[str]") -> int:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was not taken any more
                    pipe.close()
        return process.wait()

    def __enter__(self) -> "Rehearser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if error is not None:  # somebody pressed Ctrl-C, or will not wait for the answer
                self._process.kill()
            self._end(self._process)
        self._folder.cleanup()


_shared: ContextVar[Rehearser | None] = ContextVar("shared rehearser", default=None)


@contextmanager
def one_rehearser() -> Iterator[None]:
    """All that is asked inside is asked of one process."""
    if _shared.get() is not None:
        yield
        return
    with Rehearser() as rehearser:
        before = _shared.set(rehearser)
        try:
            yield
        finally:
            _shared.reset(before)


def ask(question: Question) -> Answer:
    with one_rehearser():
        rehearser = _shared.get()
        assert rehearser is not None
        return rehearser.ask(question)


def _died(code: int, words: Path) -> FinefitError:
    tail = "\n".join(words.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:])
    if code < 0:
        name = signal.Signals(-code).name
        return ModelError(
            f"the rehearsal was ended by {name} inside torch; its last words:\n{tail}",
            "please report it with the model's config.json",
        )
    return FinefitError(
        f"the rehearsal ended with code {code}, which is a fault of finefit:\n{tail}",
        "please report it with these lines",
    )
