"""F11 on a card: the memory that training may use is cut until a step no longer fits. The same rows again with less of
them at once."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from finefit.facts.nvml import open_card
from tests.conftest import SPECIAL, make_project, make_tokenizer, write_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = 16
SEGMENT = 20 * 2**20
"""The allocator asks whether a tensor is under its cap, and then maps whole pieces of this size."""
LONG_ROWS = [
    {"messages": [{"role": "user", "content": f"{at} " + "x" * 480}, {"role": "assistant", "content": "y" * 400}]}
    for at in range(10, 10 + ROWS)
]
"""One micro-batch of validation, of about 900 tokens a row."""
SPEC = """\
name: capped
seed: 7
device: cuda
deterministic: true
precision: fp32
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 4, alpha: 8}
data:
  train: [{path: train.jsonl}]
  validation: {path: validation.jsonl}
  packing: none
optimizer: {lr: 1e-3, eps: 1e-4}
schedule: {steps: 6, warmup: 1}
global_batch: 16
levers: {micro_batch: 16, recompute: none, loss_chunk: none, offload: none, mlp_tiles: 1, kernels: torch, update: after}
save: {every: 3 steps}
"""

WORKER = """\
import sys
import torch
from pathlib import Path
from finefit.artifacts.rundir import StageDir
from finefit.train import loop, oom_recovery, worker
torch.cuda.init()
where, cap, spare = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
total = torch.cuda.get_device_properties(0).total_memory
peak = need = 0
def limit(allowed):
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
def fill():
    # what lies free between the weights, so that no room is none
    kept = []
    try:
        while True:
            kept.append(torch.empty(5 << 18, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return kept
really = oom_recovery.validate
def validated(ctx, micro_batch):
    # what is held now may stay held: only what this call asks of the driver counts, and for it alone there is a limit of its own
    global peak, need
    peak = max(peak, torch.cuda.max_memory_reserved())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    if spare >= 0:
        limit(held + spare)
    filler = [] if spare else fill()
    try:
        return really(ctx, micro_batch)
    finally:
        filler.clear()
        need = max(need, torch.cuda.max_memory_reserved() - held)
        torch.cuda.reset_peak_memory_stats()
        limit(cap or total)
oom_recovery.validate = validated
limit(cap or total)
loop.measure_worst_batch = lambda *_: None  # the worst batch is not what is looked at here
code = worker.work(StageDir(where), is_child_of_ours=False)
print("PEAK", max(peak, torch.cuda.max_memory_reserved()), "NEED", need)
sys.exit(code)
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    stage: Path
    peak: int
    """Reserved by steps."""
    need: int
    """Of the largest validation, beyond what was reserved before it."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that nothing has happened in, of a model whose activations are most of its memory."""
    project = tmp_path_factory.mktemp("capped") / "project"
    make_project(project, spec=SPEC, rows=64)
    write_jsonl(project / "validation.jsonl", LONG_ROWS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(project / "model")
    make_tokenizer().save_pretrained(project / "model")
    code = (
        "import sys; from pathlib import Path; from finefit.run.create import create_run, read_request; "
        "from finefit.spec.load import load_pipeline; p = Path(sys.argv[1]); spec = p / 'spec.yaml'; "
        "request = read_request(load_pipeline(spec), p, spec_text=spec.read_text()); "
        "print(create_run(request, runs=p / 'runs').path)"
    )
    return Path(
        subprocess.run(
            [sys.executable, "-c", code, str(project)], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )


@pytest.fixture(scope="module")
def free(prepared: Path) -> Trained:
    return trained(prepared, "free")


def trained(run: Path, name: str, *, cap: int = 0, batch_limit: int = -1) -> Trained:
    """A copy of the run, trained under a cap of so many bytes (0: none); its validations have so much room beyond what
    is held (-1: any)."""
    copy = run.with_name(name)
    subprocess.run(["cp", "-a", str(run), str(copy)], check=True)
    (stage,) = (copy / "stages").iterdir()
    script = copy.parent / "worker.py"
    script.write_text(WORKER)
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(stage), str(cap), str(batch_limit)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, peak, _, need = done.stdout[done.stdout.rindex("PEAK") :].split()
    return Trained(stage=stage, peak=int(peak), need=int(need))


def lines(stage: Path, event: str | None) -> list[dict[str, Any]]:
    return [
        line
        for line in map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
        if line.get("event") == event
    ]


def weights(stage: Path) -> dict[str, torch.Tensor]:
    return load_file(stage / "checkpoints" / "final" / "adapter_model.safetensors")


def assert_same_training(ours: Path, theirs: Path) -> None:
    """Bit for bit."""
    assert [line["loss"] for line in lines(ours, None)] == [line["loss"] for line in lines(theirs, None)]
    expected = weights(theirs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(ours).items())


def test_a_step_that_does_not_fit_under_a_cap_is_rescued_with_the_same_loss_and_weights(
    prepared: Path, free: Trained
) -> None:
    cap = int(free.peak * 0.6)
    short = trained(prepared, "short", cap=cap)
    told = lines(short.stage, "oom_recovered")
    assert told, "the cap was not reached; the comparison says nothing"
    assert told[0]["step"] == 1
    assert [e["after"]["micro_batch"] for e in told][:1] == [8]
    assert told[0]["reserved_bytes"] <= cap + SEGMENT
    assert short.peak <= cap + SEGMENT
    ours, theirs = lines(short.stage, None), lines(free.stage, None)
    assert [(a["step"], a["rows"], a["supervised_tokens"]) for a in ours] == [
        (b["step"], b["rows"], b["supervised_tokens"]) for b in theirs
    ]
    assert all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in zip(ours, theirs, strict=True))
    expected = weights(free.stage)
    assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in weights(short.stage).items())


def test_a_validation_that_does_not_fit_shrinks_and_training_is_bit_identical(prepared: Path, free: Trained) -> None:
    assert free.need > 128 * 2**20, (
        "the allocator asks for 20 MiB at a time: of a smaller validation a part may take as much as the whole"
    )
    short = trained(prepared, "narrow", batch_limit=int(free.need * 0.6))
    told = lines(short.stage, "validation_oom_recovered")
    assert told, "the limit was not reached; the comparison says nothing"
    assert {e["step"] for e in told} == {3}  # later ones begin with what fitted
    assert told[-1]["after"]["micro_batch"] < ROWS
    ours, theirs = (
        [line["validation_loss"] for line in lines(stage, "validated")] for stage in (short.stage, free.stage)
    )
    assert len(ours) == 2
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert_same_training(short.stage, free.stage)


def test_a_validation_that_has_no_room_at_all_is_left_out_and_training_is_bit_identical(
    prepared: Path, free: Trained
) -> None:
    short = trained(prepared, "none", batch_limit=0)
    assert [line["step"] for line in lines(short.stage, "validation_left_out")] == [3, 6]
    assert lines(short.stage, "validated") == []
    assert_same_training(short.stage, free.stage)


def test_the_driver_says_how_busy_this_card_is_and_what_it_draws() -> None:
    read = open_card(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert read is not None
    sample = read()
    assert 0.0 <= sample.utilisation <= 1.0
    assert 5 < sample.watts < 2000
