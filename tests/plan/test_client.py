"""The lengths that a forecast stands on: counted where it can be done, else the worst that the spec allows."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import psutil
import pytest

from finefit.artifacts.cache import StepTime, host_here, keep_step_time
from finefit.artifacts.forecasts import Lengths, PlanningProgress, RehearsalRequest, RehearsalResult
from finefit.errors import ModelError
from finefit.facts.cards import parse_card
from finefit.facts.nvml import Card
from finefit.plan import client
from finefit.plan.client import (
    PlannerProcess,
    as_measured,
    ask,
    forecast,
    observed_planning,
    shared_planner,
    visible_cards,
)
from finefit.plan.stage_forecasts import row_lengths
from finefit.plan.worker import JOBS
from finefit.rehearse.fake_model import StepConfig
from finefit.rehearse.rehearsal import Rehearsal
from finefit.rehearse.rehearsal import rehearse as rehearse_step
from finefit.spec.load import load_spec, parse_spec, spec_to_json
from tests.conftest import make_rows, write_jsonl
from tests.forecasts import make_forecast
from tests.rehearse.conftest import make_config

SHAPE = "model={kind: shape, config: {model_type: llama}}"


def _lengths(spec_path: Path, *overrides: str) -> Lengths:
    return row_lengths(load_spec(spec_path, overrides), spec_path.parent)


def test_rows_are_counted_by_split(project: Path) -> None:
    assert _lengths(project) == Lengths(
        num_rows=22,
        longest=77,
        mean=1453 / 22,
        supervised=32,
        mean_supervised=605 / 22,
        source="counted",
        validation=(68, 31),
        prompt=52,
    )


def test_a_repeated_row_counts_as_often_as_it_is_seen(project: Path) -> None:
    assert _lengths(project, "data.train.0.weight=3").num_rows == 66


@pytest.mark.parametrize("name", ["validation", "test"])
def test_held_out_rows_that_are_not_there_yet_are_not_waited_for(project: Path, name: str) -> None:
    (project.parent / f"{name}.jsonl").unlink()
    found = _lengths(project)
    assert (found.num_rows, found.source) == (22, "counted")
    assert (found.validation is None, found.prompt is None) == (name == "validation", name == "test")


def _no_file(folder: Path) -> str:
    (folder / "train.jsonl").unlink()
    return "train.jsonl does not exist"


def _no_tokenizer(_: Path) -> str:
    return "the model has no tokenizer"


def _no_row(folder: Path) -> str:
    unanswered, longer = make_rows(2)
    unanswered["messages"].pop()
    longer["messages"][0]["content"] *= 9
    write_jsonl(folder / "train.jsonl", [unanswered, longer])
    return "no row can be used"


@pytest.mark.parametrize(
    ("spoil", "overrides"),
    [(_no_file, ()), (_no_tokenizer, (SHAPE,)), (_no_row, ("data.bad_rows=drop",))],
    ids=["no file", "no tokenizer", "no row"],
)
def test_what_cannot_be_counted_is_assumed_to_be_the_worst(
    project: Path, spoil: object, overrides: tuple[str, ...]
) -> None:
    assert callable(spoil)
    reason = spoil(project.parent)
    found = _lengths(project, "data.max_tokens=100", *overrides)
    assert found.source == f"assumed from data.max_tokens, since {reason}"
    assert (found.num_rows, found.longest, found.mean, found.supervised, found.mean_supervised) == (
        None,
        100,
        100.0,
        99,
        99.0,
    )


def test_pairs_that_cannot_be_counted_have_two_sides(project: Path) -> None:
    assert (_lengths(project, SHAPE).sides, _lengths(project, SHAPE, "objective={kind: dpo}").sides) == (1, 2)


# what an answer is kept for


@pytest.fixture
def asked(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Says how many questions were not answered from the cache; the answers themselves do not matter here."""
    questions: list[object] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def note(_: client.Job, request: RehearsalRequest) -> RehearsalResult:
        questions.append(request)
        return RehearsalResult(forecasts=tuple(make_forecast() for _ in request.cards))

    monkeypatch.setattr(client, "ask", note)
    lengths = Lengths(num_rows=4, longest=8, mean=8.0, supervised=4, mean_supervised=4.0, source="counted")

    def rehearse(*overrides: str, card: str = "auto", nodes: int | None = None) -> int:
        forecast(load_spec(project, overrides), project.parent, (card,), lengths, nodes=nodes)
        return len(questions)

    return rehearse


@pytest.mark.parametrize(
    "override",
    [
        "objective={kind: dpo}",
        "objective={kind: dpo, reference: cached}",
        "engine={kind: ddp, devices: 2}",
        "engine={kind: deepspeed, devices: 2, stage: 3}",
        "launcher={kind: slurm, nodes: 2}",
        "tuning.dora=true",
        "tuning.base_bits=8",
        "tuning.weights=bf16",
        "tuning.adapter=somewhere",
        "tuning={kind: subset, trainable: [layers.*.mlp]}",
        "precision=fp16",
        "optimizer.kind=paged_adamw",
        "levers.update=after",
        "save.every=10 steps",
    ],
)
def test_what_a_forecast_depends_on_is_asked_again(asked: Callable[..., int], override: str) -> None:
    assert (asked(), asked(), asked(override), asked(override)) == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("seed=1",), ("seed=2",)),
        (("objective={kind: dpo, beta: 0.1}",), ("objective={kind: dpo, beta: 0.5}",)),
        (("tuning.adapter=here",), ("tuning.adapter=there",)),
        ((), ("trackers=[{kind: wandb}]",)),
        ((), ("launcher={kind: slurm}",)),
        (("launcher={kind: slurm, minutes: 5}",), ("launcher={kind: slurm, minutes: 9, partition: long}",)),
    ],
)
def test_what_it_does_not_depend_on_is_answered_at_once(
    asked: Callable[..., int], first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    assert (asked(*first), asked(*second)) == (1, 1)


def test_nodes_that_ranks_were_started_on_are_planned_as_those_of_a_launcher(asked: Callable[..., int]) -> None:
    assert (asked(), asked(nodes=2), asked("launcher={kind: slurm, nodes: 2}")) == (1, 2, 2)
    assert asked("launcher={kind: slurm, nodes: 2}", nodes=1) == 2  # those that are there count


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("card", "times"), [("auto", 2), ("RTX 4090", 1)])
def test_a_setting_of_this_machine_matters_on_this_machine_only(
    asked: Callable[..., int], monkeypatch: pytest.MonkeyPatch, card: str, times: int, name: str
) -> None:
    for known in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(known, raising=False)
    asked(card=card)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert asked(card=card) == times


def _has_cards(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    cards = (
        Card(name=name, memory_bytes=None, free_bytes=None, driver="580.1", compute_capability=None) for name in names
    )
    found = tuple(cards), None
    monkeypatch.setattr(client, "read_cards", lambda: found)


@pytest.mark.parametrize("card", ["auto", "24GiB"])
def test_another_card_or_host_is_asked_again_with_the_same_cache(
    asked: Callable[..., int], monkeypatch: pytest.MonkeyPatch, card: str
) -> None:
    """A home that several machines share, or a machine with different cards of which one is chosen."""
    _has_cards(monkeypatch, "NVIDIA L4", "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert asked(card=card) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert asked(card=card) == 2
    monkeypatch.setattr(client, "host_here", lambda: "another host")
    assert (asked(card=card), asked(card=card)) == (3, 3)


@pytest.mark.parametrize(("named", "seen"), [("", None), ("1", (1,)), ("3, 2", (3, 2)), ("GPU-8932", None)])
def test_the_cards_that_are_visible_are_known_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, named: str, seen: tuple[int, ...] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_cards() == seen


# The process that rehearses, seen from outside: one for many questions, gone when they are answered, and its end is no
# silence.

SPEC = """\
name: planned
model: {kind: folder, path: model}
tuning: {kind: full}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-4}
schedule: {epochs: 3}
global_batch: 2
levers: {micro_batch: 1, recompute: none, keep_attention: false, loss_chunk: none, offload: none, mlp_tiles: 1}
"""
LENGTHS = Lengths(num_rows=8, longest=32, mean=32.0, supervised=16, mean_supervised=16.0, source="counted")


def _question(layers: int = 2, **changes: object) -> RehearsalRequest:
    config = make_config("llama-3.2-1b", layers=layers, vocab_size=512) | changes
    return RehearsalRequest(
        spec=spec_to_json(parse_spec(SPEC, where="spec.yaml", overrides=())),
        config=config,
        cards=("A100-80GB",),
        lengths=LENGTHS,
    )


def test_each_candidate_is_told_with_its_card_before_it_is_rehearsed() -> None:
    seen: list[PlanningProgress] = []
    cards = ("A100-80GB", "RTX 4090")
    with observed_planning(seen.append):
        assert len(ask("rehearse", replace(_question(), cards=cards)).forecasts) == 2
    assert [(one.card, one.number) for one in seen] == sorted(
        ((one.card, one.number) for one in seen), key=lambda told: told[1]
    )
    assert {(one.card, one.number, one.num_cards) for one in seen} == {
        (card, at, 2) for at, card in enumerate(cards, 1)
    }
    assert seen[0].doing.startswith("micro_batch 1")


def test_several_cards_are_planned_as_each_alone_and_rehearse_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[StepConfig] = []

    def counted(cfg: StepConfig) -> Rehearsal:
        executed.append(cfg)
        return rehearse_step(cfg)

    monkeypatch.setattr("finefit.rehearse.layer_kinds.rehearse", counted)
    cards = ("A100-80GB", "RTX 5090")
    spec = spec_to_json(
        parse_spec(
            f"{SPEC}evaluate: [{{task: rouge, max_new_tokens: 4}}]\n",
            where="spec.yaml",
            overrides=("data.test.path=t.jsonl",),
        )
    )
    question = replace(_question(), spec=spec)
    alone = [JOBS["rehearse"](replace(question, cards=(card,))).forecasts[0] for card in cards]  # type: ignore[attr-defined]
    of_first = len(executed) // len(cards)
    executed.clear()
    assert list(JOBS["rehearse"](replace(question, cards=cards)).forecasts) == alone  # type: ignore[attr-defined]
    assert len(executed) == of_first


def _workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "finefit.plan.start_worker" in child.cmdline()]


def test_one_process_answers_all_that_is_asked_inside_and_then_ends() -> None:
    with shared_planner():
        small = ask("rehearse", _question(2)).forecasts[0]
        (first,) = _workers()
        with shared_planner():  # of one stage among several
            large = ask("rehearse", _question(3)).forecasts[0]
        assert _workers() == [first]
    assert large.peak_bytes > small.peak_bytes
    assert _workers() == []


def test_a_question_that_cannot_be_answered_leaves_the_process_to_the_next() -> None:
    with shared_planner():
        with pytest.raises(ModelError):
            ask("rehearse", _question(model_type="no such model"))
        (first,) = _workers()
        assert ask("rehearse", _question()).forecasts
        assert _workers() == [first]


def test_a_process_that_was_ended_is_told_with_its_signal_and_started_anew() -> None:
    with PlannerProcess() as planner:
        planner.ask("rehearse", _question())
        os.kill(_workers()[0], signal.SIGKILL)
        with pytest.raises(ModelError, match="the rehearsal was ended by SIGKILL inside torch"):
            planner.ask("rehearse", _question())
        assert planner.ask("rehearse", _question()).forecasts
    assert _workers() == []


def _broken_off() -> None:
    with shared_planner():
        ask("rehearse", _question())
        raise KeyboardInterrupt


def test_nothing_is_left_where_the_asking_is_broken_off() -> None:
    with pytest.raises(KeyboardInterrupt):
        _broken_off()
    assert _workers() == []


def test_the_process_does_every_job_by_its_name() -> None:
    assert set(JOBS) == set(get_args(client.Job))
    config = make_config("llama-3.2-1b", layers=2, vocab_size=512)
    with PlannerProcess() as planner:
        assert planner.ask("count_parameters", config) == JOBS["count_parameters"](config)
        with pytest.raises(ModelError, match="expert a computes differently from the base"):
            planner.ask("require_same_config", "a", config, config | {"rms_norm_eps": 1e-3})


def test_what_a_cached_plan_needs_loads_no_torch() -> None:
    modules = "finefit.plan.client, finefit.plan.prepared_data, finefit.plan.stage_costs"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_times_are_those_that_earlier_runs_on_this_card_and_host_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and levers stay, and so does a plan for another card."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = make_forecast(card="H200", step_seconds=2.0, tokens_per_second=100.0, total_seconds=20.0, cost=3.0)
    assert as_measured(found, parse_card("H200")) == found
    keep_step_time(StepTime(card="H200", host=host_here(), predicted_seconds=1.0, measured_seconds=1.5))
    now = as_measured(found, parse_card("H200"))
    assert (now.step_seconds, now.total_seconds, now.cost) == (3.0, 30.0, 4.5)
    assert now.tokens_per_second == pytest.approx(100 / 1.5)
    assert "1.50 x the prediction" in now.notes[-1]
    assert (now.peak_bytes, now.levers) == (found.peak_bytes, found.levers)
    other = replace(found, card="L4")
    assert as_measured(other, parse_card("L4")) == other


def test_a_plan_for_this_machine_takes_the_times_of_what_it_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor, or the card that CUDA_VISIBLE_DEVICES names first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _has_cards(monkeypatch, "NVIDIA L4", "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    for card, measured in (("H200", 1.5), ("L4", 4.0)):
        keep_step_time(StepTime(card=card, host=host_here(), predicted_seconds=1.0, measured_seconds=measured))
    for card, seconds in (("auto", 3.0), ("24GiB", 3.0)):
        assert as_measured(make_forecast(card="H200", step_seconds=2.0), parse_card(card)).step_seconds == seconds
    on_processor = make_forecast(card="cpu", step_seconds=2.0)
    assert as_measured(on_processor, parse_card("cpu")) == on_processor
