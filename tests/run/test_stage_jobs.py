"""What a stage holds is seen from outside, and given back before the next one begins."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from finefit.facts.nvml import CardProcess
from finefit.run import stage_jobs
from finefit.run.stage_jobs import MemoryMeter

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
    meter = MemoryMeter.begin("cpu", _silence)
    meter.tick()
    assert (meter.before, meter.peak) == (0, 0)


def test_a_process_of_the_stage_is_waited_for_until_it_has_given_its_memory_back() -> None:
    meter = MemoryMeter.begin("cpu", _silence)
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
    monkeypatch.setattr(stage_jobs, "used_bytes", lambda _: next(used))
    monkeypatch.setattr(
        stage_jobs, "read_card_processes", lambda: (CardProcess(pid=4711, name="python", memory_bytes=GIB),)
    )
    monkeypatch.setattr(stage_jobs, "_PATIENCE_SECONDS", 0.3)
    began = time.monotonic()
    meter = MemoryMeter.begin("cuda", told.append)
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
    monkeypatch.setattr(stage_jobs, "used_bytes", lambda _: next(used))
    assert MemoryMeter.begin("cuda", _silence).settled().after_bytes == GIB + (32 << 20)
