"""Speed and memory of one optimizer step on a card, beside other ways to take it, on real widths with random weights.

    python -m bench.speed measure OUT.json [NAME...]     on the card: all cases, or those whose name contains one of these
    python -m bench.speed profile OUT.txt NAME           where the time of one case goes

Median of steps after a warm-up, each between synchronised clocks. Memory is `max_memory_reserved`. A capped case can
take no more from the card than a card of that size would give it (the CUDA context is taken off).
"""  # noqa: E501

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.memory import DPO, RATES, SFT, SHAPES, alone, build, lora, versions
from finefit.artifacts.records import Levers
from finefit.objective.batch import Batch, Paired
from finefit.plan.target import CONTEXT_BYTES
from finefit.rehearse.allocator import replay
from finefit.rehearse.cost_model import step_seconds
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.layer_kinds import rehearse_extrapolated
from finefit.spec.models import Full, Tuning
from finefit.spec.schema import AdamW, Objective

GIB = 1 << 30
Step = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shape: str
    layers: int
    tuning: Tuning
    rows: int
    tokens: int
    levers: Levers
    share: float = 1.0
    """Of the tokens, that are supervised."""
    optimizer: Any = "adamw"
    clip: float | None = 1.0
    cap: float | None = None
    """GiB of the card that is emulated."""
    objective: Objective = SFT
    warm_up: int = 3
    steps: int = 7
    peers: bool = False

    @property
    def cfg(self) -> StepConfig:
        return StepConfig(
            config=dict(SHAPES[self.shape], num_hidden_layers=self.layers),
            tuning=self.tuning,
            optimizer=AdamW(lr=1e-5, kind=self.optimizer, clip=self.clip),
            device="cuda",
            capability=(9, 0),
            precision="bf16",
            levers=self.levers,
            tokens=self.tokens,
            supervised=max(1, int((self.tokens - 1) * self.share)),
            accumulates=False,
            objective=self.objective,
        )

    @property
    def num_sequences(self) -> int:
        return self.rows * self.cfg.sides


FUSED = Levers(micro_batch=4, kernels="fused", adapter_inputs="bf16", loss_chunk=1024)
Q7, Q4 = "qwen2.5-7b", "qwen3-4b"


def both(case: Case) -> tuple[Case, Case]:
    """Adapter weights in fp32, and in bf16."""
    half = case.tuning.model_copy(update={"weights": "bf16"})
    return replace(case, name=f"{case.name}, fp32 adapters"), replace(
        case, name=f"{case.name}, bf16 adapters", tuning=half, peers=False
    )


CASES: tuple[Case, ...] = (
    *both(
        Case(
            name="4x2048, all layers recomputed",
            shape=Q7,
            layers=8,
            tuning=lora(128),
            rows=4,
            tokens=2048,
            levers=replace(FUSED, recompute=8),
            peers=True,
        )
    ),
    *both(
        Case(
            name="4x2048, planned for a 24 GiB card",
            shape=Q7,
            layers=8,
            tuning=lora(128),
            rows=4,
            tokens=2048,
            levers=FUSED,
            cap=24,
        )
    ),
    *both(
        Case(
            name="1x8192, recomputed",
            shape=Q7,
            layers=8,
            tuning=lora(128),
            rows=1,
            tokens=8192,
            levers=replace(FUSED, micro_batch=1, recompute=8),
            peers=True,
        )
    ),
    *both(
        Case(
            name="1x512",
            shape=Q7,
            layers=8,
            tuning=lora(128),
            rows=1,
            tokens=512,
            levers=replace(FUSED, micro_batch=1, loss_chunk=256),
            steps=20,
            peers=True,
        )
    ),
    *both(
        Case(
            name="4x2048 NF4 r=16, recomputed",
            shape=Q7,
            layers=8,
            tuning=lora(16, bits=4),
            rows=4,
            tokens=2048,
            levers=replace(FUSED, recompute=8),
        )
    ),
    *both(
        Case(
            name="supervised-30",
            shape=Q7,
            layers=8,
            tuning=lora(128),
            rows=4,
            tokens=2048,
            share=0.3,
            levers=replace(FUSED, recompute=8),
            peers=True,
        )
    ),
    *both(
        Case(
            name="whole Qwen2.5-7B r=128, 2048-token rows, 24 GiB cap",
            shape=Q7,
            layers=28,
            tuning=lora(128),
            rows=4,
            tokens=2048,
            levers=replace(FUSED, recompute=28),
            cap=24,
            steps=5,
        )
    ),
    Case(
        name="Qwen3-4B r=16, one step of 262,144 tokens, 48 GiB cap",
        shape=Q4,
        layers=36,
        tuning=lora(16),
        rows=1,
        tokens=262144,
        levers=replace(FUSED, micro_batch=1, recompute=36, offload=True, mlp_tiles=8),
        cap=48,
        warm_up=0,
        steps=1,
    ),
    Case(
        name="DPO, Mistral-7B shape, NF4, pairs 2x1024, 12 GiB cap",
        shape="mistral-7b-v0.3",
        layers=32,
        tuning=lora(16, bits=4),
        rows=1,
        tokens=1024,
        levers=replace(FUSED, micro_batch=1, recompute=32, loss_chunk=256),
        objective=DPO,
        cap=12,
        steps=5,
    ),
    Case(
        name="full fine-tune, 6 B parameters, 80 GiB cap, 8-bit AdamW",
        shape=Q7,
        layers=21,
        tuning=Full(kind="full"),
        rows=2,
        tokens=2048,
        levers=replace(FUSED, micro_batch=2, recompute=21),
        optimizer="adamw_8bit",
        cap=80,
        warm_up=2,
        steps=3,
    ),
    Case(
        name="full fine-tune, 6 B parameters, 80 GiB cap, AdamW inside backward",
        shape=Q7,
        layers=21,
        tuning=Full(kind="full"),
        rows=2,
        tokens=2048,
        levers=replace(FUSED, micro_batch=2, recompute=21, update="inside"),
        clip=None,
        cap=80,
        warm_up=2,
        steps=3,
    ),
)


def run_case(case: Case) -> dict[str, Any]:
    from finefit.step.forward import autocast_for, bind, keeps_casts, make_objective
    from finefit.step.fused import kernels_here
    from finefit.step.levers import apply_levers
    from finefit.step.optimize import optimizer_step
    from finefit.step.state import make_optimizer

    _cap(case)
    cfg = case.cfg
    torch.manual_seed(0)
    model = build(cfg)
    is_fused = cfg.levers.kernels == "fused"
    kernels = kernels_here("cuda") if is_fused else None
    apply_levers(model, cfg.levers, kernels=kernels)
    optimizer = make_optimizer(model, cfg.optimizer, device="cuda")
    autocast = autocast_for("cuda", "bf16", with_cache=keeps_casts(case.tuning, cfg.levers))
    forward = bind(model, loss_chunk=cfg.levers.loss_chunk, autocast=autocast, is_fused=is_fused, kernels=kernels)
    objective = make_objective(case.objective, case.tuning, model, forward)
    batches = [_batch(case)]

    def step() -> Tensor:
        return optimizer_step(
            batches,
            forward=forward,
            objective=objective,
            optimizer=optimizer,
            clip=case.clip,
            decide=bool,
            update=case.levers.update,
        ).loss

    return timed(case, step)


def run_peer(case: Case, *, liger: bool) -> dict[str, Any]:
    """transformers and peft as their trainers call them: labels in, loss out, checkpointing where layers are
    recomputed."""
    _cap(case)
    torch.manual_seed(0)
    model: Any = build(case.cfg)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(model=model.get_base_model(), fused_linear_cross_entropy=True)
    if case.levers.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch = _batch(case)
    labels = torch.full_like(batch.input_ids_BT, -100)
    labels.view(-1)[batch.positions_N + 1] = batch.targets_N

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(input_ids=batch.input_ids_BT, labels=labels, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return timed(case, step)


def timed(case: Case, step: Step, context: Any = None) -> dict[str, Any]:
    for _ in range(case.warm_up):
        step()
    seconds = []
    with context or nullcontext():
        for _ in range(case.steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return {
        "tokens_per_second": round(case.num_sequences * case.tokens / median, 1),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "step_seconds": round(median, 5),
        "loss": loss.item(),
    }


def _cap(case: Case) -> None:
    if case.cap is not None:
        allowed = case.cap * GIB - CONTEXT_BYTES
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)


def _batch(case: Case) -> Batch:
    ids = torch.randint(0, SHAPES[case.shape]["vocab_size"], (case.num_sequences, case.tokens))
    supervised = case.cfg.supervised
    places = torch.cat(
        [
            row * case.tokens + torch.arange(case.tokens - 1 - supervised, case.tokens - 1)
            for row in range(case.num_sequences)
        ]
    )
    return Batch(
        input_ids_BT=ids.cuda(),
        positions_N=places.cuda(),
        targets_N=ids.flatten()[places + 1].cuda(),
        num_supervised=len(places),
        num_tokens=ids.numel(),
        paired=Paired(supervised=(supervised,) * case.num_sequences) if case.objective == DPO else None,
    )


def predicted(case: Case) -> dict[str, Any]:
    """What the rehearsal says of the same step; it never sees the card."""
    rehearsed = rehearse_extrapolated(case.cfg)
    return {
        "predicted_reserved_bytes": replay(rehearsed.trace.stream()).reserved_bytes,
        "predicted_seconds": round(step_seconds(rehearsed.trace, RATES), 5),
        "host_bytes": rehearsed.trace.host_bytes,
    }


def measure(out: Path, wanted: list[str]) -> None:
    found: list[dict[str, Any]] = []
    shared = {
        "card": torch.cuda.get_device_name(),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    chosen = [case for case in CASES if not wanted or any(part in case.name for part in wanted)]
    runs: list[tuple[Case, str, Callable[[], dict[str, Any]]]] = [
        (case, "finefit", partial(run_case, case)) for case in chosen
    ]
    runs += [(case, "transformers + peft", partial(run_peer, case, liger=False)) for case in chosen if case.peers]
    runs += [
        (case, "transformers + peft + Liger", partial(run_peer, case, liger=True)) for case in chosen if case.peers
    ]  # last: it patches transformers
    for case, tool, run in runs:
        levers = asdict(case.levers) if tool == "finefit" else {"recompute": case.levers.recompute}
        answer = alone(run) | (predicted(case) if tool == "finefit" else {})
        print(
            (
                f"{case.name:60} {tool:30} {answer.get('tokens_per_second')} "
                f"{answer.get('reserved_bytes', 0) / GIB:.2f} {answer}"
            ),
            flush=True,
        )
        found.append({"case": case.name, "tool": tool, **answer, "levers": levers, **shared})
        out.write_text(json.dumps(found, indent=1) + "\n")


def profile(out: Path, name: str) -> None:
    case = next(case for case in CASES if name in case.name)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        run_case(replace(case, warm_up=1, steps=2))
    out.write_text(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
    )


def main() -> None:
    match sys.argv[1:]:
        case ["measure", out, *wanted]:
            measure(Path(out), wanted)
        case ["profile", out, name]:
            profile(Path(out), name)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
