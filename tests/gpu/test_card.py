"""What only a card can show. Run with `pytest -m gpu` on a machine that has one."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SPEC, make_project

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ON_CARD = SPEC.replace("device: cpu", "device: cuda\ndeterministic: true").replace("epochs: 2", "epochs: 8")


def finefit(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "finefit", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"})


def finished(*arguments: str, cwd: Path) -> dict[str, Any]:
    process = finefit(*arguments, "--json", cwd=cwd)
    out, err = process.communicate()
    assert process.returncode == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def digests(checkpoint: Path) -> dict[str, str]:
    return {
        f"{file.name}:{name}": hashlib.sha256(
            tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else str(tensor).encode()
        ).hexdigest()
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_a_run_on_the_card_uses_bf16_and_stops_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = finished("run", str(make_project(tmp_path / "whole", spec=ON_CARD)), cwd=tmp_path / "whole")
    assert whole["plan"]["sft"]["device"]["value"] == "cuda"
    assert whole["plan"]["sft"]["precision"]["value"] == "bf16"
    cut = tmp_path / "cut"
    process = finefit("run", str(make_project(cut, spec=ON_CARD)), cwd=cut)
    checkpoints = cut / "runs/tiny-1/stages/1-sft/checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    stopped_early = process.returncode == 3
    resumed = finished("run", str(cut / "spec.yaml"), cwd=cut)
    assert resumed["result"]["step"] == whole["result"]["step"]
    assert digests(cut / resumed["checkpoints"] / "final") == digests(tmp_path / "whole" / whole["checkpoints"] / "final")
    assert stopped_early, "the run was over before the signal came; the comparison says nothing"


def test_full_tuning_on_the_card_lowers_the_loss_and_keeps_fp32_weights(tmp_path: Path) -> None:
    spec = ON_CARD.replace("{kind: lora, rank: 4, alpha: 8, dropout: 0.1}", "{kind: full}")
    result = finished("run", str(make_project(tmp_path / "full", spec=spec)), cwd=tmp_path / "full")
    stage = tmp_path / "full" / result["run"] / "stages/1-sft"
    losses = [line["loss"] for line in map(json.loads, (stage / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    assert losses[-1] < losses[0]
    assert {t.dtype for t in load_file(stage / "checkpoints/final/model.safetensors").values()} == {torch.float32}
    memory = [json.loads(line) for line in (stage / "memory.jsonl").read_text().splitlines()]
    assert all(line["reserved_bytes"] >= line["allocated_bytes"] > 0 for line in memory if line["instant"] == "step")
