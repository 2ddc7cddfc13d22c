"""Other people's programs in child processes: they end when this process ends, and their last lines are kept for the
error. A crash inside one of them, as llama.cpp's asserts are, ends that process alone."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGILL, SIGINT, SIGKILL, SIGTERM, Signals

from finefit.artifacts.atomic import disk_full
from finefit.errors import FinefitError, ModelError, WorkerDied
from finefit.facts.files import free_bytes

_TAIL_LINES, _LINE_CHARACTERS = 12, 400
_SPIN = {"GOMP_SPINCOUNT": "2000"}
"""As for training: threads that wait for each other by spinning lose much on shared cores."""
_KILLS = (SIGKILL, SIGTERM, SIGINT, SIGHUP)
_DISK_IS_FULL = ("No space left on device", "Disk quota exceeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child process ended."""

    code: int
    tail: tuple[str, ...]
    """Its last lines on stdout and stderr."""

    @property
    def reason(self) -> str:
        """The last line, which in Python is the exception."""
        return self.tail[-1] if self.tail else f"it ended with code {self.code} and printed nothing"


def run_child(module: str, arguments: Iterable[str | Path], *, paths: Sequence[Path] = ()) -> Ended:
    """Runs `python -m module arguments`. `paths` come before all other folders that Python imports from."""
    command = [sys.executable, "-P", "-m", "finefit.artifacts.processes", str(os.getpid()), module]
    found = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = _SPIN | os.environ | {"PYTHONPATH": os.pathsep.join(found), "PYTHONUNBUFFERED": "1"}
    # a model that names code on the hub must not have it fetched and run
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GGML_NO_BACKTRACE": "1"}
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as child:
        assert child.stdout is not None
        try:
            tail.extend(line.rstrip()[:_LINE_CHARACTERS] for line in child.stdout if line.strip())
        except BaseException:
            child.kill()
            raise
    return Ended(code=child.returncode, tail=tuple(tail))


def failure(ended: Ended, problem: str, remedy: str, *, path: Path) -> FinefitError:
    """The error of a child that failed. `problem`: what it could not do; `path`: where it wrote."""
    if any(words in line for line in ended.tail for words in _DISK_IS_FULL):
        return disk_full(path, None, free_bytes(path))
    if -ended.code in _KILLS:
        ended_by = f"{problem}: the process was ended by {Signals(-ended.code).name}"
        return WorkerDied(ended_by, "look for a lack of host memory (dmesg), and give the same command again")
    if ended.code == -SIGILL:
        return ModelError(f"{problem}: this processor lacks an instruction that it uses", "use one with AVX2")
    before = "".join(f"\n  {line}" for line in ended.tail[:-1])
    return ModelError(f"{problem}: {ended.reason}{before and ' Before that it printed:'}{before}", remedy)
