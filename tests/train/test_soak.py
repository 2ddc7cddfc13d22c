"""A long run, and the same run killed again and again: the end is the same bit for bit, and memory does not grow.

`FINEFIT_SOAK_MINUTES` says how long: a fraction of a minute on every push, an hour in `make soak`.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from finefit.artifacts.journal import read_lines
from finefit.artifacts.journal import whole as whole_line
from finefit.artifacts.rundir import StageDir
from tests.faults import TRAINING, Reference, finish, make_job, outcome, start, words

MINUTES = float(os.environ.get("FINEFIT_SOAK_MINUTES", "0.3"))
_SETTLED = 0.3
"""Of the steps, after which allocators hold what they will hold."""
_NOISE_SHARE, _NOISE_BYTES = 0.005, 2 << 20


def growth(resident: Sequence[int]) -> float:
    """Bytes from the first to the last of the settled steps, by the straight line that fits them best."""
    settled = np.asarray(resident[int(len(resident) * _SETTLED) :], dtype=np.float64)
    slope = np.polynomial.polynomial.polyfit(np.arange(len(settled)), settled, 1)[1]
    return float(slope) * len(settled)


def noise(resident: Sequence[int]) -> float:
    return _NOISE_SHARE * float(np.mean(resident)) + _NOISE_BYTES


def seconds_per_step(where: StageDir) -> float:
    times = [line["time"] for line in read_lines(where.metrics) if "loss" in line]
    return float(times[-1] - times[0]) / (len(times) - 1)


def resident_bytes(where: StageDir) -> list[int]:
    return [line["resident_bytes"] for line in read_lines(where.memory) if line["instant"] == "step"]


@pytest.mark.timeout(MINUTES * 60 * 6 + 600)
def test_a_long_run_killed_at_random_times_ends_bit_identical_and_its_memory_does_not_grow(
    lora: Reference, tmp_path: Path, count: Callable[[str], None]
) -> None:
    probe = lora.job.fresh()
    assert finish(start(probe)) == 0, words(probe)
    seconds = MINUTES * 60 / 2
    steps = max(200, int(seconds / seconds_per_step(probe)))
    every = max(20, steps // 50)
    spec = re.sub(r"epochs: 3", f"steps: {steps}", TRAINING).replace("every: 3 steps", f"every: {every} steps")
    job = make_job(tmp_path / "soak", spec=spec)

    unkilled = job.fresh()
    assert finish(start(unkilled), kill_after=10 * seconds + 300) == 0, words(unkilled)
    resident = resident_bytes(unkilled)
    assert len(resident) == steps
    assert abs(growth(resident)) < noise(resident)

    killed = job.fresh()
    kills = kill_again_and_again(killed, random.Random(9), steps=steps, every=every)
    assert kills > 1
    assert outcome(killed) == outcome(unkilled)
    count(
        f"soak  {MINUTES:g} minutes: {steps:,} steps, {kills} kills at random times, bit-identical; "
        f"memory {growth(resident) / steps:+.1f} bytes a step of {np.mean(resident) / 2**20:.0f} MiB"
    )


def kill_again_and_again(where: StageDir, chance: random.Random, *, steps: int, every: int) -> int:
    """How often, until it came through: at any instant after it has gone on by more than one save."""
    kills = 0
    while True:
        worker, target = start(where), last_step(where) + int(every * chance.uniform(1.2, steps / every / 5))
        while worker.process.is_alive() and last_step(where) < target:
            time.sleep(0.05)
        code = finish(worker, kill_after=chance.uniform(0, 0.5) if worker.process.is_alive() else 1)
        if code != -signal.SIGKILL:
            break
        kills += 1
    assert code == 0, words(where)
    return kills


def last_step(where: StageDir) -> int:
    """As its metrics end."""
    if not where.metrics.exists():
        return 0
    with where.metrics.open("rb") as file:
        file.seek(max(0, where.metrics.stat().st_size - 4096))
        found = [line["step"] for part in file if (line := whole_line(part)) is not None and "loss" in line]
    return max(found, default=0)


def test_a_leak_of_a_few_hundred_bytes_a_step_is_seen_in_an_hour() -> None:
    chance = random.Random(1)
    flat = [600 * 2**20 + chance.randrange(-(2**20), 2**20) for _ in range(50_000)]
    assert abs(growth(flat)) < noise(flat)
    leaking = [held + 300 * step for step, held in enumerate(flat)]
    assert growth(leaking) > noise(leaking)


def test_what_is_taken_at_the_start_is_no_leak() -> None:
    rising = [500 * 2**20 + min(step, 200) * 2**19 for step in range(1000)]
    assert abs(growth(rising)) < noise(rising)
