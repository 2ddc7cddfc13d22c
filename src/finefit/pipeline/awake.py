"""Keeps a laptop from falling asleep under a run, where the system lets us ask; otherwise says so."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from finefit.facts.power import read_power


@contextmanager
def awake(warn: Callable[[str], None]) -> Iterator[None]:
    power = read_power()
    if power.on_battery:
        warn(f"running on battery ({power.percent:.0f} %): plug in, or the run ends with it (it can be resumed)")
    inhibitor = _inhibit()
    if inhibitor is None and power.has_battery:
        warn("this system offers no way to inhibit sleep: keep the lid open and the machine awake")
    try:
        yield
    finally:
        if inhibitor is not None:
            inhibitor.terminate()
            inhibitor.communicate()  # closes its pipe too


def _inhibit() -> "subprocess.Popen[bytes] | None":
    command = _command()
    if command is None:
        return None
    inhibitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        inhibitor.wait(timeout=0.3)  # it refuses at once, or holds until it is ended
    except subprocess.TimeoutExpired:
        return inhibitor
    inhibitor.communicate()
    return None


def _command() -> list[str] | None:
    """Both end with their standard input or with us, so that a killed launcher leaves nothing behind."""
    if sys.platform == "darwin" and (caffeinate := shutil.which("caffeinate")):
        return [caffeinate, "-i", "cat"]
    if inhibit := shutil.which("systemd-inhibit"):
        return [inhibit, "--what=sleep:idle", "--who=finefit", "--why=a training run", "--mode=block", "cat"]
    return None
