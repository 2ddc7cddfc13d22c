"""Validation: means over all held-out rows, whatever the cut and however many ranks, without dropout and without a
trace in the model."""

import json
import math
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import Routing, read_record
from finefit.artifacts.stage_records import StageResult
from finefit.data.batch_workers import BatchWorkers
from finefit.data.collate import Collator
from finefit.data.examples import Example, TrainRow, open_examples
from finefit.objective.batch import Batch, Forward, Objective
from finefit.objective.losses import DpoLoss, sft_loss
from finefit.report.live import describe_event
from finefit.spec import schema
from finefit.spec.models import Lora
from finefit.step.engine import SingleProcessEngine
from finefit.step.forward import bind, starting_reference
from finefit.train.ranks import OneRank
from finefit.train.validation import validate
from tests.conftest import make_rows, make_tokenizer, write_jsonl
from tests.faults import TRAINING, Job, at_step, finish, make_job, outcome, run_to_end, send_self, start, words
from tests.mixtures import make_mixture_project
from tests.step.conftest import LORA, RENDERER, tuned, unequal_examples
from tests.step.test_dpo import make_pairs


class _Rank(OneRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass
class _Noting(SingleProcessEngine):
    """Keeps what this rank gives to the sum over all."""

    given: list[Tensor] = field(default_factory=list)
    of_others: float = 0.0

    def sum(self, value: Tensor) -> Tensor:
        self.given.append(value)
        return value + self.of_others


def _live(
    model: nn.Module,
    rows: Sequence[TrainRow],
    *,
    objective: Objective = sft_loss,
    asked: Any = None,
    forward: Forward | None = None,
    rank: int = 0,
    size: int = 1,
) -> Any:
    return SimpleNamespace(
        stage=SimpleNamespace(device="cpu", objective=asked or schema.Sft(kind="sft")),
        model=model,
        forward=forward or bind(model),
        objective=objective,
        engine=_Noting(of_others=float(size > 1)),
        ranks=_Rank(rank, size),
        validation=rows,
        collator=Collator(pad=RENDERER.pad),
        workers=BatchWorkers(1),
        compose=None,
    )


def _dpo_live(model: nn.Module, **rest: Any) -> Any:
    objective = DpoLoss(beta=0.2, reference=starting_reference(model, bind(model)))
    return _live(model, make_pairs(), objective=objective, asked=schema.Dpo(kind="dpo"), **rest)


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_loss_and_perplexity_are_those_of_every_supervised_token(micro_batch: int) -> None:
    model, rows = tuned(LORA), unequal_examples()
    found = validate(_live(model, rows), micro_batch)
    surprise, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor([row.tokens])).logits[0].double()
            for at in range(1, len(row.tokens)):
                if row.supervised[at]:
                    surprise -= logits[at - 1].log_softmax(-1)[row.tokens[at]].item()
                    count += 1
    assert found["validation_loss"] == pytest.approx(surprise / count, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(surprise / count), rel=1e-5)
    assert set(found) == {"validation_loss", "perplexity"}


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_pairs_have_accuracy_and_margin_in_place_of_perplexity(micro_batch: int) -> None:
    model = tuned(LORA)
    found, alone = validate(_dpo_live(model), micro_batch), [validate(_one_pair(model, at), 1) for at in range(6)]
    assert set(found) == {"validation_loss", "accuracy", "margin", "rewards_chosen", "rewards_rejected"}
    for name, value in found.items():
        assert value == pytest.approx(sum(part[name] for part in alone) / 6, rel=1e-5, abs=1e-6)
    assert 0 < found["accuracy"] < 1


def _one_pair(model: nn.Module, at: int) -> Any:
    ctx = _dpo_live(model)
    ctx.validation = make_pairs()[at : at + 1]
    return ctx


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize(
    "make", [lambda model, **rest: _live(model, unequal_examples()[:5], **rest), _dpo_live], ids=["sft", "dpo"]
)
def test_the_parts_of_all_ranks_are_the_whole_and_every_rank_calls_the_model_equally_often(
    make: Any, size: int
) -> None:
    model = tuned(LORA)
    whole = make(model)
    validate(whole, 2)
    parts, calls = [], []
    for rank in range(size):
        ctx = make(model, rank=rank, size=size)
        forward, counted = ctx.forward, [0]

        def counting(batch: Batch, forward: Forward = forward, counted: list[int] = counted) -> Tensor:
            counted[0] += 1
            return forward(batch)

        ctx.forward = counting
        validate(ctx, 2)
        parts.append(ctx.engine.given[0])
        calls.append(counted[0])
    assert len(set(calls)) == 1
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), whole.engine.given[0])


def test_dropout_is_off_and_on_again_and_random_numbers_stand_still() -> None:
    model = tuned(Lora(kind="lora", rank=4, dropout=0.5), dropout=0.5)
    before = torch.get_rng_state()
    assert validate(_live(model, unequal_examples()), 2) == validate(_live(model, unequal_examples()), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())


def test_a_validation_that_runs_out_of_memory_leaves_the_model_training() -> None:
    model = tuned(LORA)

    def out(_: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        validate(_live(model, unequal_examples(), forward=out), 2)
    assert model.training
    assert torch.is_grad_enabled()


def test_a_loss_beyond_all_numbers_has_no_perplexity() -> None:
    model = tuned(LORA)
    found = validate(
        _live(model, unequal_examples(), forward=lambda batch: torch.full((batch.num_supervised,), -1000.0)), 2
    )
    assert found == {"validation_loss": 1000.0}


# Routers trained from the spec to the last checkpoint: nothing else moves, a killed run ends bit-identical, and where
# tokens go is left behind.

LEVERS = (
    "{micro_batch: 2, recompute: 1, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1, "
    "adapter_inputs: fp32}"
)
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

    pytest.MonkeyPatch().setattr("finefit.train.validation.measure_routing", fail)


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
    where = run_to_end(job_of(tmp_path, re.sub(r"  validation: .*\n", "", two)))
    found = read_record(where.routing, Routing)
    assert found.experts == ("law", "maths", "verse")
    assert {name: source.rows for name, source in found.sources.items()} == {"train.jsonl": 22, "other.jsonl": 12}
    assert all(len(source.first) == 2 and abs(sum(source.first[1]) - 1) < 1e-4 for source in found.sources.values())
    assert "other.jsonl, layer 1, verse" in where.routing_map.read_text()
    (line,) = [line for line in read_lines(where.metrics) if line.get("event") == "routed"]
    assert line["held_out"] is False
    told = describe_event(line)
    assert told is not None
    assert re.search(r"first choices of trained tokens: train\.jsonl to (law|maths|verse) \d+%", told)


def test_what_the_template_writes_before_every_row_is_not_counted(tmp_path: Path) -> None:
    where = run_to_end(job_of(tmp_path, re.sub(r"  validation: .*\n", "", SPEC)))
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
    where = run_to_end(job_of(tmp_path, SPEC.replace("objective: {kind: router, balance: 0.1}\n", "")))
    assert not where.routing.exists()
    assert load_file(next((where.checkpoints / "final").glob("*.safetensors")))
