"""Invented forecasts: each finding comes and goes with the values that it is about."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.forecasts import Forecast, GradientMap, Lengths, Suggestion
from finefit.artifacts.records import Finding, Levers
from finefit.errors import MissingPackage, SpecError
from finefit.preflight import LEVELS
from finefit.preflight.training import (
    CHECKS,
    TrainingFacts,
    adapter_is_servable,
    check_training,
    engine_supports_the_spec,
    every_process_has_rows,
    gradients_reach_every_trained_tensor,
    memory_fits,
    model_has_weights,
    optimizer_can_update,
    precision_suits_the_device,
    require_packages,
    run_is_long_enough,
    trackers_are_installed,
)
from finefit.spec.schema import Ddp, DeepSpeed, Engine, Fsdp2, Spec

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "folder", "path": "model"},
    "tuning": {"kind": "lora"},
    "data": {"train": ({"path": "train.jsonl"},), "validation": {"path": "validation.jsonl"}},
    "optimizer": {"lr": 1e-4},
    "schedule": {"epochs": 1},
    "global_batch": 10,
    "save": {"every": "20 steps", "keep": 3},
}
FORECAST = Forecast(
    card="RTX 3060",
    devices=1,
    fits=True,
    budget_bytes=12_000,
    peak_bytes=9_000,
    allocated_bytes=7_000,
    reserved_bytes=8_000,
    context_bytes=700,
    margin_bytes=300,
    peak_instant="backward",
    peak_module="model.layers.1.mlp",
    peak_operation="aten::mm",
    components={"weights": 7_000},
    instants={"backward": 7_000},
    levers=Levers(micro_batch=2),
    reasons={},
    accumulation=5,
    tokens_per_step=1_000.0,
    step_seconds=1.0,
    tokens_per_second=1_000.0,
    total_steps=100,
    total_seconds=100.0,
    price_per_hour=None,
    cost=None,
    flops_per_step=1e9,
    host_bytes=800,
    disk_bytes=500,
    parameters=1_000,
    trainable_parameters=10,
    lengths=Lengths(num_rows=1_000, longest=20, mean=10.0, supervised=5, mean_supervised=3.0, source="counted"),
    gradients=GradientMap(trainable=4, reached=4, unreached=()),
    suggestions=(),
    notes=(),
)
SOUND = TrainingFacts(spec=Spec.model_validate(SPEC), forecast=FORECAST)


def suggestion(*changes: str, fits: bool) -> Suggestion:
    return Suggestion(
        changes=changes, saves_bytes=4_000, peak_bytes=11_000, fits=fits, is_exact=True, price="9 % slower"
    )


def forecasting(**changes: Any) -> TrainingFacts:
    return replace(SOUND, forecast=replace(FORECAST, **changes))


def asking(*, total_steps: int | None = 100, **changes: Any) -> TrainingFacts:
    forecast = replace(FORECAST, total_steps=total_steps)
    return TrainingFacts(spec=Spec.model_validate({**SPEC, **changes}), forecast=forecast)


def only(check: Callable[[TrainingFacts], Iterator[Finding]], preparation: TrainingFacts) -> Finding:
    (finding,) = check(preparation)
    return finding


def test_a_sound_run_has_no_findings() -> None:
    assert check_training(SOUND) == ()


# gradients


def test_a_trained_tensor_without_a_gradient_stops_the_run_with_its_cause() -> None:
    gradients = GradientMap(
        trainable=4,
        reached=2,
        unreached=("tower.0.lora_A", "tower.1.lora_A"),
        causes=("tower: gets no input", "q: is unused"),
    )
    finding = only(gradients_reach_every_trained_tensor, forecasting(gradients=gradients))
    assert finding.level == "error"
    assert finding.problem == "no gradient reaches 2 of 4 trained tensors: tower.{0..1}.lora_A"
    assert finding.remedy == "tower: gets no input. q: is unused"


def test_a_missing_gradient_without_a_known_cause_still_has_a_remedy() -> None:
    finding = only(
        gradients_reach_every_trained_tensor,
        forecasting(gradients=GradientMap(trainable=4, reached=3, unreached=("q",))),
    )
    assert "tuning.targets" in finding.remedy


def test_an_adapter_that_is_frozen_stops_the_run_though_no_gradient_is_missing() -> None:
    frozen = ("layers.{0..1}.up_proj.lora_B.default.weight", "head.lora_A.default.weight")
    preparation = forecasting(gradients=GradientMap(trainable=4, reached=4, unreached=(), frozen=frozen))
    finding = only(gradients_reach_every_trained_tensor, preparation)
    assert finding.level == "error"
    assert all(name in finding.problem for name in frozen)
    assert "requires_grad" in finding.remedy


# memory


def test_too_little_memory_names_both_sizes_and_the_first_change_that_fits() -> None:
    suggestions = (
        suggestion("levers.micro_batch=1", fits=False),
        suggestion("levers.micro_batch=1", "levers.recompute=all", fits=True),
        suggestion("tuning.base_bits=4", fits=True),
    )
    finding = only(memory_fits, forecasting(fits=False, peak_bytes=15_000, suggestions=suggestions))
    assert finding.level == "error"
    assert "15,000" in finding.problem
    assert "RTX 3060 has 12,000" in finding.problem
    assert "backward in model.layers.1.mlp" in finding.problem
    assert finding.remedy == "--set levers.micro_batch=1 --set levers.recompute=all (11,000 bytes; 9 % slower)"


def test_a_change_with_spaces_can_be_pasted_into_a_shell() -> None:
    finding = only(memory_fits, forecasting(fits=False, suggestions=(suggestion("save.every=3 steps", fits=True),)))
    assert finding.remedy.startswith("--set 'save.every=3 steps' ")


def test_where_no_change_fits_a_larger_card_is_the_remedy() -> None:
    finding = only(
        memory_fits,
        forecasting(fits=False, peak_module="", suggestions=(suggestion("levers.micro_batch=1", fits=False),)),
    )
    assert "(backward)" in finding.problem
    assert "larger card" in finding.remedy
    assert "--set" not in finding.remedy


# the schedule


@pytest.mark.parametrize(
    ("warmup", "total_steps", "is_found"),
    [
        (0.03, 100, False),
        (0.5, 2, False),
        (0.6, 2, True),
        (0.9, 9, True),
        (0.9, 10, False),
        (0.03, 1, False),
        (0.0, 2, False),
        (0.6, None, False),
    ],
)
def test_a_warm_up_as_long_as_the_run_is_an_error(warmup: float, total_steps: int | None, is_found: bool) -> None:
    asked = asking(schedule={"epochs": 1, "warmup": warmup}, save={"every": "1 steps"}, total_steps=total_steps)
    assert [finding.level for finding in run_is_long_enough(asked)] == (["error"] if is_found else [])


@pytest.mark.parametrize(
    ("every", "total_steps", "is_found"),
    [
        ("20 steps", 20, False),
        ("20 steps", 19, True),
        ("20 steps", None, False),
        ("epoch", 100, False),
        ("epoch", 99, True),
        ("900 minutes", 2, False),
    ],
)
def test_a_run_shorter_than_the_time_to_its_first_save_is_told_so(
    every: str, total_steps: int | None, is_found: bool
) -> None:
    findings = list(run_is_long_enough(asking(save={"every": every}, total_steps=total_steps)))
    assert [finding.level for finding in findings] == (["warning"] if is_found else [])
    assert all(f"save.every is {every}, but the run has {total_steps}" in finding.problem for finding in findings)
    assert all("only its end is saved" in finding.problem for finding in findings)


def test_a_run_shorter_than_the_time_to_its_first_validation_is_told_so() -> None:
    finding = only(run_is_long_enough, asking(validate={"every": "101 steps"}))
    assert finding.level == "warning"
    assert finding.problem.startswith("validate.every is 101 steps, but the run has 100")
    assert finding.remedy == "--set validate.every='25 steps'"
    assert list(run_is_long_enough(asking(validate={"every": "100 steps"}))) == []


def test_without_validation_rows_the_time_to_validate_does_not_matter() -> None:
    without_rows = asking(data={"train": ({"path": "train.jsonl"},)}, validate={"every": "101 steps"})
    assert list(run_is_long_enough(without_rows)) == []


def test_fewer_steps_than_an_epoch_are_noted_with_the_share_of_rows_seen() -> None:
    finding = only(run_is_long_enough, asking(schedule={"steps": 25}, total_steps=25))
    assert finding.level == "note"
    assert "250 of 1,000 rows (25.0 %) are seen" in finding.problem
    assert finding.remedy.startswith("--set schedule.steps=100 ")


@pytest.mark.parametrize("schedule", [{"steps": 100}, {"steps": 101}, {"epochs": 1}])
def test_a_whole_epoch_is_not_noted(schedule: dict[str, int]) -> None:
    assert list(run_is_long_enough(asking(schedule=schedule))) == []


def test_rows_that_were_not_counted_are_not_judged() -> None:
    for total_steps in (None, 1):
        unknown = replace(FORECAST, lengths=replace(FORECAST.lengths, num_rows=None), total_steps=total_steps)
        short = replace(asking(schedule={"steps": 1}, save={"every": "epoch"}), forecast=unknown)
        assert check_training(short) == ()


# what was asked for


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_moments_of_bitsandbytes_need_a_card(kind: str) -> None:
    found = asking(optimizer={"lr": 1e-4, "kind": kind})
    assert [f.problem for f in optimizer_can_update(on_cpu(found))] == [f"optimizer.kind {kind} needs a CUDA device"]
    assert list(optimizer_can_update(found)) == []
    assert list(optimizer_can_update(on_cpu(SOUND))) == []


def on_cpu(found: TrainingFacts) -> TrainingFacts:
    return replace(found, forecast=replace(found.forecast, card="cpu"))


@pytest.mark.parametrize(
    ("changes", "package", "key"),
    [
        ({"tuning": {"kind": "lora", "base_bits": 4}}, "bitsandbytes", "tuning.base_bits"),
        ({"tuning": {"kind": "lora", "base_bits": 8}}, "bitsandbytes", "tuning.base_bits"),
        ({"optimizer": {"lr": 1e-4, "kind": "paged_adamw"}}, "bitsandbytes", "optimizer.kind paged_adamw"),
        ({"engine": {"kind": "deepspeed", "devices": 2}}, "deepspeed", "engine.kind deepspeed"),
        ({"launcher": {"kind": "slurm"}}, "submitit", "launcher.kind slurm"),
        ({"evaluate": ({"task": {"kind": "lm_eval", "tasks": ("arc_easy",)}},)}, "lm-eval", "evaluate lm_eval"),
    ],
)
def test_a_package_that_the_spec_asks_for_must_be_there(changes: dict[str, Any], package: str, key: str) -> None:
    found = asking(**changes)
    require_packages(found)
    require_packages(replace(SOUND, absent=frozenset({package})))
    with pytest.raises(MissingPackage) as missing:
        require_packages(replace(found, absent=frozenset({package})))
    assert missing.value.problem == f"{key} needs {package}, which is not installed"
    assert "pip install" in missing.value.remedy
    assert missing.value.exit_code == 2


def test_all_packages_that_are_missing_are_named_at_once() -> None:
    found = asking(tuning={"kind": "lora", "base_bits": 4}, launcher={"kind": "slurm"})
    with pytest.raises(MissingPackage) as missing:
        require_packages(replace(found, absent=frozenset({"bitsandbytes", "submitit"})))
    assert len(missing.value.problem.splitlines()) == len(missing.value.remedy.splitlines()) == 2


def test_fused_kernels_on_a_card_of_this_machine_need_liger() -> None:
    fused = replace(forecasting(levers=Levers(micro_batch=2, kernels="fused")), absent=frozenset({"liger-kernel"}))
    with pytest.raises(MissingPackage) as missing:
        require_packages(fused)
    assert missing.value.problem == "levers.kernels fused needs liger-kernel, which is not installed"
    assert "levers.kernels=torch" in missing.value.remedy
    require_packages(on_cpu(fused))


# the engine


FSDP2, ZERO2 = Fsdp2(kind="fsdp2", devices=2), DeepSpeed(kind="deepspeed", devices=2)


@pytest.mark.parametrize(
    ("engine", "levers", "asked", "said", "remedy"),
    [
        (
            Ddp(kind="ddp", devices=2),
            {"update": "inside"},
            {},
            "levers.update inside",
            "--set levers.update=after",
        ),
        (FSDP2, {}, {"tuning": {"kind": "lora", "base_bits": 4}}, "tuning.base_bits 4", "ddp"),
        (
            ZERO2,
            {},
            {"optimizer": {"lr": 1e-4, "kind": "adamw_8bit"}},
            "optimizer.kind adamw_8bit",
            "optimizer.kind=adamw",
        ),
    ],
)
def test_what_the_engine_of_the_forecast_would_refuse_is_found_before_the_run(
    engine: Engine, levers: dict[str, Any], asked: dict[str, Any], said: str, remedy: str
) -> None:
    found = replace(asking(**asked), forecast=replace(FORECAST, engine=engine, levers=Levers(micro_batch=2, **levers)))
    finding = only(engine_supports_the_spec, found)
    assert finding.level == "error"
    assert finding.problem.startswith(said)
    assert remedy in finding.remedy
    assert finding in check_training(found)


def test_one_process_divides_nothing_so_its_engine_refuses_nothing() -> None:
    assert list(engine_supports_the_spec(asking(tuning={"kind": "lora", "base_bits": 4}))) == []


def with_config(**own: Any) -> TrainingFacts:
    return replace(SOUND, forecast=replace(FORECAST, engine=ZERO2, devices=2, card="2xRTX 3060"), engine_config=own)


def test_a_file_for_deepspeed_that_contradicts_the_spec_is_found_before_the_run() -> None:
    found = with_config(train_batch_size=11, gradient_clipping="auto", fp16={"enabled": True}, steps_per_print=7)
    first, second = engine_supports_the_spec(found)
    assert (first.level, first.problem) == (
        "error",
        "engine.config contradicts the spec: train_batch_size is 11, global_batch is 10",
    )
    assert "fp16.enabled" in second.problem
    assert list(engine_supports_the_spec(with_config(train_batch_size=10, bf16={"enabled": True}))) == []
    assert list(engine_supports_the_spec(replace(found, forecast=FORECAST))) == []  # no file is read by another engine


@pytest.mark.parametrize(
    ("card", "says", "agrees"),
    [("cpu", "bf16", False), ("T4", "fp16", True), ("T4", "bf16", False), ("unknown", "bf16", True)],
)
def test_the_precision_of_a_file_is_held_against_that_of_the_device(card: str, says: str, agrees: bool) -> None:
    found = with_config(**{says: {"enabled": True}})
    found = replace(found, forecast=replace(found.forecast, card=card, devices=1))
    assert (list(engine_supports_the_spec(found)) == []) is agrees


def test_a_file_for_deepspeed_is_read_from_beside_the_spec(tmp_path: Path) -> None:
    """By what `check` and `run` both ask, so before a run directory appears."""
    spec = Spec.model_validate({**SPEC, "engine": {"kind": "deepspeed", "devices": 2, "config": "own.json"}})
    planned = replace(FORECAST, engine=spec.engine, devices=2, card="2xRTX 3060")

    def findings() -> list[str]:
        return [finding.problem for finding in check_training(TrainingFacts.read(spec, planned, tmp_path))]

    with pytest.raises(SpecError, match=r"there is no .*own.json"):
        findings()
    (tmp_path / "own.json").write_text('{"train_batch_size": 11}')
    assert "engine.config contradicts the spec: train_batch_size is 11, global_batch is 10" in findings()


def test_a_tracker_that_is_not_there_does_not_stop_a_run() -> None:
    found = replace(asking(trackers=({"kind": "wandb"}, {"kind": "mlflow"})), absent=frozenset({"wandb"}))
    finding = only(trackers_are_installed, found)
    assert (finding.level, "wandb" in finding.problem) == ("warning", True)


@pytest.mark.parametrize(
    ("card", "devices", "said"), [("RTX 3060", 1, "has bf16"), ("2xRTX 3060", 2, "has bf16"), ("cpu", 1, "slower")]
)
def test_fp16_is_told_what_suits_the_device_better(card: str, devices: int, said: str) -> None:
    found = replace(asking(precision="fp16"), forecast=replace(FORECAST, card=card, devices=devices))
    finding = only(precision_suits_the_device, found)
    assert finding.level == "warning"
    assert said in finding.problem
    assert list(precision_suits_the_device(SOUND)) == []


def test_fp16_is_right_on_a_card_without_bf16() -> None:
    assert (
        list(precision_suits_the_device(replace(asking(precision="fp16"), forecast=replace(FORECAST, card="T4")))) == []
    )


def test_dora_on_packed_weights_is_noted() -> None:
    assert (
        only(precision_suits_the_device, asking(tuning={"kind": "lora", "dora": True, "base_bits": 4})).level == "note"
    )
    assert list(precision_suits_the_device(asking(tuning={"kind": "lora", "dora": True}))) == []


@pytest.mark.parametrize(
    ("tuning", "server"), [({"dora": True}, "vLLM"), ({"rank": 640}, "vLLM"), ({"rank_stabilised": True}, "SGLang")]
)
def test_an_adapter_that_a_server_would_not_load_is_noted(tuning: dict[str, Any], server: str) -> None:
    finding = only(adapter_is_servable, asking(tuning={"kind": "lora", **tuning}))
    assert finding.level == "note"
    assert server in finding.problem
    assert "merged" in finding.remedy
    assert list(adapter_is_servable(asking(tuning={"kind": "lora", "rank": 512}))) == []
    assert list(adapter_is_servable(asking(tuning={"kind": "full"}))) == []


def test_processes_without_rows_are_told() -> None:
    eight = replace(FORECAST, devices=8)
    finding = only(every_process_has_rows, replace(asking(global_batch=6), forecast=eight))
    assert (finding.level, "2 of them only wait" in finding.problem) == ("warning", True)
    assert list(every_process_has_rows(replace(SOUND, forecast=eight))) == []
    few = replace(eight, lengths=replace(FORECAST.lengths, num_rows=3))
    assert "5 of them" in only(every_process_has_rows, replace(SOUND, forecast=few)).problem


@pytest.mark.parametrize(("warmup", "is_told"), [(99, False), (100, True), (101, True), (1, False)])
def test_a_warm_up_in_steps_ends_before_the_run(warmup: int, is_told: bool) -> None:
    assert bool(list(run_is_long_enough(asking(schedule={"steps": 100, "warmup": warmup})))) is is_told


def test_a_shape_cannot_be_trained() -> None:
    shape = asking(model={"kind": "shape", "config": {"model_type": "llama"}})
    assert only(model_has_weights, shape).level == "error"


# all of them


def test_every_check_runs_and_the_gravest_findings_come_first() -> None:
    broken = GradientMap(trainable=1, reached=0, unreached=("q",), frozen=("k.lora_B",))
    forecast = replace(
        FORECAST,
        fits=False,
        total_steps=2,
        gradients=broken,
        accumulation=1,
        devices=16,
        card="cpu",
        engine=ZERO2,
    )
    asked: dict[str, Any] = {
        "model": {"kind": "shape", "config": {"model_type": "llama"}},
        "precision": "fp16",
        "levers": {"update": "inside"},
        "optimizer": {"lr": 1e-4, "kind": "adamw_8bit", "clip": None},
    }
    found = replace(
        asking(
            schedule={"steps": 2, "warmup": 0.9},
            tuning={"kind": "lora", "dora": True, "base_bits": 4},
            trackers=({"kind": "wandb"},),
            **asked,
        ),
        forecast=forecast,
        absent=frozenset({"bitsandbytes", "wandb"}),
        engine_config={"train_batch_size": 11},
    )
    findings = check_training(found)
    levels = [finding.level for finding in findings]
    assert levels == [*["error"] * 9, *["warning"] * 4, *["note"] * 3]
    assert levels == sorted(levels, key=LEVELS.index)
    assert all(list(check(found)) for check in CHECKS)
    with pytest.raises(MissingPackage):
        require_packages(found)


def test_an_update_inside_backward_can_neither_clip_nor_accumulate_nor_take_another_optimizer() -> None:
    inside: dict[str, Any] = {"levers": {"update": "inside"}}
    clipped, split = optimizer_can_update(asking(**inside))  # clip 1.0 is the default, and FORECAST accumulates 5 times
    assert clipped.problem == "levers.update: inside cannot clip, but optimizer.clip is 1"
    assert split.problem == "levers.update: inside needs the whole step in one micro-batch, but it has 5"
    sound = replace(asking(**inside, optimizer={"lr": 1e-4, "clip": None}), forecast=replace(FORECAST, accumulation=1))
    assert list(optimizer_can_update(sound)) == []
    other = replace(
        sound,
        spec=sound.spec.model_copy(
            update={"optimizer": sound.spec.optimizer.model_copy(update={"kind": "adamw_8bit"})}
        ),
    )
    (finding,) = optimizer_can_update(other)
    assert "needs optimizer.kind adamw" in finding.problem
