"""The forecast of a whole run against the card it then runs on. Run with `pytest -m gpu` on a machine that has one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import SPECIAL, make_tokenizer, write_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SPEC = """\
name: middle
seed: 7
device: cuda
model: {kind: folder, path: model}
tuning: TUNING
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
schedule: {steps: 3}
global_batch: 8
LEVERS
"""
CASES = {
    "lora, levers searched": ("{kind: lora, rank: 32}", ""),
    "lora, recomputed, loss in chunks": (
        "{kind: lora, rank: 32, dropout: 0.1}",
        "levers: {micro_batch: 4, recompute: all, loss_chunk: 512}",
    ),
    "lora on four bits": ("{kind: lora, rank: 32, base_bits: 4}", "levers: {micro_batch: 4, recompute: all}"),
    "full": ("{kind: full}", "levers: {micro_batch: 2, recompute: none}"),
    "full, offloaded, tiled": (
        "{kind: full}",
        "levers: {micro_batch: 2, recompute: all, offload: inputs, mlp_tiles: 4, keep_attention: true}",
    ),
}


def make_middle_project(folder: Path, tuning: str, levers: str) -> Path:
    """A random model of 8 layers and rows of about a thousand tokens: large enough to be worth a forecast."""
    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    assert len(SPECIAL) + 256 <= config.vocab_size
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "x" * (400 + 20 * at)},
                {"role": "assistant", "content": "y" * (600 - 5 * at)},
            ]
        }
        for at in range(24)
    ]
    write_jsonl(folder / "train.jsonl", rows)
    path = folder / "spec.yaml"
    path.write_text(SPEC.replace("TUNING", tuning).replace("LEVERS", levers))
    return path


def finefit(*arguments: str, cwd: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "finefit", *arguments, "--json"]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("case", CASES)
def test_what_was_predicted_is_measured_within_three_per_cent(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "four bits" in case:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_middle_project(tmp_path / "project", *CASES[case])
    found = finefit("plan", str(path), "--measure", cwd=path.parent)
    print(
        f"\n{case}: {found['predicted_bytes']:,} predicted, {found['measured_bytes']:,} measured, {found['error']:+.2%}"
    )
    assert (
        abs(found["error"]) < 0.03 or abs(found["measured_bytes"] - found["predicted_bytes"]) <= 24 << 20
    )  # a piece of what the allocator takes
    plan = finefit("plan", str(path), cwd=path.parent)
    assert plan["uncertainty"] == pytest.approx(abs(found["error"]), abs=1e-4)
