"""Preparation of rows: its speed beside a bare loop of `tokenizers`, its memory on a million rows, and how full packs
are.

`python bench/data.py bench/results/data.json FILE...` takes some ten minutes on two cores. The files are any that
finefit reads without `fields:` (the committed result: the Alpaca and C4 demos of LLaMA-Factory, PubMedQA); without
files, rows made here are taken. The tokenizer is SmolLM2's.
"""

import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process is one core

import numpy as np

from finefit.data import tokenizer_pool
from finefit.data.examples import Examples
from finefit.data.order import best_fit, rows_of_step
from finefit.data.prepare import prepare
from finefit.data.render import open_renderer
from finefit.model.resolve_model import embedded_model
from finefit.spec.data import Data, Source

REPEATS = 3
ROWS = 20_000
MILLION = 1_000_000
SCALED = 200_000
MAX_TOKENS = 2048
GLOBAL_BATCH = 64


def data_of(path: Path) -> Data:
    return Data.model_validate(
        {"train": [{"path": str(path)}], "max_tokens": MAX_TOKENS, "too_long": "drop"}, strict=False
    )


class Seconds(NamedTuple):
    wall: float
    processor: float


def prepared(path: Path, tokenizer: Path, folder: Path) -> tuple[Seconds, Examples]:
    began, used = time.perf_counter(), time.process_time()
    prepare(data_of(path), base=Path(), tokenizer=tokenizer, seed=0, folder=folder)
    return Seconds(time.perf_counter() - began, time.process_time() - used), Examples(folder / "train.safetensors")


def in_processes(count: int) -> None:
    """So many, however little there is to do."""
    tokenizer_pool._BYTES_PER_PROCESS = 1
    tokenizer_pool.count_cores = lambda: count  # type: ignore[attr-defined]


def speed(path: Path, tokenizer: Path) -> dict[str, Any]:
    """The bare loop gets the finished texts in a list and throws the tokens away; preparation reads, detects, renders,
    masks, compares, writes. Both in one process, in seconds of its own processor time, by turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = enlarged(path, folder / "rows.jsonl")
        in_processes(1)
        _, examples = prepared(rows, tokenizer, fresh(folder, "warm"))
        renderer = open_renderer(tokenizer, "chat")
        texts = renderer.tokenizer.batch_decode([list(e.tokens) for e in examples], clean_up_tokenization_spaces=False)
        bare = renderer.tokenizer.backend_tokenizer
        loops, ours = [], []
        for at in range(REPEATS):
            began = time.process_time()
            num_tokens = sum(len(bare.encode(text, add_special_tokens=False).ids) for text in texts)
            loops.append(time.process_time() - began)
            ours.append(prepared(rows, tokenizer, fresh(folder, f"one-{at}"))[0].processor)
        return {
            "file": path.name,
            "rows": len(examples),
            "tokens": int(examples.lengths.sum()),
            "bare_tokens": num_tokens,
            "bare_seconds": round(statistics.median(loops), 3),
            "prepare_seconds": round(statistics.median(ours), 3),
            "of_bare": round(statistics.median(loops) / statistics.median(ours), 3),
        }


def scaling(tokenizer: Path) -> dict[str, Any]:
    """Wall seconds with one process and with two, the start of the second included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(islice(million_rows(), SCALED))
        found: dict[str, Any] = {"rows": SCALED}
        for count in (1, 2):
            in_processes(count)
            found[f"seconds_of_{count}"] = round(
                prepared(folder / "rows.jsonl", tokenizer, fresh(folder, str(count)))[0].wall, 1
            )
    return found


def fresh(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


def enlarged(path: Path, place: Path) -> Path:
    """The rows of a file in its own shape, as often as it takes to have enough; a number makes them different."""
    from finefit.data.rows import Row
    from finefit.data.sources import open_source

    rows = [row for row in open_source(Source(path=str(path)), Path(), split="train").rows() if isinstance(row, Row)]
    with place.open("w", encoding="utf-8") as file:
        for at in range(max(ROWS, len(rows))):
            row = rows[at % len(rows)]
            value = (
                {"text": f"{at} {row.text}"}
                if row.text
                else {"prompt": f"{at} {row.prompt[-1].content}", "completion": row.answer}
            )
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
    return place


def packing(path: Path, tokenizer: Path) -> dict[str, Any]:
    """Of the tokens that are computed, how many are rows' own: as they come, grouped by length, and packed."""
    with tempfile.TemporaryDirectory() as folder:
        in_processes(1)
        _, examples = prepared(path, tokenizer, Path(folder))
        lengths, supervised = examples.lengths.astype(np.int64), examples.supervised_counts.astype(np.int64)
    longest = int(lengths.max())
    whole = best_fit(lengths, supervised, max_tokens=MAX_TOKENS, max_supervised=MAX_TOKENS)
    steps = -(-len(lengths) // GLOBAL_BATCH)
    in_steps = [
        lengths[rows_of_step(s, num_rows=len(lengths), global_batch=GLOBAL_BATCH, seed=0)] for s in range(steps)
    ]
    micro = 8
    return {
        "file": path.name,
        "rows": len(lengths),
        "longest": longest,
        "mean": round(float(lengths.mean()), 1),
        "fill_of_packs": round(float(np.sum(lengths)) / (len(whole) * MAX_TOKENS), 4),
        "padded_as_they_come": round(efficiency(in_steps, micro, is_sorted=False), 4),
        "padded_grouped": round(efficiency(in_steps, micro, is_sorted=True), 4),
    }


def efficiency(steps: list[Any], micro: int, *, is_sorted: bool) -> float:
    computed = 0
    for step in steps:
        rows = np.sort(step)[::-1] if is_sorted else step
        computed += sum(
            len(part) * int(part.max()) for part in (rows[at : at + micro] for at in range(0, len(rows), micro))
        )
    return sum(int(step.sum()) for step in steps) / computed


def million_rows() -> Iterator[str]:
    words = (
        "amber",
        "birch",
        "cedar",
        "dune",
        "ember",
        "fjord",
        "grove",
        "heath",
        "inlet",
        "jetty",
        "knoll",
        "ledge",
        "marsh",
        "nook",
        "pond",
    )
    chance = random.Random(0)
    for at in range(MILLION):
        question = " ".join(chance.choices(words, k=chance.randrange(5, 40)))
        yield (
            json.dumps(
                {"question": f"{at} {question}?", "answer": " ".join(chance.choices(words, k=chance.randrange(1, 20)))}
            )
            + "\n"
        )


def memory() -> dict[str, Any]:
    """In a process of its own, its children added."""
    command = [sys.executable, __file__, "--million"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def prepare_million() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(million_rows())
        seconds, examples = prepared(folder / "rows.jsonl", embedded_model("smollm2-135m").folder, fresh(folder, "out"))
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        here = int(status["VmHWM"].split()[0])
        return {
            "rows": len(examples),
            "tokens": int(examples.lengths.sum()),
            "seconds": round(seconds.wall, 1),
            "peak_bytes": here * 1024,
            "peak_bytes_of_each_of_two_children": child * 1024,
        }


def main() -> None:
    if sys.argv[1] == "--million":
        print(json.dumps(prepare_million()))
        return
    tokenizer = embedded_model("smollm2-135m").folder
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.jsonl"
        with own.open("w", encoding="utf-8") as file:
            file.writelines(islice(million_rows(), ROWS))
        files = [Path(path).resolve() for path in sys.argv[2:]] or [own]
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {name: version(name) for name in ("transformers", "tokenizers", "numpy")},
            "speed": [speed(path, tokenizer) for path in files],
            "scaling": scaling(tokenizer),
            "packing": [packing(path, tokenizer) for path in files],
            "million": memory(),
        }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
