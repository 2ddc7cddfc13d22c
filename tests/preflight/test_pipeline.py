"""What speaks against a pipeline before its first stage begins, each told with the stage it is of."""

from typing import Any

import pytest

from finefit.artifacts.forecasts import EvalBatchLimit, Forecast, StageForecast
from finefit.artifacts.records import Finding, Levers
from finefit.preflight.pipeline import PipelineFacts, check_facts, with_stage_keys
from finefit.preflight.training import TrainingFacts
from finefit.spec.load import parse_any
from finefit.spec.pipeline import Pipeline
from finefit.spec.schema import Spec
from tests.forecasts import make_forecast

HEAD = """\
name: staged
defaults: {data: {train: [{path: a.jsonl}]}, optimizer: {lr: 1e-3}}
stages:
  law: {kind: train, model: {kind: folder, path: m}, tuning: {kind: subset, trainable: [layers.*.mlp]}}
  thin: {kind: train, model: {kind: folder, path: m}, tuning: {kind: lora}}
"""
SCORES = (
    "  scores: {{kind: evaluate, models: {models}, data: {{test: {{path: t.jsonl}}}}, evaluate: [{{task: rouge}}]}}\n"
)
BOTH = "{law: {kind: stage, name: law}, thin: {kind: stage, name: thin}}"
GATE = (
    f"  gate: {{kind: gate, base: {{kind: folder, path: m}}, experts: {BOTH}, data: {{law: {{path: a}}, thin: "
    f"{{path: b}}}}}}\n"
)
MIX = "  mix: {{kind: build_moe, base: {{kind: folder, path: m}}, experts: {experts}{more}}}\n"
TWO = "{a: {kind: stage, name: law}, b: {kind: folder, path: m}, c: {kind: stage, name: law}}"


def pipeline_of(stages: str) -> Pipeline:
    pipeline = parse_any(HEAD + stages, where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    return pipeline


FLAT: dict[str, Any] = {
    "name": "flat",
    "model": {"kind": "folder", "path": "m"},
    "tuning": {"kind": "lora"},
    "data": {"train": ({"path": "a.jsonl"},)},
    "optimizer": {"lr": 1e-4},
}


def found(stages: str, **changes: Any) -> list[tuple[str | None, str, str]]:
    """Stage, level, problem."""
    values: dict[str, Any] = {"costs": {}, "free_disk_bytes": 100, "host_memory_bytes": 100}
    named = check_facts(PipelineFacts(pipeline=pipeline_of(stages), **(values | changes)))
    return [(name, finding.level, finding.problem) for name, finding in named]


def costs(**changes: Any) -> StageForecast:
    return StageForecast(**{"kind": "build_moe", "fits": (True,), **changes})


def test_nothing_speaks_against_a_sound_pipeline() -> None:
    mix = MIX.format(experts="{a: {kind: stage, name: law}, b: {kind: folder, path: m}}", more="")
    merged = "  whole: {kind: merge_adapter, model: {kind: stage, name: thin}}\n"
    scores = SCORES.format(
        models="{law: {kind: stage, name: law}, thin: {kind: stage, name: thin}, g: {kind: stage, name: gate}}"
    )
    table = "  table: {kind: compare, of: [scores]}\n"
    sizes = {"mix": costs(disk_bytes=60, host_bytes=50), "law": costs(disk_bytes=40)}
    assert found(mix + merged + GATE + scores + table, costs=sizes) == []


def test_copies_that_the_build_would_refuse_are_told_now() -> None:
    ((name, level, problem),) = found(MIX.format(experts=TWO, more=""))
    assert (name, level) == ("mix", "error")
    assert "3 slots hold 2 distinct models, so the build will refuse them" in problem


def test_copies_that_will_be_collapsed_are_no_mistake() -> None:
    assert found(MIX.format(experts=TWO, more=", copies: collapse")) == []
    assert found(MIX.format(experts=TWO, more=", merge: average, copies: collapse")) == []


def test_copies_in_a_mean_are_told_now_too() -> None:
    ((name, level, problem),) = found(MIX.format(experts=TWO, more=", merge: average"))
    assert (name, level) == ("mix", "error")
    assert "3 slots hold 2 distinct models, so the build will refuse them" in problem


@pytest.mark.parametrize("expert", ["a", "b"])
def test_copies_beside_the_one_expert_that_is_kept_are_no_mistake(expert: str) -> None:
    assert found(MIX.format(experts=TWO, more=f", router: {{kind: select_one, expert: {expert}}}")) == []


def test_the_disk_is_judged_for_all_stages_together() -> None:
    ((name, level, problem),) = found("", costs={"law": costs(disk_bytes=60), "thin": costs(disk_bytes=41)})
    assert (name, level) == (None, "error")
    assert problem == "the run takes up to 101 bytes of disk (law 60, thin 41), but 100 are free"


@pytest.mark.parametrize(("needed", "level"), [(90, None), (91, "warning"), (100, "warning"), (101, "error")])
@pytest.mark.parametrize("forecasts", [(), (make_forecast(),)])
def test_host_memory_must_hold_every_stage_with_something_to_spare(
    needed: int, level: str | None, forecasts: tuple[Forecast, ...]
) -> None:
    reported = found("", costs={"law": costs(host_bytes=needed, forecasts=forecasts), "thin": costs(host_bytes=1)})
    assert [(name, said) for name, said, _ in reported] == ([] if level is None else [("law", level)])
    assert all(f"{needed} bytes of host memory, but the machine has 100" in problem for _, _, problem in reported)


def test_giving_up_offload_is_the_remedy_where_the_host_is_full() -> None:
    for offload in (True, False):
        forecast = make_forecast(levers=Levers(micro_batch=2, recompute=2, offload=offload))
        sizes = {"law": costs(host_bytes=200, forecasts=(forecast,))}
        facts = PipelineFacts(pipeline=pipeline_of(""), costs=sizes, free_disk_bytes=1, host_memory_bytes=100)
        ((_, finding),) = check_facts(facts)
        assert ("--set stages.law.levers.offload=none" in finding.remedy) is offload


@pytest.mark.parametrize("keep", [1, 3])
def test_fewer_checkpoints_are_a_remedy_for_a_full_disk(keep: int) -> None:
    spec = Spec.model_validate({**FLAT, "save": {"keep": keep}})
    facts = PipelineFacts(
        pipeline=Pipeline.of(spec),
        costs={"sft": costs(disk_bytes=500)},
        free_disk_bytes=499,
        host_memory_bytes=1,
        trainings={"sft": TrainingFacts(spec=spec, forecast=make_forecast(total_steps=100))},
    )
    found = [finding for _, finding in check_facts(facts) if "500 bytes of disk, but 499 are free" in finding.problem]
    assert [finding.remedy.startswith("free 1 bytes") for finding in found] == [True]
    assert ("save.keep (now 3)" in found[0].remedy) is (keep == 3)


def test_a_card_that_cannot_hold_what_is_looked_at_is_an_error_of_its_own() -> None:
    ((name, level, problem),) = found(
        "", costs={"law": costs(host_bytes=90, fits=(False,)), "thin": costs(host_bytes=90)}
    )[:1]
    assert (name, level) == ("law", "error")
    assert "is larger than the card's memory" in problem
    ((_, _, problem),) = found("", costs={"law": costs(host_bytes=101, fits=(False,))})
    assert "host memory" in problem


def test_a_model_that_cannot_answer_one_by_one_is_an_error() -> None:
    large, small = (
        EvalBatchLimit(rows=1, tokens=9, reserved_bytes=1, held_bytes=held, budget_bytes=20) for held in (21, 20)
    )
    ((name, level, problem),) = found(
        "", costs={"law": costs(eval_limits=({"base": {"rouge": small}, "sft": {"rouge": large}},))}
    )
    assert (name, level) == ("law", "error")
    assert problem.startswith("sft needs 21 bytes to answer rouge one by one, but the device has 20")


def test_files_that_are_missing_are_errors_and_those_to_come_are_notes() -> None:
    told = found("", missing={"law": ("x.jsonl",)}, not_made_yet={"thin": ("stage://law/a", "stage://law/b")})
    assert told[0] == ("law", "error", "x.jsonl does not exist")
    assert told[1][:2] == ("thin", "note")
    assert "stage://law/a, stage://law/b are not made yet" in told[1][2]


@pytest.mark.parametrize(
    ("remedy", "named"),
    [
        ("--set schedule.warmup=0, or more steps", "--set stages.dpo.schedule.warmup=0, or more steps"),
        (
            "--set 'tuning={kind: lora}' --set levers.offload=none",
            "--set 'stages.dpo.tuning={kind: lora}' --set stages.dpo.levers.offload=none",
        ),
        ("--set validate.every='3 steps'", "--set stages.dpo.validate.every='3 steps'"),
        ("--set precision=auto", "--set precision=auto"),
        ("--set stages.sft.tuning.rank=2", "--set stages.sft.tuning.rank=2"),
    ],
)
def test_a_remedy_names_the_keys_of_its_stage(remedy: str, named: str) -> None:
    finding = Finding(level="error", problem="", remedy=remedy)
    assert with_stage_keys(pipeline_of(""), "dpo", finding).remedy == named
    assert with_stage_keys(Pipeline.of(Spec.model_validate(FLAT)), "dpo", finding).remedy == remedy
