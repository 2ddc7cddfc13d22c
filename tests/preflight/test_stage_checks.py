"""What speaks against a pipeline before its first stage begins, each told with the stage it is of."""

from typing import Any

import pytest

from finefit.artifacts.forecasts import Room, StageOutlook
from finefit.artifacts.records import Finding
from finefit.pipeline.outlines import copies_in
from finefit.preflight.stages import Whole, examine_stages, of_stage
from finefit.spec.load import parse_any
from finefit.spec.stages import BuildMoe, Pipeline
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
GATE = f"  gate: {{kind: gate, base: {{kind: folder, path: m}}, experts: {BOTH}, data: {{law: {{path: a}}, thin: {{path: b}}}}}}\n"
MIX = "  mix: {{kind: build_moe, base: {{kind: folder, path: m}}, experts: {experts}{more}}}\n"
TWO = "{a: {kind: stage, name: law}, b: {kind: folder, path: m}, c: {kind: stage, name: law}}"


def found(stages: str, **changes: Any) -> list[tuple[str | None, str, str]]:
    """Stage, level, problem."""
    pipeline = parse_any(HEAD + stages, where="spec.yaml")
    assert isinstance(pipeline, Pipeline)
    copies = {name: copies_in(stage) for name, stage in pipeline.stages.items() if isinstance(stage, BuildMoe)}
    values: dict[str, Any] = {"outlooks": {}, "free_disk_bytes": 100, "host_memory_bytes": 100, "copies": copies}
    named = examine_stages(Whole(pipeline=pipeline, **(values | changes)))
    return [(name, finding.level, finding.problem) for name, finding in named]


def outlook(**changes: Any) -> StageOutlook:
    return StageOutlook(**{"kind": "build_moe", "fits": (True,), **changes})


def test_nothing_speaks_against_a_sound_pipeline() -> None:
    mix = MIX.format(experts="{a: {kind: stage, name: law}, b: {kind: folder, path: m}}", more="")
    merged = "  whole: {kind: merge_adapter, model: {kind: stage, name: thin}}\n"
    scores = SCORES.format(
        models="{law: {kind: stage, name: law}, thin: {kind: stage, name: thin}, g: {kind: stage, name: gate}}"
    )
    table = "  table: {kind: compare, of: [scores]}\n"
    sizes = {"mix": outlook(disk_bytes=60, host_bytes=50), "law": outlook(disk_bytes=40)}
    assert found(mix + merged + GATE + scores + table, outlooks=sizes) == []


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
    assert "3 slots hold 2 distinct models, so the build will refuse them: the mean would lean" in problem


@pytest.mark.parametrize("expert", ["a", "b"])
def test_copies_beside_the_one_expert_that_is_kept_are_no_mistake(expert: str) -> None:
    assert found(MIX.format(experts=TWO, more=f", router: {{kind: select_one, expert: {expert}}}")) == []


def test_the_disk_is_judged_for_all_stages_together() -> None:
    ((name, level, problem),) = found("", outlooks={"law": outlook(disk_bytes=60), "thin": outlook(disk_bytes=41)})
    assert (name, level) == (None, "error")
    assert problem == "the stages leave up to 101 bytes on the disk (law 60, thin 41), 100 are free"


@pytest.mark.parametrize(("needed", "level"), [(101, "error"), (95, "warning")])
def test_host_memory_is_judged_for_what_is_made(needed: int, level: str) -> None:
    ((name, said, problem),) = found(
        "", outlooks={"law": outlook(host_bytes=needed), "thin": outlook(host_bytes=999, forecasts=(make_forecast(),))}
    )
    assert (name, said) == ("law", level)
    assert f"needs {needed} bytes of host memory, the machine has 100" in problem


def test_a_card_that_cannot_hold_what_is_looked_at_is_an_error_of_its_own() -> None:
    ((name, level, problem),) = found(
        "", outlooks={"law": outlook(host_bytes=90, fits=(False,)), "thin": outlook(host_bytes=90)}
    )[:1]
    assert (name, level) == ("law", "error")
    assert "has more bytes than the card" in problem
    ((_, _, problem),) = found("", outlooks={"law": outlook(host_bytes=101, fits=(False,))})
    assert "host memory" in problem


def test_a_model_that_cannot_answer_one_by_one_is_an_error() -> None:
    large, small = (Room(rows=1, tokens=9, reserved_bytes=1, held_bytes=held, budget_bytes=20) for held in (21, 20))
    ((name, level, problem),) = found(
        "", outlooks={"law": outlook(rooms=({"base": {"rouge": small}, "sft": {"rouge": large}},))}
    )
    assert (name, level) == ("law", "error")
    assert problem.startswith("sft needs 21 bytes to answer rouge one by one, the device has 20")


def test_files_that_are_missing_are_errors_and_those_to_come_are_notes() -> None:
    told = found("", missing={"law": ("x.jsonl",)}, to_come={"thin": ("stage://law/a", "stage://law/b")})
    assert told[0] == ("law", "error", "x.jsonl is not there")
    assert told[1][:2] == ("thin", "note")
    assert "stage://law/a, stage://law/b are yet to be made" in told[1][2]


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
    assert of_stage("dpo", Finding(level="error", problem="", remedy=remedy)).remedy == named
