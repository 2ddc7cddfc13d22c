"""F11 on a card: the memory that training may use is cut until a step no longer fits. The same rows again with less of them at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from finefit.facts.usage import open_card
from tests.conftest import SPECIAL, make_project, make_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

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
from finefit.train import live, loop, worker
torch.cuda.init()
cap, only_validation = int(sys.argv[2]), sys.argv[3] == "validation"
total = torch.cuda.get_device_properties(0).total_memory
def limit(cap):
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total) if cap else 1.0)
if only_validation:
    really = live.Rig.__call__
    def called(self, batch):
        torch.cuda.empty_cache()  # the cap is on what is asked of the driver, not on what is kept from before
        limit(0 if torch.is_grad_enabled() else cap)
        return really(self, batch)
    live.Rig.__call__ = called
else:
    limit(cap)
loop.measure = lambda *_: None  # the worst batch is not what is looked at here
code = worker.work(StageDir(Path(sys.argv[1])), is_child_of_ours=False)
print("PEAK", torch.cuda.max_memory_reserved())
sys.exit(code)
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A run directory that nothing has happened in, of a model whose activations are most of its memory."""
    project = tmp_path / "project"
    make_project(project, spec=SPEC, rows=64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(project / "model")
    make_tokenizer().save_pretrained(project / "model")
    code = (
        "import sys; from pathlib import Path; from finefit.pipeline.create import create_run; from finefit.pipeline.inputs import open_inputs; "
        "from finefit.spec.load import load_spec; p = Path(sys.argv[1]); spec = load_spec(p / 'spec.yaml', ()); "
        "print(create_run(open_inputs(spec, p, p / 'runs' / spec.name), spec_text=(p / 'spec.yaml').read_text(), "
        "overrides=(), base=p, runs=p / 'runs').path)"
    )
    return Path(subprocess.run([sys.executable, "-c", code, str(project)], capture_output=True, text=True, check=True).stdout.split()[-1])


def trained(run: Path, name: str, *, cap: int, where: str = "step") -> tuple[Path, int]:
    """The stage directory of a copy of the run, trained under a cap of so many bytes (0: none), and the peak that was reserved."""
    copy = run.with_name(name)
    subprocess.run(["cp", "-a", str(run), str(copy)], check=True)
    (stage,) = (copy / "stages").iterdir()
    script = copy.parent / "worker.py"
    script.write_text(WORKER)
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, str(script), str(stage), str(cap), where],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return stage, int(done.stdout.split("PEAK")[-1])


def lines(stage: Path, event: str | None) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (stage / "metrics.jsonl").read_text().splitlines()) if line.get("event") == event]


def weights(stage: Path) -> dict[str, torch.Tensor]:
    return load_file(stage / "checkpoints" / "final" / "adapter_model.safetensors")


def test_a_step_that_does_not_fit_under_a_cap_is_rescued_with_the_same_loss_and_weights(prepared: Path) -> None:
    free, peak = trained(prepared, "free", cap=0)
    short, reached = trained(prepared, "short", cap=int(peak * 0.6))
    told = lines(short, "rescued")
    assert told, "the cap was not reached; the comparison says nothing"
    assert told[0]["step"] == 1
    assert [e["after"]["micro_batch"] for e in told][:1] == [8]
    assert told[0]["reserved_bytes"] <= peak * 0.6 + 2**21
    assert reached <= peak * 0.6 + 2**21
    ours, theirs = lines(short, None), lines(free, None)
    assert [(a["step"], a["rows"], a["supervised_tokens"]) for a in ours] == [(b["step"], b["rows"], b["supervised_tokens"]) for b in theirs]
    assert all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in zip(ours, theirs, strict=True))
    expected = weights(free)
    assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in weights(short).items())


def test_a_validation_that_does_not_fit_shrinks_and_training_is_bit_identical(prepared: Path) -> None:
    free, peak = trained(prepared, "free", cap=0)
    base = json.loads((free / "memory.jsonl").read_text().splitlines()[1])["allocated_bytes"]
    short, _ = trained(prepared, "short", cap=int(base + (peak - base) * 0.03), where="validation")
    assert lines(short, "validation_rescued"), "the cap was not reached; the comparison says nothing"
    assert [line["loss"] for line in lines(short, None)] == [line["loss"] for line in lines(free, None)]
    expected = weights(free)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(short).items())


def test_the_driver_says_how_busy_this_card_is_and_what_it_draws() -> None:
    read = open_card(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert read is not None
    sample = read()
    assert 0.0 <= sample.utilisation <= 1.0
    assert 5 < sample.watts < 2000
