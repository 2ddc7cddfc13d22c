"""A pipeline on one card, at the size of system C: what each stage holds, that the card is empty again after it, and
what was planned.

    python -m bench.stages bench/results/stages.json                    on the card
    python -m bench.stages bench/results/stages.json tuned scores       only these stages, and only these are replaced in the result
    python -m bench.stages out.json --small                             on a CPU: a tiny model, to see that it runs

A random model of Qwen2-0.5B's shape becomes two experts, their mixture, a mixture with a trained router, and one that
is trained whole, which is scored. `finefit run` plans all of it before anything is loaded, and carries it out. The
result is written after every stage: what was measured stays when the run is cut off. A stage that stands on one that is
not asked for gets random weights of the same shape in its place. Levers are what
`finefit plan` finds for an H200; they are given, and so is the batch that is scored, since searching for them takes most of the time.
"""  # noqa: E501

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import finefit
from bench.memory import SHAPES, versions
from finefit.artifacts.records import FinishedStage, read_record
from finefit.artifacts.rundir import RunDir
from finefit.artifacts.stage_records import StageResult
from finefit.moe.build import moe_config
from tests.conftest import SPECIAL, make_tokenizer, write_jsonl

ROWS = Path(finefit.__file__).parent / "recipes/rmoe-twin"
TOGETHER = 6
"""Orders, or dates, in a row: rows of some hundred tokens."""
ENDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
HEAD = """\
name: stages
seed: 42
device: DEVICE
defaults:
  data: {template: plain, max_tokens: 1024}
  optimizer: {lr: 1e-4}
  schedule: {epochs: 2}
  global_batch: 8
  save: {keep: 1}
  levers: {micro_batch: 8, recompute: none, keep_attention: false, loss_chunk: 1024, offload: none, mlp_tiles: 1}
stages:
"""
STAGES = {
    "orders": """
    kind: train
    model: {kind: folder, path: base}
    tuning: {kind: subset, trainable: [layers.*.mlp]}
    data: {train: [{path: orders-train.jsonl}]}""",
    "dates": """
    kind: train
    model: {kind: folder, path: base}
    tuning: {kind: subset, trainable: [layers.*.mlp]}
    data: {train: [{path: dates-train.jsonl}]}""",
    "mixture": """
    kind: build_moe
    base: {kind: folder, path: base}
    experts: {orders: {kind: stage, name: orders}, dates: {kind: stage, name: dates}}
    router: {kind: centroids, template: plain, max_tokens: 1024, data: {orders: {path: orders-train.jsonl}, dates: {path: dates-train.jsonl}}}""",  # noqa: E501
    "routed": """
    kind: train
    model: {kind: stage, name: mixture}
    tuning: {kind: subset, trainable: [layers.*.mlp.gate]}
    objective: {kind: router}
    data: {train: [{path: orders-train.jsonl}, {path: dates-train.jsonl}]}
    optimizer: {lr: 1e-3}""",
    "tuned": """
    kind: train
    model: {kind: stage, name: routed}
    tuning: {kind: full}
    data: {train: [{path: orders-train.jsonl}, {path: dates-train.jsonl}]}
    optimizer: {lr: 1e-5}
    levers: {loss_chunk: none}""",
    "scores": """
    kind: evaluate
    models: {tuned: {kind: stage, name: tuned}}
    data: {test: {path: orders-test.jsonl}, template: plain}
    evaluate: [{task: perplexity, batch: 8}]""",
}
EXPERTS = ("orders", "dates")
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Size:
    config: dict[str, Any]
    device: str


CARD = Size(config=SHAPES["qwen2.5-0.5b"] | ENDS, device="cuda")
TINY = {
    "vocab_size": len(SPECIAL) + 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = Size(config=CARD.config | TINY, device="cpu")


def make_project(folder: Path, size: Size, stages: Sequence[str]) -> None:
    spec = HEAD.replace("DEVICE", size.device) + "".join(f"  {name}: {STAGES[name]}\n" for name in stages)
    for name in set(STAGES) - set(stages):
        spec = spec.replace(f"{{kind: stage, name: {name}}}", f"{{kind: folder, path: {name}}}")
    for name in ("base", *STAGES):
        if f"{{kind: folder, path: {name}}}" in spec:
            make_model(folder / name, size, is_dense=name in ("base", *EXPERTS))
    for path in ROWS.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        write_jsonl(folder / path.name, [joined(rows[at : at + TOGETHER]) for at in range(0, len(rows), TOGETHER)])
    (folder / "spec.yaml").write_text(spec, encoding="utf-8")


def make_model(folder: Path, size: Size, *, is_dense: bool) -> None:
    torch.manual_seed(0)
    config = size.config if is_dense else moe_config(size.config, num_experts=2, top_k=2)
    with torch.device(size.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    if folder.name in EXPERTS:
        move_mlps(model, seed=EXPERTS.index(folder.name) + 1)
    model.cpu().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    torch.cuda.empty_cache()  # all that is on the card from here on belongs to the stages


def move_mlps(model: nn.Module, *, seed: int) -> None:
    """Experts share all else with their base, or no mixture is made of them."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            nn.init.normal_(parameter, std=0.02)


def joined(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Several questions at once, and their answers in the same order."""
    return {key: "\n".join(row[key].strip() for row in rows) for key in ("prompt", "completion")}


def measure(folder: Path, size: Size, stages: Sequence[str], tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Each stage is told when it is done. What finefit says to people is passed on."""
    make_project(folder, size, stages)
    told: set[str] = set()
    with (folder / "ran.json").open("w") as answer:
        running = subprocess.Popen(
            [sys.executable, "-m", "finefit", "run", "spec.yaml", "--json"], cwd=folder, stdout=answer
        )
        is_over = False
        while not is_over:
            time.sleep(_PAUSE_SECONDS)
            is_over = running.poll() is not None
            for place, done in done_in(folder):
                if done.name not in told:
                    told.add(done.name)
                    tell(done.name, stage_row(folder, place, done))
    assert running.returncode == 0, (folder / "ran.json").read_text()
    assert told == {*stages}


def done_in(folder: Path) -> Iterator[tuple[RunDir, FinishedStage]]:
    for path in sorted((folder / "runs/stages-1/stages").glob("[0-9]*-*/done.json")):
        yield RunDir(path.parent), read_record(path, FinishedStage)


def stage_row(folder: Path, place: RunDir, done: FinishedStage) -> dict[str, Any]:
    """What was held, by whomever, on the whole card."""
    assert done.memory is not None
    held = {key: getattr(done.memory, key) for key in ("before_bytes", "loaded_bytes", "peak_bytes", "after_bytes")}
    found = {"kind": done.kind, "date": datetime.now(UTC).date().isoformat(), "seconds": round(done.seconds, 1), **held}
    return found | (training_row(folder, place, done.name) if done.kind == "train" else {})


def training_row(folder: Path, place: RunDir, name: str) -> dict[str, Any]:
    """What was planned before anything was loaded, and what torch reserved. A training is a run of its own."""
    result = read_record(place.stages()[0].result, StageResult)
    forecast = json.loads((folder / "runs/stages-1/plan.json").read_text())["forecasts"][name]
    keys = ("fits", "budget_bytes", "peak_bytes", "reserved_bytes", "allocated_bytes", "levers", "lengths")
    return {
        "parameters": result.parameters,
        "trainable_parameters": result.trainable_parameters,
        "planned": {key: forecast[key] for key in keys},
        "reserved_bytes": result.peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    size = SMALL if given.small else CARD
    about = {"card": torch.cuda.get_device_name() if size.device == "cuda" else "cpu", "versions": versions()}
    known: dict[str, Any] = json.loads(given.out.read_text())["stages"] if given.out.exists() else {}

    def tell(name: str, row: dict[str, Any]) -> None:
        known[name] = row
        given.out.write_text(
            json.dumps(about | {"stages": {name: known[name] for name in STAGES if name in known}}, indent=1) + "\n"
        )
        print(f"{name} {json.dumps(row)}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), size, [name for name in STAGES if name in given.stages], tell)


if __name__ == "__main__":
    main()
