"""Workers of a few lines instead of the real ones: what is tested is how they are started, told and mourned."""

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from finefit.artifacts.processes import STOP_SIGNALS
from finefit.errors import Interrupted, WorkerDied
from finefit.facts.machine import Power
from finefit.run import launch as batch_limit
from finefit.run.launch import inhibit_sleep, launch


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


def test_a_setting_under_torchs_new_name_is_not_overruled_under_the_old_one(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "mine")
    worker.write_text("import os; print(os.environ['PYTORCH_ALLOC_CONF'], os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))")
    _launch(worker)
    assert worker.with_name("run.log").read_text() == "mine None\n"


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


def test_a_killed_worker_is_mourned_with_its_last_words_and_the_usual_reason(worker: Path) -> None:
    worker.write_text("import os, signal; print('my last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerDied) as caught:
        _launch(worker)
    assert "ended by SIGKILL; out of host memory is the usual reason" in caught.value.problem
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
    monkeypatch.setattr(batch_limit, "read_power", lambda: power)
    monkeypatch.setattr(batch_limit, "_command", lambda: command)
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
    assert "no way to inhibit sleep" in sleep


@pytest.mark.parametrize("command", [None, ["false"], ["cat"]])
def test_a_machine_without_a_battery_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch, command: list[str] | None
) -> None:
    assert _warnings(monkeypatch, DESKTOP, command) == []


def test_an_inhibitor_holds_while_the_run_lasts_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    inhibit = batch_limit._inhibit

    def remembered() -> "subprocess.Popen[bytes] | None":
        inhibitor = inhibit()
        started.extend([inhibitor] if inhibitor else [])
        return inhibitor

    monkeypatch.setattr(batch_limit, "read_power", lambda: MAINS)
    monkeypatch.setattr(batch_limit, "_command", lambda: ["cat"])
    monkeypatch.setattr(batch_limit, "_inhibit", remembered)
    with inhibit_sleep(lambda _: None):
        assert started[0].poll() is None
    assert started[0].poll() is not None
