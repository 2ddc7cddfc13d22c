"""Writes the pictures of docs/watch.md: `python -m tools.make_page_pictures docs` serves a few runs, made up line by
line as trainings write them, with `finefit watch --web`, and photographs the pages in Chromium."""

import io
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
from playwright.sync_api import Page, sync_playwright

from finefit.artifacts.processes import run_lock
from finefit.artifacts.records import Run, read_record, write_record
from finefit.artifacts.rundir import RunDir
from tests.watched import Watched, make_watched, make_watched_pipeline

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LIVE = ("orders-3", "preferences-1", "medical-1")


def make_runs(folder: Path) -> None:
    hits = {"base": [0] * 40, "checkpoint-60": [1, 0] * 20, "checkpoint-120": [1, 1, 1, 0] * 10}
    for name, rate in (("orders-1", 1.0), ("orders-2", 2.0)):
        ended = make_watched(folder / name, rate=rate, results=hits)
        ended.steps(120)
        ended.end()
    killed = make_watched(folder / "summaries-1", rate=1.3)
    killed.steps(66)
    failed = make_watched(folder / "summaries-2", rate=1.3)
    failed.steps(31)
    write_record(failed.run.run, replace(read_record(failed.run.run, Run), status="stopped"))
    live = make_watched(folder / "orders-3", rate=0.7)
    live.steps(30)
    live.event("spike", step=30, found=4.0, usual=1.5)
    live.steps(52)
    live.event("oom_recovered", step=53, before={"micro_batch": 4}, after={"micro_batch": 2})
    live.steps(73)
    _preferences(make_watched(folder / "preferences-1"))
    make_watched_pipeline(folder / "medical-1")


def _preferences(watched: Watched) -> None:
    watched.save_every = 10**9
    for step in range(1, 96):
        noise, margin = random.Random(step).gauss(0, 0.1), 3 * (1 - math.exp(-step / 40))
        rewards = {"rewards_chosen": 0.8 * margin + noise, "rewards_rejected": noise - 0.5 * margin}
        accuracy = min(1.0, 0.5 + 0.5 * (1 - math.exp(-step / 30)) + noise / 4)
        more = {"accuracy": accuracy, "margin": 1.3 * margin + noise, **rewards}
        watched.steps(step, loss=0.69 * math.exp(-step / 50) + abs(noise) / 4, **more)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "finefit", "watch", str(folder), "--web", "--json"]
    with ExitStack() as stack:
        for name in LIVE:
            stack.enter_context(run_lock(RunDir(folder / name).lock))
        child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        assert child.stdout is not None
        yield json.loads(child.stdout.readline())["url"]
        child.send_signal(signal.SIGINT)


def write_pictures(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        make_runs(folder)
        with served(folder) as url, sync_playwright() as playwright:
            path = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)

            def opened(address: str, **more: Any) -> Page:
                page = browser.new_page(**{"viewport": {"width": 1200, "height": 860}, **more})
                page.goto(url + address)
                page.wait_for_timeout(2000)
                return page

            _save(opened("run/orders-3"), target / "watch.png", height=1130)
            _save(opened("run/medical-1", color_scheme="dark"), target / "watch-stages.png", height=700)
            runs = opened("", viewport={"width": 1200, "height": 420})
            for chosen in ("orders-1", "orders-2"):
                runs.get_by_role("checkbox", name=f"choose {chosen}").check()
            _save(runs, target / "watch-runs.png", height=420)
            browser.close()


def _save(page: Page, file: Path, *, height: int) -> None:
    # the folder of this picture's runs differs each time, and is nobody's concern
    page.evaluate("document.querySelectorAll('#place, #commands code').forEach((one) => one.remove())")
    shot = page.screenshot(clip={"x": 0, "y": 0, "width": 1200, "height": height}, full_page=True)
    picture = (
        PIL.Image.open(io.BytesIO(shot)).convert("RGB").resize((960, round(height * 0.8)), PIL.Image.Resampling.LANCZOS)
    )
    picture.quantize(256, method=PIL.Image.Quantize.FASTOCTREE).save(file, optimize=True)


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]))
