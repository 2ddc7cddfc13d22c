"""A run that stands still is told once, with the stacks of its threads; one that goes on is never disturbed."""

import threading
import time
from pathlib import Path
from typing import Any

from finefit.train.watchdog import Watchdog

PATIENCE = 0.2


def wait_until(true: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stall_is_told_once_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    release = threading.Event()

    def stands_still_here() -> None:
        release.wait(30)

    with (
        (tmp_path / "log").open("w") as log,
        Watchdog(lambda **event: told.append(event), patience=PATIENCE, log=log) as dog,
    ):
        thread = threading.Thread(target=stands_still_here)
        thread.start()
        dog.beat("step 7")
        wait_until(lambda: told)
        time.sleep(3 * PATIENCE)
        release.set()
        thread.join()
    (event,) = told
    assert event["event"] == "stalled"
    assert event["since"] == "step 7"
    assert event["seconds"] >= PATIENCE
    text = (tmp_path / "log").read_text()
    assert "since step 7; the stacks of all threads:" in text
    assert "stands_still_here" in text
    assert text.count("stacks of all threads") == 1


def test_a_second_stall_is_told_again() -> None:
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event["since"]), patience=PATIENCE) as dog:
        for number in (1, 2):
            dog.beat(f"step {number}")
            wait_until(lambda n=number: len(told) == n)
    assert told == ["step 1", "step 2"]


def test_beats_keep_it_quiet() -> None:
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event), patience=1.0) as dog:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            dog.beat()
            time.sleep(0.02)
    assert told == []


def test_long_steps_are_no_stall() -> None:
    """Twenty times the usual step is allowed, however impatient it is."""
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event), patience=PATIENCE) as dog:
        for _ in range(3):
            dog.beat("step", step_seconds=1.0)
        time.sleep(5 * PATIENCE)
    assert told == []


def test_its_thread_ends_with_the_training() -> None:
    with Watchdog(lambda **_: None, patience=PATIENCE):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())
