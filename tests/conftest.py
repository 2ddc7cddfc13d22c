"""A two-layer model, a tokenizer and rows, made in code: real components, small enough to be killed fifty times."""

import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import absl.logging
import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finefit.data.template_process import shared_process
from finefit.facts.files import finefit_cache
from finefit.objective.batch import Batch, Forward, LossSum
from tests.forks import fork_workers
from tests.here import rehearse_here

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if (
        signal.getsignal(_number) is signal.SIG_IGN
    ):  # under nohup or in a shell's background job; our children would inherit it
        signal.signal(_number, _usual)

# rouge-score brings absl, whose handler closes what stderr was when it was imported, a capture of pytest's, once
# submitit sets up its logging
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault
settings.load_profile("unhurried")

SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=SPECIAL[2:]
    )
    if chat:
        fast.chat_template = TEMPLATE
    return fast


def make_model(*, seed: int = 0, dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def make_model_folder(folder: Path, *, seed: int = 0, chat: bool = True, dropout: float = 0.0) -> Path:
    make_model(seed=seed, dropout=dropout).save_pretrained(folder)
    make_tokenizer(chat=chat).save_pretrained(folder)
    return folder


class Bent:
    """Counts as supervised fine-tuning does and computes something else."""

    def __init__(self, compute: Callable[[Forward, Batch], LossSum]) -> None:
        self._compute = compute

    def __call__(self, forward: Forward, batch: Batch) -> LossSum:
        return self._compute(forward, batch)

    def count(self, batch: Batch) -> int:
        return batch.num_supervised


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Sums in words of very unequal length."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        left, right = chance.randrange(50), chance.randrange(50)
        padding = " please" * chance.randrange(6)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"add {left} and {right}{padding}"},
                    {
                        "role": "assistant",
                        "content": json.dumps({"sum": left + right, "note": "x" * chance.randrange(9)}),
                    },
                ]
            }
        )
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


SPEC = """\
name: tiny
seed: 7
device: cpu
model: {kind: folder, path: model}
tuning: {kind: lora, rank: 4, alpha: 8, dropout: 0.1}
data:
  train: [{path: train.jsonl}]
  validation: {path: validation.jsonl}
  test: {path: test.jsonl}
optimizer: {lr: 1e-2}
schedule: {epochs: 2, warmup: 0.1}
global_batch: 4
levers: {micro_batch: 2}
save: {every: 3 steps, keep: 2}
evaluate: [{task: json_match, max_new_tokens: 8}]
"""


def make_project(folder: Path, *, spec: str = SPEC, rows: int = 22) -> Path:
    """A spec with its model and rows; returns the spec's path."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model_folder(folder / "model", dropout=0.1)
    write_jsonl(folder / "train.jsonl", make_rows(rows))
    write_jsonl(folder / "validation.jsonl", make_rows(4, seed=1))
    write_jsonl(folder / "test.jsonl", make_rows(5, seed=2))
    path = folder / "spec.yaml"
    path.write_text(spec, encoding="utf-8")
    return path


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's cache is never written: only a converted model, which is dear to make, is read from it. All tests of a
    session share this one."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "finefit").mkdir()
    for model in finefit_cache().glob("smollm2-135m-*"):
        (cache / "finefit" / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def _without_imports() -> Iterator[None]:
    """Where no test is about how a process starts, its imports would be most of the work. Beside a card every process
    starts as a user's does: what torch reads there, it reads when it is loaded. The process that renders chat templates
    lives as long as the tests."""
    process = shared_process()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            rehearse_here(patch)
            fork_workers(patch)
        yield
    del process


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")
