"""Workers of a few lines instead of the real ones: what is tested is how they are started, stopped and reported."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from finefit.artifacts.processes import STOP_SIGNALS
from finefit.errors import Interrupted, WorkerDied
from finefit.facts.machine import Power
from finefit.facts.nvml import CardProcess
from finefit.run import launch as launching
from finefit.run.launch import MemoryMeter, inhibit_sleep, launch, log_tail


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of the module `fake_worker`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "fake_worker.py"


class Ticks:
    """Sends a signal to this process once the worker has said that it is ready."""

    def __init__(self, log: Path, number: signal.Signals) -> None:
        self._log, self._number, self.sent = log, number, False

    def __call__(self) -> None:
        if not self.sent and b"ready" in self._log.read_bytes():
            os.kill(os.getpid(), self._number)
            self.sent = True


def _launch(worker: Path, tick: object = None) -> int:
    log = worker.with_name("run.log")
    descriptor = os.open(worker.with_name("run.lock"), os.O_RDWR | os.O_CREAT)
    try:
        return launch("fake_worker", worker, log=log, lock=descriptor, tick=tick if callable(tick) else lambda: None)
    finally:
        os.close(descriptor)


def test_a_worker_gets_its_argument_and_its_words_go_to_the_log(worker: Path) -> None:
    worker.write_text("import sys; print('hello', sys.argv[1]); sys.stderr.write('and errors'); sys.exit(2)")
    assert _launch(worker) == 2
    log = worker.with_name("run.log").read_text()
    assert f"hello {worker}" in log
    assert "and errors" in log


def test_what_torch_must_find_at_its_start_is_set_and_the_users_own_setting_kept(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")
    worker.write_text("import os; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], os.environ['TOKENIZERS_PARALLELISM'])")
    _launch(worker)
    assert worker.with_name("run.log").read_text() == "mine false\n"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_passed_on_and_our_own_handler_put_back(worker: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    worker.write_text(
        textwrap.dedent(f"""
        import signal, sys, time
        signal.signal({number.value}, lambda *_: sys.exit(3))
        print("ready", flush=True)
        time.sleep(60)
        """)
    )
    assert _launch(worker, Ticks(worker.with_name("run.log"), number)) == 3
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_too_late_for_a_worker_stops_what_would_follow(worker: Path) -> None:
    worker.write_text(
        textwrap.dedent("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        time.sleep(60)
        """)
    )
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        _launch(worker, Ticks(worker.with_name("run.log"), signal.SIGTERM))


def test_a_signal_that_is_ignored_as_under_nohup_stays_ignored(worker: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        worker.write_text("import time; print('ready', flush=True); time.sleep(1)")
        assert _launch(worker, Ticks(worker.with_name("run.log"), signal.SIGHUP)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_users_module_with_the_name_of_a_library_is_not_taken_for_it(
    worker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "project"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(elsewhere)
    worker.write_text("import queue; print(queue.Queue.__name__)")
    assert _launch(worker) == 0
    assert worker.with_name("run.log").read_text() == "Queue\n"


def test_a_killed_worker_is_reported_with_the_end_of_its_log_and_the_usual_reason(worker: Path) -> None:
    worker.write_text("import os, signal; print('my last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerDied) as caught:
        _launch(worker)
    assert "ended by SIGKILL; usually for lack of host memory" in caught.value.problem
    assert "my last words" in caught.value.problem
    assert "give the same command again" in caught.value.remedy


def test_a_worker_whose_launcher_fails_is_told_and_waited_for(worker: Path) -> None:
    worker.write_text("import sys; sys.stdin.read(); print('ended in order', flush=True)")

    def fail() -> None:
        raise ZeroDivisionError

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        _launch(worker, fail)
    assert worker.with_name("run.log").read_text() == "ended in order\n"
    assert time.monotonic() - began < 30


BATTERY = Power(on_battery=True, has_battery=True, percent=41.0)
MAINS = Power(on_battery=False, has_battery=True, percent=99.0)
DESKTOP = Power(on_battery=False, has_battery=False, percent=None)


def _warnings(monkeypatch: pytest.MonkeyPatch, power: Power, command: list[str] | None) -> list[str]:
    monkeypatch.setattr(launching, "read_power", lambda: power)
    monkeypatch.setattr(launching, "_command", lambda: command)
    said: list[str] = []
    with inhibit_sleep(said.append):
        pass
    return said


def test_a_laptop_on_battery_that_cannot_be_kept_awake_is_warned_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    battery, sleep = _warnings(monkeypatch, BATTERY, None)
    assert "running on battery (41 %)" in battery
    assert "keep the lid open" in sleep


def test_an_inhibitor_that_refuses_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (sleep,) = _warnings(monkeypatch, MAINS, ["false"])
    assert "no way to prevent sleep" in sleep


@pytest.mark.parametrize("command", [None, ["false"], ["cat"]])
def test_a_machine_without_a_battery_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch, command: list[str] | None
) -> None:
    assert _warnings(monkeypatch, DESKTOP, command) == []


def test_an_inhibitor_holds_while_the_run_lasts_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "read_power", lambda: MAINS)
    monkeypatch.setattr(launching, "_command", lambda: ["cat"])
    with inhibit_sleep(lambda _: None):
        (inhibitor,) = [child for child in psutil.Process().children() if child.name() == "cat"]
    assert not inhibitor.is_running()


# the memory of a stage: seen from outside, and given back before the next one begins

GIB = 2**30


@pytest.fixture
def holder() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds some memory until it is asked to end."""
    code = (
        "import sys; held = bytearray(96 << 20); held[::4096] = b'x' * len(held[::4096]); print('here', "
        "flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def _wait(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"


def _silence(line: str) -> None:
    raise AssertionError(line)


def test_on_a_cpu_the_processes_of_the_stage_count_and_those_from_before_do_not(
    holder: "subprocess.Popen[bytes]",
) -> None:
    _wait(holder)
    meter = MemoryMeter("cpu", _silence)
    meter.tick()
    assert (meter.before, meter.peak) == (0, 0)


def test_a_process_of_the_stage_is_waited_for_until_it_has_given_its_memory_back() -> None:
    meter = MemoryMeter("cpu", _silence)
    code = (
        "import time; held = bytearray(96 << 20); held[::4096] = b'x' * len(held[::4096]); print('here', "
        "flush=True); time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        _wait(child)
        meter.tick()
        memory = meter.settled()
    assert memory.after_bytes < 96 << 20
    assert memory.peak_bytes is not None
    assert memory.peak_bytes > 96 << 20


def test_what_is_never_given_back_is_told_with_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    used = iter([GIB, 3 * GIB, *[2 * GIB] * 99])
    monkeypatch.setattr(launching, "used_bytes", lambda _: next(used))
    monkeypatch.setattr(
        launching, "read_card_processes", lambda: (CardProcess(pid=4711, name="python", memory_bytes=GIB),)
    )
    monkeypatch.setattr(launching, "_PATIENCE_SECONDS", 0.3)
    began = time.monotonic()
    meter = MemoryMeter("cuda", told.append)
    meter.tick()
    memory = meter.settled(loaded=GIB // 2, peak=GIB)
    assert time.monotonic() - began >= 0.3
    assert (memory.before_bytes, memory.loaded_bytes, memory.peak_bytes, memory.after_bytes) == (
        GIB,
        GIB + GIB // 2,
        3 * GIB,
        2 * GIB,
    )
    assert len(told) == 1
    assert "1,073,741,824 bytes more than before are in use" in told[0]
    assert "held by python (pid 4711)" in told[0]


def test_what_a_display_takes_by_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([GIB, GIB + (32 << 20)])
    monkeypatch.setattr(launching, "used_bytes", lambda _: next(used))
    assert MemoryMeter("cuda", _silence).settled().after_bytes == GIB + (32 << 20)


def test_of_a_log_of_any_size_the_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.touch()
    os.truncate(log, 1 << 40)
    with log.open("ab") as file:
        file.write(b"\nit failed \xff here\n")
    assert "it failed" in log_tail(log)
    log.unlink()
    os.mkfifo(log)
    assert "cannot be read" in log_tail(log)
