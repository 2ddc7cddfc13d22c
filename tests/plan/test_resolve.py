"""Every value that a run acts on is in the plan, with where it came from."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from finefit.artifacts.forecasts import Resolved
from finefit.artifacts.records import Inputs, Levers
from finefit.artifacts.stage_records import Stage
from finefit.errors import SpecError
from finefit.facts.machine import Machine
from finefit.plan.resolve import leaves, make_stage, resolve
from finefit.spec.load import parse_spec
from finefit.spec.schema import Ddp, DeepSpeed, Engine, Fsdp2, Spec
from tests.conftest import SPEC
from tests.forecasts import make_forecast

MACHINE = Machine(
    host="invented",
    platform="Linux",
    python="3.11",
    cpu_model="EPYC",
    num_cores=4,
    memory_bytes=2**34,
    cards=(),
    cards_problem=None,
    versions={},
)
MINIMAL = """
name: minimal
model: {kind: embedded, name: smollm2-135m}
tuning: {kind: full}
data: {train: [{path: train.jsonl}]}
optimizer: {lr: 1e-3}
"""
HUB = """
name: hub
model: {kind: hub, id: owner/name}
tuning: {kind: lora, targets: [q_proj, v_proj]}
data: {train: [{path: a.jsonl}, {path: b.jsonl}], test: {path: t.jsonl}}
optimizer: {lr: 1e-3, clip: null}
schedule: {steps: 9}
levers: {micro_batch: auto}
validate: {every: epoch}
on_nan: {kind: roll_back}
evaluate: [{task: exact_match}, {task: json_match, limit: 3}]
"""
FREE = ("config", "template_options", "fields", "where")
"""Mappings that are shown as a whole."""


def _resolve(
    text: str, *overrides: str, num_rows: int = 22, machine: Machine = MACHINE, **predicted: Any
) -> dict[str, Resolved]:
    spec, forecast = parse_spec(text, where="spec.yaml", overrides=overrides), make_forecast(**predicted)
    return resolve(spec, overrides=overrides, machine=machine, num_rows=num_rows, forecast=forecast)


def _keys(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Of the spec as JSON: every value that is not a mapping with keys of the schema's."""
    for key, value in document.items():
        if isinstance(value, dict) and key not in FREE:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("text", [SPEC, MINIMAL, HUB])
def test_no_value_of_the_schema_misses_its_source(text: str) -> None:
    spec = parse_spec(text, where="spec.yaml")
    wanted = set(_keys(spec.model_dump(mode="json", by_alias=True)))
    assert {key for key, _, _ in leaves(spec)} == wanted
    values = _resolve(text)
    assert wanted <= values.keys()
    assert all(resolved.source.strip() for resolved in values.values())


def test_the_top_of_the_schema_is_covered_too() -> None:
    tops = {field.alias or name for name, field in Spec.model_fields.items()}
    assert {key.split(".")[0] for key in _resolve(SPEC)} >= tops


@pytest.mark.parametrize("key", ["schedule.epochs", "save.every", "evaluate", "tuning.rank"])
def test_a_value_from_the_spec_says_so(key: str) -> None:
    assert _resolve(SPEC)[key].source == "spec"


@pytest.mark.parametrize(
    "key",
    ["optimizer.weight_decay", "data.max_tokens", "on_nan.kind", "validate.every", "objective.kind", "deterministic"],
)
def test_a_value_that_nobody_asked_for_is_a_default(key: str) -> None:
    assert _resolve(SPEC)[key].source == "default"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=8", "seed", 8),
        ("save={every: epoch}", "save.every", "epoch"),
    ],
)
def test_an_override_is_the_source_of_its_value(override: str, key: str, value: object) -> None:
    assert _resolve(SPEC, override)[key] == Resolved(value=value, source="--set")


def test_the_sources_are_those_that_the_user_wrote() -> None:
    train = [{"path": "train.jsonl", "fields": {}, "weight": 1.0, "where": {}}]
    assert _resolve(SPEC)["data.train"] == Resolved(value=train, source="spec")
    train = [{"path": "a.csv", "fields": {"prompt": "ask"}, "weight": 2.0, "limit": 9, "where": {}}]
    assert (
        _resolve(SPEC, "data.train=[{path: a.csv, fields: {prompt: ask}, weight: 2, limit: 9}]")["data.train"].value
        == train
    )


def test_a_cpu_that_was_asked_for_computes_in_fp32() -> None:
    values = _resolve(SPEC)
    assert values["device"] == Resolved(value="cpu", source="spec")
    assert values["precision"].value == "fp32"
    assert values["precision"].source.startswith("auto: ")
    assert 1 <= values["threads"].value <= MACHINE.num_cores


def test_auto_without_a_card_is_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _resolve(MINIMAL)["device"] == Resolved(value="cpu", source="auto: torch finds no CUDA device")
    mac = replace(MACHINE, platform="macOS-15.6-arm64-arm-64bit")
    unused = "auto: torch finds no CUDA device, and Apple's GPU (MPS) is not used"
    assert _resolve(MINIMAL, machine=mac)["device"] == Resolved(value="cpu", source=unused)


def test_cuda_that_is_not_there_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match=r"device: cuda is requested, but torch .* \(the driver shows no card\)"):
        _resolve(MINIMAL, "device=cuda")


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_card_is_bf16_or_where_it_has_none_fp16(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, precision: str
) -> None:
    _with_card(monkeypatch, has_bf16=has_bf16)
    found = _resolve(MINIMAL)["precision"]
    assert found.value == precision
    assert "a card" in found.source


def test_fp16_is_kept_where_it_was_asked_for_and_bf16_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _with_card(monkeypatch, has_bf16=False)
    assert _resolve(MINIMAL, "precision=fp16")["precision"] == Resolved(value="fp16", source="--set")
    with pytest.raises(SpecError, match="precision: bf16 is requested, but a card"):
        _resolve(MINIMAL, "precision=bf16")


def _with_card(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)


# the engine


def test_an_engine_that_is_free_comes_from_the_forecast_with_its_reason() -> None:
    chosen = Ddp(kind="ddp", devices=4)
    values = _resolve(SPEC, engine=chosen, devices=4, reasons={"engine": "a whole copy fits"})
    assert values["engine.kind"] == Resolved(value="ddp", source="a whole copy fits")
    assert values["engine.devices"] == Resolved(value=4, source="a whole copy fits")
    alone = _resolve(SPEC, reasons={"engine": "one device"})
    assert (alone["engine.kind"].value, alone["engine.devices"].value) == ("single", 1)


def test_an_engine_that_was_named_keeps_its_source() -> None:
    values = _resolve(SPEC, "engine={kind: fsdp2, devices: 2}", engine=Fsdp2(kind="fsdp2", devices=2), devices=2)
    assert values["engine.kind"] == Resolved(value="fsdp2", source="--set")
    assert values["engine.devices"] == Resolved(value=2, source="--set")


@pytest.mark.parametrize(("devices", "micro", "accumulation"), [(2, 2, 4), (4, 4, 1), (3, 2, 3)])
def test_each_process_accumulates_its_own_part(devices: int, micro: int, accumulation: int) -> None:
    values = _resolve(
        SPEC, "levers=auto", "global_batch=16", num_rows=100, levers=Levers(micro_batch=micro), devices=devices
    )
    assert values["accumulation"] == Resolved(value=accumulation, source=f"16 rows / {micro} micro x {devices} devices")


def _stage(*overrides: str, engine: Engine) -> Stage:
    spec, forecast = parse_spec(SPEC, where="spec.yaml", overrides=overrides), make_forecast(engine=engine, devices=2)
    values = resolve(spec, overrides=overrides, machine=MACHINE, num_rows=22, forecast=forecast)
    inputs = Inputs(data={}, model="m", model_fingerprint="f", template_sha256="t")
    return make_stage(spec, values, inputs=inputs, forecast=forecast, num_rows=22, prepared={})


def test_a_stage_names_the_engine_that_auto_came_to() -> None:
    chosen = Fsdp2(kind="fsdp2", devices=2)
    assert _stage("engine={kind: auto, devices: 2}", engine=chosen).engine == chosen


def test_a_stage_keeps_the_engine_whose_paths_start_at_the_run() -> None:
    """The forecast was made beside the spec file, and the file of DeepSpeed's is named from there."""
    predicted = DeepSpeed(kind="deepspeed", devices=2, config="own.json")
    stage = _stage("engine={kind: deepspeed, devices: 2, config: ../../own.json}", engine=predicted)
    assert stage.engine == DeepSpeed(kind="deepspeed", devices=2, config="../../own.json")


def test_what_an_engine_cannot_divide_is_refused_before_anything_starts() -> None:
    with pytest.raises(SpecError, match=r"tuning\.base_bits 4"):
        _stage("engine={kind: fsdp2, devices: 2}", "tuning.base_bits=4", engine=Fsdp2(kind="fsdp2", devices=2))


@pytest.mark.parametrize(
    ("overrides", "num_rows", "per_epoch", "total", "source"),
    [
        ((), 22, 6, 12, "2 epochs x 6 steps"),
        (("schedule.epochs=1",), 24, 6, 6, "1 epoch x 6 steps"),
        (("schedule={steps: 5}",), 22, 6, 5, "schedule.steps"),
        (("schedule={warmup: 0.1}",), 22, 6, 6, "1 epoch x 6 steps"),
        (("global_batch=64",), 22, 1, 2, "2 epochs x 1 steps"),
    ],
)
def test_the_length_of_a_run_and_where_it_comes_from(
    overrides: tuple[str, ...], num_rows: int, per_epoch: int, total: int, source: str
) -> None:
    values = _resolve(SPEC, *overrides, num_rows=num_rows)
    assert values["steps_per_epoch"].value == per_epoch
    assert values["total_steps"] == Resolved(value=total, source=source)


def test_a_warm_up_in_steps_is_taken_as_it_is() -> None:
    assert _resolve(SPEC, "schedule.warmup=5")["warmup_steps"] == Resolved(value=5, source="schedule.warmup")


@pytest.mark.parametrize(("share", "steps"), [("0", 0), ("0.1", 2), ("0.5", 6), ("0.99", 12)])
def test_the_warm_up_is_a_share_of_all_steps_rounded_up(share: str, steps: int) -> None:
    values = _resolve(SPEC, f"schedule.warmup={share}")
    assert values["warmup_steps"] == Resolved(value=steps, source=f"{share} of 12 steps, rounded up")


LEVERS = Levers(micro_batch=2, recompute=1, loss_chunk=256, adapter_inputs="bf16")
REASONS = {
    "micro_batch": "the fastest of those that fit",
    "recompute": "the fewest that fit",
    "loss_chunk": "no room for more",
}


@pytest.mark.parametrize("text", [MINIMAL, HUB])
def test_a_lever_that_is_free_comes_from_the_forecast_with_its_reason(text: str) -> None:
    values = _resolve(text, levers=LEVERS, reasons=REASONS)
    assert values["levers.micro_batch"] == Resolved(value=2, source=REASONS["micro_batch"])
    assert values["levers.recompute"] == Resolved(value=1, source=REASONS["recompute"])
    assert values["levers.loss_chunk"] == Resolved(value=256, source=REASONS["loss_chunk"])
    assert values["levers.adapter_inputs"] == Resolved(value="bf16", source="auto")


@pytest.mark.parametrize(
    ("overrides", "source"),
    [((), "spec"), (("levers.micro_batch=2",), "--set"), (("levers={micro_batch: 2}",), "--set")],
)
def test_a_lever_that_the_user_has_fixed_keeps_its_source(overrides: tuple[str, ...], source: str) -> None:
    values = _resolve(SPEC, *overrides, levers=LEVERS, reasons=REASONS | {"micro_batch": "requested"})
    assert values["levers.micro_batch"] == Resolved(value=2, source=source)
    assert values["levers.recompute"].source == REASONS["recompute"]


def test_words_for_a_lever_become_what_the_step_is_told() -> None:
    values = _resolve(
        SPEC, "levers.recompute=all", "levers.offload=inputs", levers=Levers(micro_batch=2, recompute=2, offload=True)
    )
    assert values["levers.recompute"] == Resolved(value=2, source="--set")
    assert values["levers.offload"] == Resolved(value=True, source="--set")


@pytest.mark.parametrize(
    ("global_batch", "num_rows", "micro", "accumulation"),
    [(16, 100, 4, 4), (16, 100, 3, 6), (3, 100, 3, 1), (16, 2, 2, 1)],
)
def test_micro_batches_are_accumulated_up_to_the_global_batch(
    global_batch: int, num_rows: int, micro: int, accumulation: int
) -> None:
    values = _resolve(
        SPEC, "levers=auto", f"global_batch={global_batch}", num_rows=num_rows, levers=Levers(micro_batch=micro)
    )
    assert values["accumulation"].value == accumulation
    assert values["accumulation"].source == f"{min(global_batch, num_rows)} rows / {micro} micro x 1 device"


def test_a_micro_batch_that_was_asked_too_large_says_what_became_of_it() -> None:
    found = _resolve(SPEC, "levers.micro_batch=16", levers=Levers(micro_batch=4))["levers.micro_batch"]
    assert found == Resolved(value=4, source="--set requests 16, but a step has only 4 rows")


def test_resolving_leaves_the_spec_as_it_is() -> None:
    spec = parse_spec(SPEC, where="spec.yaml")
    before = spec.model_dump_json()
    resolve(spec, overrides=(), machine=MACHINE, num_rows=22, forecast=make_forecast())
    assert spec.model_dump_json() == before
