"""Packed rows on a card: memory against its forecast, and speed against padded rows of the same lengths.

    python -m bench.packing predict predicted.json            on a machine without a GPU
    python -m bench.packing measure predicted.json bench/results/packing.json    on the card

A forecast is made for the worst pack (`micro_batch` rows of the longest length). It is compared with that pack, and
with packs of many short rows, which must not need more. Speed is taken over steps of 64 rows whose lengths are drawn as
instruction data has them.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.memory import FULL, SHAPES, alone, fill, lora, versions
from finefit.artifacts.records import Levers
from finefit.data.collate import collate
from finefit.data.examples import Example
from finefit.data.order import Capacity, capacity_of
from finefit.objective.batch import Batch
from finefit.rehearse.allocator import replay
from finefit.rehearse.fake_model import StepConfig, read_config
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.spec.models import Tuning
from finefit.spec.schema import AdamW
from tests.micro_batches import micro_batches

ROWS_PER_STEP = 64
STEPS = 6
VOCABULARY = 30000


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    layers: int
    tuning: Tuning
    rows: int
    tokens: int
    recompute: int = 0
    loss_chunk: int | None = None

    @property
    def name(self) -> str:
        tuned = "full" if self.tuning == FULL else "lora"
        return f"{self.shape}-{self.layers}L-{tuned}-{self.rows}x{self.tokens}-re{self.recompute}"

    def cfg(self, *, packing: bool) -> StepConfig:
        levers = Levers(
            micro_batch=self.rows,
            recompute=self.recompute,
            loss_chunk=self.loss_chunk,
            adapter_inputs="bf16",
            packing=packing,
        )
        return StepConfig(
            config=dict(SHAPES[self.shape], num_hidden_layers=self.layers),
            tuning=self.tuning,
            optimizer=AdamW(lr=1e-5),
            device="cuda",
            capability=(9, 0),
            precision="bf16",
            levers=levers,
            tokens=self.tokens,
            supervised=self.tokens - 1,
            accumulates=True,
            rows_per_step=ROWS_PER_STEP,
        )

    @property
    def capacity(self) -> Capacity:
        return capacity_of(
            micro_batch=self.rows, longest=self.tokens, supervised=self.tokens - 1, rows_per_step=ROWS_PER_STEP
        )


CASES = (
    Case(shape="llama-3.1-8b", layers=8, tuning=lora(16), rows=4, tokens=2048, recompute=8, loss_chunk=1024),
    Case(shape="qwen2.5-7b", layers=8, tuning=lora(64), rows=2, tokens=2048, loss_chunk=1024),
    Case(shape="qwen2.5-0.5b", layers=24, tuning=FULL, rows=8, tokens=512, recompute=24),
    Case(shape="gemma-3-4b", layers=12, tuning=lora(16), rows=4, tokens=1024, loss_chunk=1024),
    Case(shape="qwen3-4b", layers=12, tuning=lora(16), rows=1, tokens=8192, recompute=6, loss_chunk=1024),
)


def predict(out: Path) -> None:
    found = {}
    for case in CASES:
        answer = replay(rehearse_extrapolated(case.cfg(packing=True)).trace.stream())
        found[case.name] = {"allocated_bytes": answer.allocated_bytes, "reserved_bytes": answer.reserved_bytes}
        print(case.name, found[case.name], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def examples_of(lengths: Sequence[int]) -> list[Example]:
    chance = random.Random(0)
    return [Example(tuple(chance.randrange(VOCABULARY) for _ in range(n)), (False, *[True] * (n - 1))) for n in lengths]


def step_of(case: Case, *, packing: bool) -> Callable[[list[Batch]], float]:
    """Takes a step and says how long it took."""
    from transformers import AutoModelForCausalLM

    from finefit.model.attention import choose_attention
    from finefit.model.load import make_trainable, weight_dtype
    from finefit.objective.losses import sft_loss
    from finefit.step.forward import autocast_for, bind
    from finefit.step.levers import apply_levers
    from finefit.step.optimize import optimizer_step
    from finefit.step.state import make_optimizer

    cfg = case.cfg(packing=packing)
    config = read_config(cfg.config)
    attention = choose_attention("cuda", torch.cuda.get_device_capability(), "bf16", config, packing=packing)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=weight_dtype("bf16", cfg.tuning), attn_implementation=attention
        )
    warm_up = torch.empty(
        sum(p.numel() * p.element_size() for p in model.parameters()), dtype=torch.uint8, device="cuda"
    )
    del warm_up
    torch.manual_seed(0)
    fill(model)
    model.tie_weights()
    trained = make_trainable(model, cfg.tuning, name="bench")
    apply_levers(trained, cfg.levers)
    optimizer = make_optimizer(trained, cfg.optimizer, device="cuda")
    forward = bind(trained, loss_chunk=cfg.levers.loss_chunk, autocast=autocast_for("cuda", "bf16"))

    def step(batches: list[Batch]) -> float:
        on_card = [batch.moved(lambda tensor: tensor.cuda()) for batch in batches]
        torch.cuda.synchronize()
        began = time.perf_counter()
        outcome = optimizer_step(
            on_card, forward=forward, objective=sft_loss, optimizer=optimizer, clip=1.0, decide=bool
        )
        torch.cuda.synchronize()
        assert outcome.applied
        return time.perf_counter() - began

    return step


def memory(case: Case, lengths: Sequence[int]) -> dict[str, Any]:
    """Of steps with these rows, packed; an accumulated step, as the forecast is for."""
    step = step_of(case, packing=True)
    batches = micro_batches(examples_of(lengths), micro_batch=case.rows, pad=0, capacity=case.capacity)
    for _ in range(3):
        step(batches)
    return {
        "packs": len(batches),
        "rows": len(lengths),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def drawn(case: Case) -> list[int]:
    """Lognormal, as instruction data is: a median of about a seventh of the longest row."""
    chance = random.Random(1)
    return [
        min(case.tokens, max(8, round(chance.lognormvariate(0, 0.8) * case.tokens / 7))) for _ in range(ROWS_PER_STEP)
    ]


def speed(case: Case) -> dict[str, Any]:
    lengths = drawn(case)
    examples = examples_of(lengths)
    in_order = [collate(examples[at : at + case.rows], pad=0) for at in range(0, len(examples), case.rows)]
    ways = {
        "as they come": (False, in_order),
        "grouped": (False, micro_batches(examples, micro_batch=case.rows, pad=0)),
        "packed": (True, micro_batches(examples, micro_batch=case.rows, pad=0, capacity=case.capacity)),
    }
    found: dict[str, Any] = {"tokens": sum(lengths), "longest": max(lengths)}
    for name, (packing, batches) in ways.items():
        timed = alone(
            lambda batches=batches, packing=packing: {"seconds": median_of(step_of(case, packing=packing), batches)}  # type: ignore[misc]
        )
        found[name] = {
            "micro_batches": len(batches),
            "computed_tokens": sum(b.input_ids_BT.numel() for b in batches),
            **timed,
        }
    return found


def median_of(step: Callable[[list[Batch]], float], batches: list[Batch]) -> float:
    return statistics.median([step(batches) for _ in range(STEPS)][2:])


def measure(predicted: Path, out: Path) -> None:
    predictions = json.loads(predicted.read_text())
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "versions": versions(), "cases": {}}
    for case in CASES:
        worst = [case.tokens] * (2 * case.rows)
        short = [case.tokens // 16] * min(2 * case.capacity.rows, 2 * 16 * case.rows)
        found["cases"][case.name] = {
            "predicted": predictions[case.name],
            "worst": alone(lambda case=case, worst=worst: memory(case, worst)),  # type: ignore[misc]
            "short_rows": alone(lambda case=case, short=short: memory(case, short)),  # type: ignore[misc]
            "speed": speed(case),
        }
        print(case.name, json.dumps(found["cases"][case.name]), flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["predict", out]:
            predict(Path(out))
        case ["measure", predicted, out]:
            measure(Path(predicted), Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
