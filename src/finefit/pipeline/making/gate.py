"""The gate that chooses an expert for a whole prompt, trained on whose rows a prompt is of, and measured on rows that it has not seen."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from finefit.artifacts.pipelines import Order, SequenceGate
from finefit.artifacts.records import write_record
from finefit.data.built import builder
from finefit.data.fingerprint import held_share, prompt_key, system_is_content
from finefit.data.items import as_item
from finefit.data.read import open_source
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Row
from finefit.data.selection import sampled
from finefit.errors import DataError
from finefit.evaluate.gate import RECORD, SCORES, TABLE, chosen
from finefit.model.gate import fit, mean_embeddings, token_scores
from finefit.model.locate import locate
from finefit.pipeline.taskfiles import form_content
from finefit.spec.rows import Source
from finefit.spec.stages import Gate
from finefit.spec.tasks import Form
from finefit.stats.intervals import wilson

_TELLING = 5
"""Tokens shown for each expert."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    expert: str
    key: int
    """Equal for prompts that ask the same."""
    tokens: tuple[int, ...]


def make(order: Order, out: Path) -> dict[str, Any]:
    """Fills `out` with gate.json and gate.safetensors."""
    stage = order.stage
    assert isinstance(stage, Gate)
    folder = locate(order.models["base"].model, Path(order.base)).folder
    renderer = open_renderer(folder, stage.template, template_options=stage.template_options)
    train, held = divided(stage, renderer, Path(order.base), order.seed)
    experts = tuple(stage.experts)
    labels = torch.tensor([experts.index(prompt.expert) for prompt in train])
    means = mean_embeddings(folder, [prompt.tokens for prompt in train])
    gate = fit(means, labels, num_experts=len(experts), epochs=stage.epochs, lr=stage.lr, seed=order.seed)
    scores = token_scores(folder, gate)
    save_file(
        {SCORES: scores, "weight": gate.weight_KD, "centre": gate.centre_D}, out / TABLE, metadata={"format": "pt"}
    )
    record = SequenceGate(
        experts=experts,
        template_sha256=renderer.sha256(),
        form=form_content(stage.task, Path(order.base)),
        trained=_counts(train, experts),
        held=_counts(held, experts),
        telling=_telling(scores, train, experts, renderer),
        shared_prompts=_num_shared([*train, *held]),
        **_measured(scores, held, experts),
    )
    write_record(out / RECORD, record)
    return asdict(record)


def lines(summary: dict[str, Any]) -> list[str]:
    accuracy, held, experts = summary["accuracy"], summary["held"], summary["experts"]
    right = round(accuracy["value"] * accuracy["n"])
    value, low, high, most = map(
        _percent, (accuracy["value"], accuracy["low"], accuracy["high"], max(held.values()) / accuracy["n"])
    )
    told = [
        f"right for {right} of {accuracy['n']} held-out prompts: {value} ({low} to {high}); always {max(held, key=held.__getitem__)}: {most}"
    ]
    for expert in experts:
        words = ", ".join(map(repr, summary["telling"][expert]))
        told.append(
            f"{expert}: {summary['confusion'][expert][expert]} of {held[expert]}; what speaks most for it: {words}"
        )
    if summary["shared_prompts"]:
        told.append(
            f"{summary['shared_prompts']} prompts stand in the rows of several experts; no choice is right for all of them"
        )
    return [
        *told,
        "one expert for the whole prompt, by which tokens it has: neither their order nor a hidden state is seen, so it is no router",
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def divided(stage: Gate, renderer: Renderer, base: Path, seed: int) -> tuple[list[_Prompt], list[_Prompt]]:
    """What is trained on, and what is held out."""
    return _split(_prompts(stage, renderer, base, seed), list(stage.experts), stage.held_out, seed)


def _prompts(stage: Gate, renderer: Renderer, base: Path, seed: int) -> list[_Prompt]:
    rows = {name: _rows(source, stage.task, base, seed) for name, source in stage.data.items()}
    with_system = system_is_content(row for several in rows.values() for row in several)
    return [
        _Prompt(expert, prompt_key(row, with_system=with_system), tuple(_tokens(row, renderer)))
        for expert, several in rows.items()
        for row in several
    ]


def _rows(source: Source, form: Form | None, base: Path, seed: int) -> list[Row]:
    reading = replace(open_source(source, base, split="train"), build=builder(form, base=base))
    rows = []
    for row in reading.rows():
        if isinstance(row, BadRow):
            raise DataError(f"{row.place} {row.reason}", "mend or remove this row")
        rows.append(row)
    taken = sampled(reading, source.weight, source.limit, seed).taken
    return rows if taken is None else [row for row, takes_part in zip(rows, taken, strict=True) if takes_part]


def _tokens(row: Row, renderer: Renderer) -> list[int]:
    if row.kind == "text":
        raise DataError(
            f"{row.place} is plain text, and a gate chooses by what is asked", "take rows with a prompt and an answer"
        )
    try:
        return renderer.prompt_tokens(as_item(row).prompt, tools=row.tools)
    except DataError as fault:
        raise DataError(f"{row.place} {fault.problem}", fault.remedy) from None


def _split(
    prompts: Sequence[_Prompt], experts: Sequence[str], share: float, seed: int
) -> tuple[list[_Prompt], list[_Prompt]]:
    """Equal prompts stay on one side, or the accuracy would be that of a memory."""
    keys = np.array([prompt.key for prompt in prompts], np.uint64)
    if len(set(keys.tolist())) < 2:
        raise DataError(
            f"all {len(prompts)} prompts ask the same, so none can be held out to measure the gate on",
            "give rows that ask other things",
        )
    is_held = held_share(keys, share, seed)
    held = [prompt for prompt, is_out in zip(prompts, is_held, strict=True) if is_out]
    train = [prompt for prompt, is_out in zip(prompts, is_held, strict=True) if not is_out]
    for side, what in ((train, "to train on"), (held, "to be measured on")):
        if without := [name for name, count in _counts(side, experts).items() if not count]:
            raise DataError(
                f"of {', '.join(without)} no prompt is left {what}: {len(prompts)} prompts, {share:g} of them held out",
                "give more rows, or another held_out",
            )
    return train, held


def _counts(prompts: Sequence[_Prompt], experts: Sequence[str]) -> dict[str, int]:
    counts = Counter(prompt.expert for prompt in prompts)
    return {expert: counts[expert] for expert in experts}


def _num_shared(prompts: Sequence[_Prompt]) -> int:
    owners: dict[int, set[str]] = {}
    for prompt in prompts:
        owners.setdefault(prompt.key, set()).add(prompt.expert)
    return sum(len(several) > 1 for several in owners.values())


def _measured(scores: Tensor, held: Sequence[_Prompt], experts: Sequence[str]) -> Mapping[str, Any]:
    """By the function that will choose."""
    found = Counter(
        zip(
            (prompt.expert for prompt in held), chosen(scores, experts, [prompt.tokens for prompt in held]), strict=True
        )
    )
    confusion = {expert: {other: found[expert, other] for other in experts} for expert in experts}
    return {"confusion": confusion, "accuracy": wilson(sum(found[expert, expert] for expert in experts), len(held))}


def _telling(
    scores: Tensor, train: Sequence[_Prompt], experts: Sequence[str], renderer: Renderer
) -> dict[str, tuple[str, ...]]:
    """What the gate really reads: where it is the template or a phrase that all rows share, that shows here."""
    lead = scores - scores.mean(1, keepdim=True)
    told = {}
    for at, expert in enumerate(experts):
        counts = Counter(token for prompt in train if prompt.expert == expert for token in prompt.tokens)
        best = sorted(counts, key=lambda token: (-counts[token] * float(lead[token, at]), token))[:_TELLING]
        told[expert] = tuple(
            str(renderer.tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in best
        )
    return told
