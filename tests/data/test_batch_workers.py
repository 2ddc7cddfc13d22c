"""Batches made by other processes: the same whoever makes them, without a card, and nobody is left behind."""

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator, grouped, lengths_of
from finefit.data.examples import Examples
from finefit.data.image_check import ModelProcessor
from finefit.errors import DataError, FinefitError, ModelError, WorkerDied
from finefit.objective.batch import Batch
from finefit.spec.data import ImageLimits
from tests.conftest import write_jsonl
from tests.data.image_rows import asked, draw, prepared
from tests.vision_models import make_vlm


@pytest.fixture(scope="module")
def one() -> Iterator[BatchWorkers]:
    with BatchWorkers(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Collator, Examples, Path]:
    """Rows with images of many sizes."""
    folder = tmp_path_factory.mktemp("seen")
    model = make_vlm("qwen2_5_vl", folder / "model")
    for n in range(6):
        draw(folder, f"{n}.png", n, size=(40 + 10 * n, 60))
    write_jsonl(folder / "a.jsonl", [asked(n, f"{n}.png", f"{(n + 1) % 6}.png") for n in range(6)])
    _, out = prepared(folder, model, {"train": [{"path": "a.jsonl"}]})
    return (
        Collator(pad=0, processor_factory=ModelProcessor(model, model / "config.json", ImageLimits())),
        Examples(out / "train.safetensors"),
        folder,
    )


def content(batch: Batch) -> object:
    """Every bit of it."""
    tensors: list[tuple[torch.dtype, bytes]] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append((tensor.dtype, tensor.numpy().tobytes()))
        return tensor

    batch.moved(noted)
    assert batch.extra is not None
    return tensors, list(batch.extra.tensors), batch.extra.host, batch.extra.identity, batch.lengths, batch.num_tokens


def test_batches_are_the_same_bit_for_bit_whoever_makes_them(seen: tuple[Collator, Examples, Path]) -> None:
    collator, examples, _ = seen
    groups = [[examples[row] for row in group] for group in grouped(lengths_of(examples), 2)]
    here = [collator(group) for group in groups]
    for count in (1, 2):
        with BatchWorkers(count) as workers:
            there: list[Batch] = [future.result() for future in [workers.submit(collator, group) for group in groups]]
        assert list(map(content, there)) == list(map(content, here))


def test_a_fault_of_an_image_arrives_as_what_it_is(seen: tuple[Collator, Examples, Path], one: BatchWorkers) -> None:
    collator, examples, folder = seen
    whole = (folder / "0.png").read_bytes()
    draw(folder, "0.png", 9)
    try:
        with pytest.raises(
            DataError, match=r"\Aa\.jsonl:1: its image .*0\.png has changed since its rows were prepared"
        ):
            one.submit(collator, [examples[0]]).result()
    finally:
        (folder / "0.png").write_bytes(whole)


def test_a_process_has_no_card_and_what_asks_for_one_is_refused(one: BatchWorkers) -> None:
    assert one.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == ""
    assert one.submit(torch.cuda.is_available).result() is False
    with pytest.raises(ModelError, match=r"requested a GPU but has none: .*:\d+: ") as raised:
        one.submit(partial(torch.zeros, 1, device="cuda")).result()
    assert "make batches on the CPU" in raised.value.remedy


def test_any_other_failure_tells_where_it_happened(one: BatchWorkers) -> None:
    with pytest.raises(FinefitError, match=r"(?s)a process that makes micro-batches failed:.*Traceback.*TypeError"):
        one.submit(operator.add, 1, "x").result()
    with pytest.raises(MemoryError):
        one.submit(partial(bytearray, 1 << 60)).result()


def test_what_is_printed_there_is_no_answer(one: BatchWorkers) -> None:
    assert one.submit(print, "noise").result() is None
    assert one.submit(os.write, 1, b"more noise\n").result() == 11


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_the_whole_group_is_left_to_the_process_that_trains(one: BatchWorkers, name: str) -> None:
    pid = one.submit(os.getpid).result()
    os.kill(pid, getattr(signal, name))
    assert one.submit(os.getpid).result() == pid


def test_a_process_that_is_killed_is_named_with_the_free_host_memory() -> None:
    with BatchWorkers(1) as workers:
        pid = workers.submit(os.getpid).result()
        waiting = workers.submit(time.sleep, 60)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=r"was ended by SIGKILL; \d+\.\d GiB of host memory are free now"
        ) as raised:
            waiting.result(30)
    assert "give the same command again" in raised.value.remedy


def test_one_thread_is_all_that_a_process_computes_with(one: BatchWorkers) -> None:
    assert one.submit(torch.get_num_threads).result() == 1


def test_nobody_is_left_after_the_block_even_in_the_middle_of_a_batch() -> None:
    with BatchWorkers(2) as workers:
        pids = {workers.submit(os.getpid).result() for _ in range(4)}
        busy = workers.submit(time.sleep, 60)
        time.sleep(0.5)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerDied):
        busy.result(10)


@pytest.mark.parametrize("ending", ["", "while True: pass"], ids=["waiting", "in an endless loop"])
def test_nobody_is_left_when_the_parent_is_killed(tmp_path: Path, ending: str) -> None:
    """`ending`: of code of the user's own."""
    begun = tmp_path / "begun"
    called = f"import os; open({str(begun)!r}, 'w').write(str(os.getpid()))\n{ending}"
    code = (
        "from finefit.data.batch_workers import BatchWorkers\n"
        f"with BatchWorkers(1) as workers:\n    workers.submit(exec, {called!r})\n    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        pid = _written(begun)
        parent.kill()
    left = [process for process in [_found(pid)] if process]
    psutil.wait_procs(left, timeout=10)
    try:
        assert _found(pid) is None
    finally:
        for process in left:
            if process.is_running():
                process.kill()


def _written(path: Path) -> int:
    for _ in range(600):
        if path.is_file() and (told := path.read_text()):
            return int(told)
        time.sleep(0.1)
    raise TimeoutError(path)


def _found(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return (
            None if process.status() == psutil.STATUS_ZOMBIE else process
        )  # whoever inherits it has not asked for it yet
    except psutil.NoSuchProcess:
        return None
