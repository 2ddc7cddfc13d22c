"""The page of runs under load: `python -m bench.page` writes bench/results/page.json, in some minutes.

    python -m bench.page                                   all parts
    python -m bench.page --parts long,list                 some of them; the others stay as they were
    python -m bench.page --small --out /tmp/page.json      a few thousand lines, to try it

A run directory of a million steps is written here (a line of metrics and one of memory for each), then `finefit watch
--web` serves it to Chromium and to plain readers. `long`: first paint, curves, zoom, what a refresh reads, and the
server's memory. `list`: a folder of 50 runs. `viewers`: twenty that follow a training on this machine; its steps are
timed in turns with and without them, and the server's processor time is measured beside, since other work disturbs step
times more than the server does.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

from finefit.artifacts.processes import run_lock
from finefit.facts.machine import read_cpu_model
from tests.watched import STEP_SECONDS, Watched, make_watched

OUT = Path(__file__).parent / "results" / "page.json"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
GOALS = {
    "first_paint_ms": 300.0,
    "list_ms": 500.0,
    "server_mib": 150.0,
    "viewers_share_of_processors": 0.01,
}
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Size:
    steps: int
    visits: int
    windows: int
    runs: int
    steps_of_each: int
    viewers: int
    turns: int
    turn_seconds: float


FULL = Size(
    steps=1_000_000, visits=15, windows=100, runs=50, steps_of_each=2000, viewers=20, turns=5, turn_seconds=20.0
)
SMALL = Size(steps=3000, visits=2, windows=5, runs=3, steps_of_each=50, viewers=2, turns=1, turn_seconds=2.0)


def write_long(folder: Path, steps: int) -> Watched:
    """As a training of so many steps leaves it: a line of metrics and one of memory for each step."""
    watched = make_watched(folder, total_steps=steps + 1000)
    where, chance = watched.run.stages()[0], random.Random(0)
    with where.metrics.open("a", encoding="utf-8") as metrics, where.memory.open("a", encoding="utf-8") as memory:
        for step in range(1, steps + 1):
            moment = round(watched.began + STEP_SECONDS * step, 3)
            metrics.write(_step_line(step, steps, moment, chance.gauss(0, 0.08)))
            memory.write(
                f'{{"instant": "step", "step": {step}, "time": {moment}, "peak_bytes": 21667971072, '
                f'"resident_bytes": 3328599654, "allocated_bytes": {21474836480 + step}, '
                f'"reserved_bytes": {21474836480 + step}}}\n'
            )
            if step % (steps // 20) == 0:
                found = {"event": "validated", "step": step, "validation_loss": 1.1 + 2.2 * math.exp(-5 * step / steps)}
                metrics.write(json.dumps(found) + "\n")
    watched.step = steps
    watched.save()
    return watched


def _step_line(step: int, steps: int, moment: float, noise: float) -> str:
    line = {
        "step": step,
        "epoch": round(step / 5000, 4),
        "loss": 1.1 + 2.2 * math.exp(-5 * step / steps) + noise,
        "learning_rate": 2e-4 * (1 - step / (2 * steps)),
        "grad_norm": 0.4 + abs(noise),
        "tokens": 4096,
        "supervised_tokens": 1300,
        "rows": 16,
        "seconds": STEP_SECONDS,
        "wait_seconds": 0.04,
        "tokens_per_second": round(2048 + 800 * noise, 1),
        "card_utilisation": 0.93,
        "card_watts": round(310 + 80 * noise, 1),
        "time": moment,
        "batch": f"{step:016x}",
    }
    return json.dumps(line) + "\n"


@dataclass
class Server:
    url: str
    process: psutil.Process

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def read_bytes(self) -> int:
        """What it has read from files so far, from the page cache or from disk; not what came by the network."""
        text = Path(f"/proc/{self.process.pid}/io").read_text(encoding="utf-8")
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("rchar"))

    def seconds(self) -> float:
        spent = self.process.cpu_times()
        return float(spent.user + spent.system)


@contextmanager
def serving(target: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "finefit", "watch", str(target), "--web", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        yield Server(json.loads(child.stdout.readline())["url"], psutil.Process(child.pid))
        child.send_signal(signal.SIGINT)
        child.wait(timeout=30)


@contextmanager
def browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def summed_up(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    return {
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)], 1),
    }


_PAINT = """async () => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  while (!document.querySelector(".u-legend")) await new Promise((done) => setTimeout(done, 5));
  return [paint?.startTime ?? performance.getEntriesByName("first-contentful-paint")[0].startTime, performance.now()];
}"""
_KEYS = ("+", "ArrowRight", "+", "ArrowLeft", "+", "-", "+", "ArrowRight", "0", "+")
_ZOOM = """async (key) => {
  const isSeries = (one) => one.name.includes("/series") && one.responseEnd;
  const frames = [];
  let last = performance.now();
  let isOver = false;
  const tick = (now) => { frames.push(now - last); last = now; if (!isOver) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  const before = performance.getEntriesByType("resource").length;
  const began = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const drawn = performance.now() - began;
  const fetched = () => performance.getEntriesByType("resource").slice(before).find(isSeries);
  while (!fetched()) await new Promise((done) => setTimeout(done, 2));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  isOver = true;
  return [drawn, performance.now() - began, Math.max(...frames)];
}"""


def long(size: Size, folder: Path) -> dict[str, Any]:
    watched = write_long(folder / "long-1", size.steps)
    where = watched.run.stages()[0]
    found: dict[str, Any] = {
        "metric_lines": size.steps,
        "memory_lines": size.steps,
        "journal_mib": round((where.metrics.stat().st_size + where.memory.stat().st_size) / _MIB, 1),
    }
    with (
        serving(watched.run.path) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        run_lock(watched.run.lock),
    ):
        api, began = "api/run/long-1", time.monotonic()
        client.get(f"{api}/state").raise_for_status()
        found["first_answer_seconds"] = round(time.monotonic() - began, 2)
        while client.get(f"{api}/state").json()["is_behind"]:
            pass
        found["whole_run_read_seconds"] = round(time.monotonic() - began, 2)
        found["whole_run_read_processor_seconds"] = round(server.seconds(), 2)
        found |= _looked_at(size, server)
        chance = random.Random(1)
        answers = []
        for _ in range(size.windows):
            first, last = sorted(chance.sample(range(size.steps), 2))
            asked = time.perf_counter()
            client.get(f"{api}/series", params={"first": first, "last": last, "points": 2000}).raise_for_status()
            answers.append(time.perf_counter() - asked)
        found["zoom_answer"] = summed_up(answers)
        found["refresh"] = _refreshed(client, server, watched)
        found["server_peak_mib"] = round(server.peak_mib(), 1)
    return found


def _looked_at(size: Size, server: Server) -> dict[str, Any]:
    """In a browser, once the server has read the run."""
    paints, curves, drawn, finer, frames = [], [], [], [], []
    with browsing() as browser:
        for _ in range(size.visits):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.goto(f"{server.url}run/long-1")
            paint, curve = page.evaluate(_PAINT)
            paints.append(paint / 1000)
            curves.append(curve / 1000)
            context.close()
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{server.url}run/long-1")
        page.evaluate(_PAINT)
        page.wait_for_timeout(500)
        for key in ["+", "ArrowRight", "+", "ArrowLeft", "+", "-", "+", "ArrowRight", "0", "+"] * (
            size.visits // 5 + 1
        ):
            page.wait_for_timeout(1600)  # the refresh of a live run is over
            first, whole, longest = page.evaluate(_ZOOM, key)
            drawn.append(first / 1000)
            finer.append(whole / 1000)
            frames.append(longest / 1000)
    return {
        "first_paint": summed_up(paints),
        "curves_drawn": summed_up(curves),
        "zoom_drawn_from_what_is_there": summed_up(drawn),
        "zoom_finer_curve_drawn": summed_up(finer),
        "zoom_longest_frame": summed_up(frames),
    }


def _refreshed(client: httpx.Client, server: Server, watched: Watched) -> dict[str, Any]:
    """Ten steps more: what is read for them, beside what they are."""
    where = watched.run.stages()[0]

    def size_of() -> int:
        return where.metrics.stat().st_size + where.memory.stat().st_size

    time.sleep(1.2)
    client.get("api/run/long-1/state")
    before, read = size_of(), server.read_bytes()
    watched.save_every = 10**9
    watched.steps(watched.step + 10)
    time.sleep(1.2)
    asked = time.perf_counter()
    document = client.get("api/run/long-1/state").json()
    seconds = time.perf_counter() - asked
    assert document["training"]["step"] == watched.step
    return {
        "appended_bytes": size_of() - before,
        "read_bytes": server.read_bytes() - read,
        "ms": round(1000 * seconds, 1),
    }


def listing(size: Size, folder: Path) -> dict[str, Any]:
    for number in range(1, size.runs + 1):
        write_long(folder / f"orders-{number}", size.steps_of_each)
    seconds, spent = [], []
    with serving(folder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(1 + size.visits):
            began, before = time.perf_counter(), server.seconds()
            found = client.get("api/runs").json()["runs"]
            seconds.append(time.perf_counter() - began)
            spent.append(server.seconds() - before)
            assert len(found) == size.runs
        paints = []
        with browsing() as browser:
            for _ in range(size.visits):
                page = browser.new_page()
                page.goto(server.url)
                page.wait_for_selector("table tr:nth-child(2)")
                paints.append(page.evaluate("performance.now()") / 1000)
                page.close()
        return {
            "runs": size.runs,
            "first_ms": round(1000 * seconds[0], 1),
            "first_processor_ms": round(1000 * spent[0], 1),
            "later": summed_up(seconds[1:]),
            "later_processor": summed_up(spent[1:]),
            "list_drawn": summed_up(paints),
            "server_peak_mib": round(server.peak_mib(), 1),
        }


def viewers(size: Size, folder: Path) -> dict[str, Any]:
    """Turns without and with viewers, of one training that goes on."""
    with training(folder) as run, serving(run) as server:
        journal = next(run.glob("stages/*")) / "metrics.jsonl"
        turns: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(size.turns):
            for is_watched in (False, True):
                began, spent, steps = time.monotonic(), server.seconds(), len(_step_seconds(journal))
                if is_watched:
                    asyncio.run(_follow(server.url, run.name, size.viewers, size.turn_seconds))
                else:
                    time.sleep(size.turn_seconds)
                taken = _step_seconds(journal)[steps:]
                share = (server.seconds() - spent) / (time.monotonic() - began)
                turns[is_watched].append({"step": statistics.median(taken), "share": share})
        peak = server.peak_mib()
    without, with_viewers = ([one["step"] for one in turns[is_watched]] for is_watched in (False, True))
    share = statistics.median(one["share"] for one in turns[True])
    cores = len(os.sched_getaffinity(0))
    return {
        "viewers": size.viewers,
        "turns": size.turns,
        "step_ms_without": [round(1000 * one, 2) for one in without],
        "step_ms_with": [round(1000 * one, 2) for one in with_viewers],
        "step_time_change": round(statistics.median(with_viewers) / statistics.median(without) - 1, 4),
        "step_time_spread_without": round((max(without) - min(without)) / statistics.median(without), 4),
        "server_share_of_one_core": round(share, 4),
        "server_share_of_processors": round(share / cores, 4),
        "server_share_of_one_core_without": round(statistics.median(one["share"] for one in turns[False]), 4),
        "server_peak_mib": round(peak, 1),
    }


@contextmanager
def training(folder: Path) -> Iterator[Path]:
    """A small training on the CPU without an end of its own."""
    from bench.cpu_memory import CASES, make_spec

    spec = make_spec(folder, CASES["bytes-20m-full-2x128"])
    changes = ["schedule.epochs=null", "schedule.steps=100000", "evaluate=[]", "save.every=100000 steps"]
    asked = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "finefit", "run", str(spec), "--runs", str(folder / "runs"), *asked]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield _begun(folder / "runs", child)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(timeout=120)


def _begun(runs: Path, child: "subprocess.Popen[str]") -> Path:
    while True:
        for journal in runs.glob("*/stages/*/metrics.jsonl"):
            if len(_step_seconds(journal)) >= 5:
                return journal.parents[2]
        if child.poll() is not None:
            assert child.stderr is not None
            raise RuntimeError(child.stderr.read())
        time.sleep(0.5)


def _step_seconds(journal: Path) -> list[float]:
    lines = (json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if "loss" in line]


async def _follow(url: str, name: str, num_viewers: int, seconds: float) -> None:
    """As the page does: the stream of changes, and the curves anew 1.5 s after the last time. Answers are read and
    thrown away, since real viewers' browsers run on machines of their own."""

    async def stream(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", f"api/run/{name}/live") as response:
            async for _ in response.aiter_raw():
                pass

    async def curves(client: httpx.AsyncClient) -> None:
        while True:
            async with client.stream("GET", f"api/run/{name}/series?points=2000") as response:
                async for _ in response.aiter_raw():
                    pass
            await asyncio.sleep(1.5)

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(part(client)) for _ in range(num_viewers) for part in (stream, curves)]
        await asyncio.sleep(seconds)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


PARTS: dict[str, Callable[[Size, Path], dict[str, Any]]] = {"long": long, "list": listing, "viewers": viewers}


def goals_met(found: dict[str, Any]) -> dict[str, bool]:
    """By the medians, of the parts that were measured."""
    figures: dict[str, list[float]] = {name: [] for name in GOALS}
    for name in found.keys() & PARTS.keys():
        figures["server_mib"].append(found[name]["server_peak_mib"])
    if "long" in found:
        figures["first_paint_ms"].append(found["long"]["first_paint"]["median_ms"])
    if "list" in found:
        figures["list_ms"].append(max(found["list"]["first_ms"], found["list"]["later"]["median_ms"]))
    if "viewers" in found:
        figures["viewers_share_of_processors"].append(found["viewers"]["server_share_of_processors"])
    return {name: max(values) < GOALS[name] for name, values in figures.items() if values}


def table(found: dict[str, Any]) -> str:
    """Of docs/watch.md, in Markdown."""
    long_run, runs, watched = found["long"], found["list"], found["viewers"]

    def times(name: str) -> str:
        return f"{long_run[name]['median_ms']:.0f} ms (95 % within {long_run[name]['p95_ms']:.0f})"

    share, of_one = watched["server_share_of_processors"], watched["server_share_of_one_core"]
    peak = max(part["server_peak_mib"] for part in (long_run, runs, watched))
    refresh = long_run["refresh"]
    rows = {
        f"first paint of a run of {long_run['metric_lines']:,} steps": (
            f"{GOALS['first_paint_ms']:.0f} ms",
            times("first_paint"),
        ),
        "all its curves drawn": ("", times("curves_drawn")),
        "zoom, drawn at once from what is there": ("", times("zoom_drawn_from_what_is_there")),
        "zoom, the finer curve drawn": ("", times("zoom_finer_curve_drawn")),
        "zoom, answer of the server": ("", times("zoom_answer")),
        "read for ten steps more": ("", f"{refresh['read_bytes']:,} bytes, {refresh['appended_bytes']:,} of them new"),
        "the whole run read, once": ("", f"{long_run['whole_run_read_processor_seconds']:.0f} s of processor time"),
        f"{runs['runs']} runs listed, first": (
            f"{GOALS['list_ms']:.0f} ms",
            f"{runs['first_ms']:.0f} ms, {runs['first_processor_ms']:.0f} ms of processor time",
        ),
        f"{runs['runs']} runs listed, later": (f"{GOALS['list_ms']:.0f} ms", f"{runs['later']['median_ms']:.0f} ms"),
        "memory of the server, at most": (f"{GOALS['server_mib']:.0f} MiB", f"{peak:.0f} MiB"),
        f"processor time of the server with {watched['viewers']} viewers": (
            f"{GOALS['viewers_share_of_processors']:.0%}",
            f"{share:.2%} of the machine's, {of_one:.1%} of one core",
        ),
    }
    lines = (f"| {what} | {goal} | {measured} |" for what, (goal, measured) in rows.items())
    return "\n".join(["| | goal | measured |", "|---|---|---|", *lines])


def measure(out: Path, size: Size, parts: list[str]) -> dict[str, Any]:
    """The parts that are asked for; the others stay as they were."""
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    found = {name: before[name] for name in PARTS if name in before and name not in parts}
    for name in parts:
        with tempfile.TemporaryDirectory() as folder:
            about_part = {"date": datetime.now(UTC).date().isoformat(), "load_before": round(os.getloadavg()[0], 1)}
            found[name] = about_part | PARTS[name](size, Path(folder))
        print(name, json.dumps(found[name], indent=1), flush=True)
        cores = len(os.sched_getaffinity(0))
        about = {
            "machine": f"{platform.machine()}, {read_cpu_model(Path('/proc/cpuinfo'))}, {cores} cores",
            "versions": {name: version(name) for name in ("starlette", "uvicorn", "numpy", "torch", "playwright")},
            "goals": GOALS,
        }
        ordered = {name: found[name] for name in PARTS if name in found}
        out.write_text(json.dumps({**about, "goals_met": goals_met(ordered), **ordered}, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, by commas")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    if unknown := set(asked.parts.split(",")) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    found = measure(asked.out, SMALL if asked.small else FULL, asked.parts.split(","))
    if found.keys() == PARTS.keys():
        print(table(found))


if __name__ == "__main__":
    main()
