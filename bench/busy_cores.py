"""Training on a CPU that has other work to do: what a short spin of OpenMP's threads is worth.

Runs five steps of the demo with and without GOMP_SPINCOUNT=2000 (what finefit gives its workers), on idle cores and
beside one busy process per core. Losses must be equal. `python bench/busy_cores.py bench/results/busy_cores.json` takes
about four minutes on two cores.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

SETTINGS = (
    "--set",
    "schedule.epochs=null",
    "--set",
    "schedule.steps=5",
    "--set",
    "data.validation=null",
    "--set",
    "evaluate=[]",
)
GOMP_DEFAULT = "300000"


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(spin: str, num_busy: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, busy(num_busy):
        recipe = Path(folder) / "recipe"
        finefit = [sys.executable, "-m", "finefit"]
        subprocess.run([*finefit, "recipes", "demo", "--to", str(recipe)], check=True, stdout=subprocess.DEVNULL)
        command = [*finefit, "run", str(recipe / "spec.yaml"), "--runs", f"{folder}/runs", *SETTINGS]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"GOMP_SPINCOUNT": spin})
        lines = [
            json.loads(line)
            for line in (Path(folder) / "runs/demo-1/stages/1-sft/metrics.jsonl").read_text().splitlines()
        ]
    steps = [line for line in lines if "loss" in line]
    seconds = [step["seconds"] for step in steps[1:]]
    return {
        "spin": spin,
        "busy_processes": num_busy,
        "step_seconds": round(statistics.median(seconds), 2),
        "loss": steps[-1]["loss"],
    }


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    cases = [measure(spin, num_busy) for num_busy in (0, cores) for spin in (GOMP_DEFAULT, "2000")]
    assert len({case["loss"] for case in cases}) == 1, "a lever that changes the loss"
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {cores} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "cases": cases,
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
