"""F9: a process that prepares rows is killed from outside, as the kernel does when host memory is short."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from finefit.data import tokenizer_pool
from finefit.data.prepare import prepare
from finefit.errors import WorkerDied
from finefit.spec.data import Data
from tests.conftest import make_tokenizer, write_jsonl

ROWS = 2000


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(tokenizer_pool, "count_cores", lambda: 2)


def workers() -> list[psutil.Process]:
    """Of the pool: started anew by this process, with Python's own line for such a start."""
    return [child for child in psutil.Process().children() if any("spawn_main" in part for part in _line(child))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kill_one_at_work(over: threading.Event, killed: list[int]) -> None:
    """Once it has computed for a moment, so that rows are in its hands."""
    while not over.is_set():
        busy = [worker for worker in workers() if worker.cpu_times().user > 0.3]
        if busy:
            os.kill(busy[0].pid, signal.SIGKILL)
            killed.append(busy[0].pid)
            return
        time.sleep(0.01)


@pytest.mark.usefixtures("two_processes")
def test_a_pool_process_killed_at_work_is_named_with_the_free_host_memory_and_the_same_call_then_works(
    tmp_path: Path,
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"question": f"what is {n} and {n}? " + "word " * 60, "answer": json.dumps(n)} for n in range(ROWS)],
    )
    data = Data.model_validate({"train": [{"path": "a.jsonl"}]}, strict=False)

    def prepared(name: str) -> Any:
        (tmp_path / name).mkdir()
        return prepare(data, base=tmp_path, tokenizer=tmp_path / "tokenizer", seed=0, folder=tmp_path / name)

    over, killed = threading.Event(), list[int]()
    killer = threading.Thread(target=kill_one_at_work, args=(over, killed))
    killer.start()
    try:
        with pytest.raises(
            WorkerDied, match=r"a process that prepares rows was killed; \d+\.\d GiB of host memory are free now"
        ) as raised:
            prepared("first")
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1
    assert raised.value.exit_code == 3
    assert "give the same command again" in raised.value.remedy
    assert workers() == []
    assert prepared("second").sources[0].used == ROWS


@pytest.mark.slow
def test_no_process_of_the_pool_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Not even one that has nothing to do."""
    make_tokenizer().save_pretrained(tmp_path)
    code = """
import sys
from multiprocessing import active_children
from pathlib import Path
from finefit.data.image_check import ModelProcessor
from finefit.data.tokenizer_pool import TokenizerPool
from finefit.data.render import open_renderer
from finefit.data.rows import Message, Row
from finefit.spec.data import Data, ImageLimits, Source
folder = Path(sys.argv[1])
data = Data(train=(Source(path="a.jsonl"),))
row = Row(source="a.jsonl", number=1, messages=(Message("user", "what?"), Message("assistant", "that")))
factory = ModelProcessor(folder, folder / "config.json", ImageLimits())
pool = TokenizerPool(
    open_renderer(folder, "chat"), data, folder, factory, processes=2, with_system=False
)
with pool as pieces:
    list(pieces.render([row]))
    print(*(child.pid for child in active_children()), flush=True)
    input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        left = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
        parent.kill()
    assert left
    _, alive = psutil.wait_procs(left, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []
