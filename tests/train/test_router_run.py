"""Routers trained from the spec to the last checkpoint: nothing else moves, a killed run ends bit-identical, and where tokens go is left behind."""

import json
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finefit.artifacts.journal import read_lines
from finefit.artifacts.pipelines import Routing
from finefit.artifacts.records import read_record
from finefit.artifacts.trainings import StageResult
from finefit.data.examples import Example
from finefit.data.store import open_examples
from finefit.report.events import event_words
from tests.conftest import make_rows, make_tokenizer, write_jsonl
from tests.faults import TRAINING, Job, at_step, finish, make_job, outcome, send_self, start, words
from tests.mixtures import make_mixture_project

LEVERS = "{micro_batch: 2, recompute: 1, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, adapter_inputs: fp32}"
GATES = "tuning: {kind: subset, trainable: [mlp.gate]}\nobjective: {kind: router, balance: 0.1}\n"
SPEC = re.sub(r"levers: .*\n", f"levers: {LEVERS}\n", re.sub(r"tuning: .*\n", GATES, TRAINING)).replace(
    "epochs: 3", "epochs: 1"
)


def make_projects(folder: Path, *, spec: str, family: str) -> Path:
    path = make_mixture_project(folder, spec=spec, family=family)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"expert_names": ["law", "maths", "verse"]}))
    write_jsonl(folder / "other.jsonl", make_rows(6, seed=5))
    return path


def out_of_memory_when_measuring() -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room for the routing")

    pytest.MonkeyPatch().setattr("finefit.train.routing.measure_routing", fail)


def job_of(folder: Path, spec: str, family: str = "llama") -> Job:
    project: Callable[..., Path] = partial(make_projects, family=family)
    return make_job(folder, spec=spec, project=project)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_only_routers_move_and_a_killed_run_ends_bit_identical(tmp_path: Path, family: str) -> None:
    job = job_of(tmp_path, SPEC, family)
    whole, where = job.fresh(), job.fresh()
    assert finish(start(whole)) == 0, words(whole)
    assert finish(start(where, lambda: at_step(5, lambda: send_self(signal.SIGKILL)))) == -signal.SIGKILL
    assert finish(start(where)) == 0, words(where)
    assert outcome(where) == outcome(whole)
    assert where.routing.read_bytes() == whole.routing.read_bytes()
    result = read_record(whole.result, StageResult)
    assert result.frozen_unchanged is True
    assert result.trainable_parameters == 2 * 3 * 16
    before = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(whole.checkpoints / "final").named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"model.layers.{at}.mlp.gate.weight" for at in range(2)
    }


def test_where_tokens_go_is_recorded_by_source_and_drawn(tmp_path: Path) -> None:
    two = SPEC.replace("train: [{path: train.jsonl}]", "train: [{path: train.jsonl}, {path: other.jsonl, weight: 2}]")
    where = job_of(tmp_path, re.sub(r"  validation: .*\n", "", two)).fresh()
    assert finish(start(where)) == 0, words(where)
    found = read_record(where.routing, Routing)
    assert found.experts == ("law", "maths", "verse")
    assert {name: source.rows for name, source in found.sources.items()} == {"train.jsonl": 22, "other.jsonl": 12}
    assert all(len(source.first) == 2 and abs(sum(source.first[1]) - 1) < 1e-4 for source in found.sources.values())
    assert "other.jsonl, layer 1, verse" in where.routing_map.read_text()
    (line,) = [line for line in read_lines(where.metrics) if line.get("event") == "routed"]
    assert line["held_out"] is False
    told = event_words(line)
    assert told is not None
    assert re.search(r"first choices of trained tokens: train\.jsonl to (law|maths|verse) \d+%", told)


def test_what_the_template_writes_before_every_row_is_not_counted(tmp_path: Path) -> None:
    where = job_of(tmp_path, re.sub(r"  validation: .*\n", "", SPEC)).fresh()
    assert finish(start(where)) == 0, words(where)
    rows = [
        example.tokens for example in open_examples(where.prepared("train.safetensors")) if isinstance(example, Example)
    ]
    before = make_tokenizer()("<|user|>add ")["input_ids"]
    assert all(row[: len(before)] == tuple(before) for row in rows)
    (source,) = read_record(where.routing, Routing).sources.values()
    assert (source.rows, source.tokens) == (len(rows), sum(len(row) - len(before) for row in rows))


def test_routing_that_cannot_be_measured_takes_no_training_with_it(tmp_path: Path) -> None:
    job = job_of(tmp_path, SPEC)
    whole, where = job.fresh(), job.fresh()
    assert finish(start(whole)) == 0, words(whole)
    assert finish(start(where, out_of_memory_when_measuring)) == 0, words(where)
    assert "routing is not measured" in words(where)
    assert "no room for the routing" in words(where)
    assert not where.routing.exists()
    assert outcome(where) == outcome(whole)
    assert read_record(where.result, StageResult).failure is None


def test_supervised_fine_tuning_of_a_mixture_says_nothing_of_routing(tmp_path: Path) -> None:
    where = job_of(tmp_path, SPEC.replace("objective: {kind: router, balance: 0.1}\n", "")).fresh()
    assert finish(start(where)) == 0, words(where)
    assert not where.routing.exists()
    assert load_file(next((where.checkpoints / "final").glob("*.safetensors")))
