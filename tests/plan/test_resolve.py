"""Every value that a run acts on is in the plan, with where it came from."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from finefit.artifacts.records import Resolved
from finefit.errors import SpecError
from finefit.facts.machine import Machine
from finefit.plan.resolve import leaves, resolve
from finefit.spec.load import parse_spec
from finefit.spec.schema import Spec
from tests.conftest import SPEC

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


def _resolve(text: str, *overrides: str, num_rows: int = 22) -> dict[str, Resolved]:
    return resolve(parse_spec(text, where="spec.yaml", overrides=overrides), overrides=overrides, machine=MACHINE, num_rows=num_rows)


def _keys(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Of the spec as JSON: every value that is not a mapping."""
    for key, value in document.items():
        if isinstance(value, dict):
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


@pytest.mark.parametrize("key", ["optimizer.weight_decay", "data.max_tokens", "on_nan.kind", "validate.every", "objective.kind", "deterministic"])
def test_a_value_that_nobody_asked_for_is_a_default(key: str) -> None:
    assert _resolve(SPEC)[key].source == "default"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=8", "seed", 8),
        ("levers.micro_batch=1", "levers.micro_batch", 1),
        ("levers={micro_batch: 4}", "levers.micro_batch", 4),
        ("save={every: epoch}", "save.every", "epoch"),
    ],
)
def test_an_override_is_the_source_of_its_value(override: str, key: str, value: object) -> None:
    assert _resolve(SPEC, override)[key] == Resolved(value=value, source="--set")


def test_the_paths_are_those_that_the_user_wrote() -> None:
    assert _resolve(SPEC)["data.train"] == Resolved(value=[{"path": "train.jsonl"}], source="spec")


def test_a_cpu_that_was_asked_for_computes_in_fp32() -> None:
    values = _resolve(SPEC)
    assert values["device"] == Resolved(value="cpu", source="spec")
    assert values["precision"].value == "fp32"
    assert values["precision"].source.startswith("auto: ")
    assert 1 <= values["threads"].value <= MACHINE.num_cores


def test_auto_without_a_card_is_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _resolve(MINIMAL)["device"] == Resolved(value="cpu", source="auto: torch finds no CUDA device")


def test_cuda_that_is_not_there_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match=r"device: cuda is asked for, but torch .* \(nvidia-smi shows no card\)"):
        _resolve(MINIMAL, "device=cuda")


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
def test_the_length_of_a_run_and_where_it_comes_from(overrides: tuple[str, ...], num_rows: int, per_epoch: int, total: int, source: str) -> None:
    values = _resolve(SPEC, *overrides, num_rows=num_rows)
    assert values["steps_per_epoch"].value == per_epoch
    assert values["total_steps"] == Resolved(value=total, source=source)


@pytest.mark.parametrize(("share", "steps"), [("0", 0), ("0.1", 2), ("0.5", 6), ("0.99", 12)])
def test_the_warm_up_is_a_share_of_all_steps_rounded_up(share: str, steps: int) -> None:
    values = _resolve(SPEC, f"schedule.warmup={share}")
    assert values["warmup_steps"] == Resolved(value=steps, source=f"{share} of 12 steps, rounded up")


@pytest.mark.parametrize(
    ("overrides", "num_rows", "micro", "accumulation"),
    [
        (("levers=auto", "global_batch=16"), 100, 4, 4),
        (("levers=auto", "global_batch=3"), 100, 3, 1),
        (("levers=auto", "global_batch=16"), 2, 2, 1),
        (("levers.micro_batch=3", "global_batch=16"), 100, 3, 6),
        (("levers.micro_batch=16",), 100, 4, 1),
    ],
)
def test_the_micro_batch_divides_the_global_batch_and_never_exceeds_it(
    overrides: tuple[str, ...], num_rows: int, micro: int, accumulation: int
) -> None:
    values = _resolve(SPEC, *overrides, num_rows=num_rows)
    assert (values["levers.micro_batch"].value, values["accumulation"].value) == (micro, accumulation)


def test_a_micro_batch_that_was_asked_too_large_says_what_became_of_it() -> None:
    assert _resolve(SPEC, "levers.micro_batch=16")["levers.micro_batch"].source == "--set asks for 16, a step has only 4 rows"


def test_resolving_leaves_the_spec_as_it_is() -> None:
    spec = parse_spec(SPEC, where="spec.yaml")
    before = spec.model_dump_json()
    resolve(spec, overrides=(), machine=MACHINE, num_rows=22)
    assert spec.model_dump_json() == before
