"""Predicted against measured memory on a CPU: real runs of a few steps, each with an evaluation.

    python bench/cpu_memory.py bench/results/cpu_memory.json          all cases: about half an hour on two cores
    python bench/cpu_memory.py some.json smollm2-lora-4x128           the cases of these names alone
    python bench/cpu_memory.py renew bench/results/cpu_memory.json    forecasts of today beside measurements that stay

What is measured is the most memory that the process of the training, or of the evaluation, had resident (VmHWM), as
the run records it. Every row is as long as the longest, so that the planned batch is the one that is trained.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import RunDir, stage_of
from finefit.artifacts.stage_records import EvalResult, StageResult
from finefit.facts.machine import read_cpu_model
from finefit.model.resolve_model import embedded_model

STEPS, ROWS, TEST_ROWS = 2, 16, 4
FINEFIT = (sys.executable, "-m", "finefit")
EMBEDDED = {"kind": "embedded", "name": "smollm2-135m"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "bytes-60m": {
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "bytes-20m": {
        "model_type": "llama",
        "vocab_size": 259,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "qwen3-0.3b": {
        "model_type": "qwen3",
        "vocab_size": 49152,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 20,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}
LORA = {"kind": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"}
FULL = {"kind": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str | None = None
    """A model of random weights; None for SmolLM2-135M."""
    tuning: Mapping[str, Any] = field(default_factory=lambda: LORA)
    micro_batch: int = 1
    tokens: int = 256
    """Of every row, about: a prompt of three quarters and its answer."""
    new_tokens: int = 16
    levers: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the spec."""
    is_dpo: bool = False
    evaluates_base: bool = False
    """Beside what was trained: its files may be of another precision than a checkpoint."""


CASES = {
    "smollm2-lora-4x128": Case(micro_batch=4, tokens=128),
    "smollm2-lora-1x1024": Case(tokens=1024),
    "smollm2-lora-2x512-recompute": Case(micro_batch=2, tokens=512, levers={"recompute": "all"}),
    "smollm2-lora-4x128-bf16": Case(micro_batch=4, tokens=128, more={"precision": "bf16"}),
    "smollm2-full-1x256": Case(tuning=FULL),
    "smollm2-full-2x256-bf16": Case(tuning=FULL, micro_batch=2, more={"precision": "bf16"}),
    "smollm2-dpo-1x192": Case(tokens=192, is_dpo=True),
    "smollm2-nf4-2x256": Case(micro_batch=2, tuning={**LORA, "base_bits": 4}),
    "qwen-0.5b-lora-1x128": Case(shape="qwen-0.5b", tokens=128),
    "qwen3-0.3b-full-1x128-recompute": Case(
        shape="qwen3-0.3b",
        tuning=FULL,
        tokens=128,
        levers={"recompute": "all", "loss_chunk": 64},
        evaluates_base=True,
    ),
    "bytes-20m-full-2x128": Case(shape="bytes-20m", tuning=FULL, micro_batch=2, tokens=128),
    "bytes-60m-full-4x256": Case(shape="bytes-60m", tuning=FULL, micro_batch=4),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|end|>", "<|pad|>", "<|turn|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
    )
    return fast


def make_model(shape: str, folder: Path) -> dict[str, Any]:
    """Random weights; the tokenizer is that of SmolLM2, or has a token for each byte where the vocabulary is small."""
    values = SHAPES[shape]
    tokenizer = byte_tokenizer()
    if values["vocab_size"] > len(tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(embedded_model(EMBEDDED["name"]).folder)
    config = AutoConfig.for_model(
        **values, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, bos_token_id=None
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, values["dtype"])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"kind": "folder", "path": str(folder)}


def write_rows(folder: Path, case: Case) -> None:
    """Words of one token; of one byte each where tokens are bytes."""
    is_bytes = case.shape is not None and SHAPES[case.shape]["vocab_size"] < 1000
    word = "a" if is_bytes else " a"

    def row(at: int) -> dict[str, Any]:
        prompt, answer = f"{at:04d}" + word * (3 * case.tokens // 4 - 40), word.strip() + word * (case.tokens // 4)
        messages = [{"role": "user", "content": prompt}]
        if case.is_dpo:
            both = {"chosen": answer, "rejected": answer.replace("a", "b")}
            return {"prompt": messages} | {
                side: [{"role": "assistant", "content": text}] for side, text in both.items()
            }
        return {"messages": [*messages, {"role": "assistant", "content": answer}]}

    for name, first, count in (("train", 0, ROWS), ("test", ROWS, TEST_ROWS)):
        lines = (json.dumps(row(at)) + "\n" for at in range(first, first + count))
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_spec(folder: Path, case: Case) -> Path:
    model = EMBEDDED if case.shape is None else make_model(case.shape, folder / "model")
    write_rows(folder, case)
    evaluation = {
        "task": "exact_match",
        "max_new_tokens": case.new_tokens,
        "batch": TEST_ROWS,
        "base": case.evaluates_base,
    }
    spec = {
        "name": "case",
        "device": "cpu",
        "model": model,
        "tuning": dict(case.tuning),
        "data": {
            "train": [{"path": "train.jsonl"}],
            "max_tokens": 2048,
            **({} if case.is_dpo else {"test": {"path": "test.jsonl"}}),
        },
        "optimizer": {"kind": "adamw", "lr": 1e-5},
        "schedule": {"steps": STEPS},
        "global_batch": case.micro_batch,
        "levers": {"micro_batch": case.micro_batch, **case.levers},
        "save": {"every": "1000 steps", "keep": 1},
        "evaluate": [] if case.is_dpo else [evaluation],
        **({"objective": {"kind": "dpo"}} if case.is_dpo else {}),
        **case.more,
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps(spec))
    return path


def measure(case: Case) -> dict[str, dict[str, Any]]:
    """Predicted and measured bytes of the training and of its evaluations, by what a run records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = make_spec(folder, case)
        subprocess.run([*FINEFIT, "run", str(spec), "--runs", str(folder / "runs")], check=True, stdout=DEVNULL)
        where = stage_of(RunDir(folder / "runs" / "case-1"))
        result = read_record(where.result, StageResult)
        found = {"training": _compared(result.predicted_bytes, result.peak_bytes)}
        scored = [read_record(paths.result, EvalResult) for paths in where.evaluations()]
    if scored:
        most = max(scored, key=lambda one: one.peak_bytes or 0)
        found["evaluation"] = _compared(most.predicted_bytes, most.peak_bytes)
    return found


def renew(case: Case, measured: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        words = [*FINEFIT, "plan", str(make_spec(Path(name), case)), "--card", "cpu", "--json"]
        forecast = json.loads(subprocess.run(words, check=True, stdout=PIPE).stdout)
    predicted = {"training": forecast["training_bytes"]}
    for limit in forecast["eval_limits"].values():
        predicted["evaluation"] = limit["held_bytes"]
    return {what: _compared(predicted[what], held["measured_bytes"]) for what, held in measured.items()}


def _compared(predicted: int | None, measured: int | None) -> dict[str, Any]:
    assert predicted is not None
    assert measured is not None
    error = round(predicted / measured - 1, 4)
    return {"predicted_bytes": predicted, "measured_bytes": measured, "error": error}


def main() -> None:
    is_renewed = sys.argv[1] == "renew"
    path, *names = sys.argv[1 + is_renewed :]
    earlier = json.loads(Path(path).read_text())["cases"] if Path(path).exists() and (names or is_renewed) else {}
    found = dict(earlier)
    for name in names or (earlier if is_renewed else CASES):
        found[name] = renew(CASES[name], earlier[name]) if is_renewed else measure(CASES[name])
        for what, held in found[name].items():
            sizes = (f"{held[key] / 2**20:,.0f} MiB {key[:-6]}" for key in ("predicted_bytes", "measured_bytes"))
            print(f"{name} {what}: {', '.join(sizes)}, {held['error']:+.1%}", flush=True)
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{read_cpu_model(Path('/proc/cpuinfo'))}, {len(os.sched_getaffinity(0))} cores",
            "versions": {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")},
            "cases": {name: found[name] for name in CASES if name in found},
        }
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
