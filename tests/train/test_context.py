"""A run that stands still is told once, with the stacks of its threads; one that goes on is never disturbed."""

import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finefit.train.context import SpikeDetector, Watchdog

TIMEOUT = 0.2


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
        Watchdog(lambda **event: told.append(event), timeout=TIMEOUT, log=log) as dog,
    ):
        thread = threading.Thread(target=stands_still_here)
        thread.start()
        dog.beat("step 7")
        wait_until(lambda: told)
        time.sleep(3 * TIMEOUT)
        release.set()
        thread.join()
    (event,) = told
    assert event["event"] == "stalled"
    assert event["since"] == "step 7"
    assert event["seconds"] >= TIMEOUT
    text = (tmp_path / "log").read_text()
    assert "since step 7; the stacks of all threads:" in text
    assert "stands_still_here" in text
    assert text.count("stacks of all threads") == 1


def test_a_second_stall_is_told_again() -> None:
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event["since"]), timeout=TIMEOUT) as dog:
        for number in (1, 2):
            dog.beat(f"step {number}")
            wait_until(lambda n=number: len(told) == n)
    assert told == ["step 1", "step 2"]


def test_beats_keep_it_quiet() -> None:
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event), timeout=1.0) as dog:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            dog.beat()
            time.sleep(0.02)
    assert told == []


def test_long_steps_are_no_stall() -> None:
    """Twenty times the usual step is allowed, however impatient it is."""
    told: list[Any] = []
    with Watchdog(lambda **event: told.append(event), timeout=TIMEOUT) as dog:
        for _ in range(3):
            dog.beat("step", step_seconds=1.0)
        time.sleep(5 * TIMEOUT)
    assert told == []


def test_its_thread_ends_with_the_training() -> None:
    with Watchdog(lambda **_: None, timeout=TIMEOUT):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


# A loss that leaps is told; curves that fall, wander or scatter are left alone.

STEPS = 2000


def told(losses: list[float]) -> list[int]:
    spikes = SpikeDetector()
    return [at for at, loss in enumerate(losses) if spikes.see(loss) is not None]


def smooth(_: random.Random, at: int) -> float:
    return 0.5 + 2.5 * math.exp(-at / 300)


def noisy(chance: random.Random, at: int) -> float:
    return smooth(chance, at) * (1 + 0.15 * chance.gauss(0, 1))


def skewed(chance: random.Random, at: int) -> float:
    """As small batches of rows of very unequal difficulty are."""
    return smooth(chance, at) * chance.lognormvariate(0, 0.25)


def constant(_: random.Random, __: int) -> float:
    return 2.0


def rounded(chance: random.Random, _: int) -> float:
    """Nearly all equal, so that their scatter is zero."""
    return 1.0 if chance.random() < 0.9 else 1.01


def stepped(_: random.Random, at: int) -> float:
    """Falls at the turn of an epoch, as small data does."""
    return 2.0 / (1 + at // 200)


def rising(_: random.Random, at: int) -> float:
    return 1.0 + at / 500


CURVES = (smooth, noisy, constant, rounded, stepped, rising)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm(curve: Callable[[random.Random, int], float], seed: int) -> None:
    chance = random.Random(seed)
    assert told([curve(chance, at) for at in range(STEPS)]) == []


def test_a_skewed_curve_raises_less_than_one_false_alarm_in_twenty_thousand_steps() -> None:
    """Of which a draw of more than four deviations is one."""
    alarms = 0
    for seed in range(20):
        chance = random.Random(seed)
        alarms += len(told([skewed(chance, at) for at in range(STEPS)]))
    assert alarms <= 2


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("at", [25, 400, 1999])
def test_a_leap_to_five_times_the_loss_is_told_at_its_step(
    curve: Callable[[random.Random, int], float], at: int
) -> None:
    chance = random.Random(3)
    losses = [curve(chance, step) for step in range(STEPS)]
    losses[at] = 5 * curve(random.Random(0), at)
    assert told(losses) == [at]


def test_a_lasting_leap_is_told_once() -> None:
    assert told([1.0] * 60 + [4.0] * 60) == [60]


def test_twice_the_usual_loss_of_a_quiet_curve_is_a_spike() -> None:
    chance = random.Random(5)
    assert told([1 + 0.02 * chance.gauss(0, 1) for _ in range(100)] + [2.0]) == [100]


def test_the_first_steps_are_never_spikes() -> None:
    assert told([0.1] * 10 + [9.0] + [0.1] * 5) == []


def test_a_run_that_goes_on_knows_its_past() -> None:
    assert SpikeDetector([1.0] * 40).see(3.0) == 1.0
