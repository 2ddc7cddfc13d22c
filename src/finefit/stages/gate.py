"""The gate that chooses one expert for a whole prompt. It is trained to tell which expert's rows a prompt belongs to,
and measured on held-out rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from finefit.artifacts.records import SequenceGate, StageJob, write_record
from finefit.data.fingerprint import held_share, prompt_key, system_is_content
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import Row, as_item
from finefit.data.sources import LEFT_OUT, open_source, sampled_rows
from finefit.errors import DataError
from finefit.model.resolve_model import resolve_model
from finefit.moe import gate as moe_gate
from finefit.moe.gate import GATE_RECORD, GATE_SCORES, GATE_TABLE
from finefit.spec.stages import Gate
from finefit.stages.worker import serve
from finefit.stats.intervals import wilson
from finefit.tasks.custom import form_content, row_builder

_NUM_TELLING = 5
"""The number of tokens shown for each expert."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    expert: str
    key: int
    """The same key for prompts that ask the same."""
    tokens: tuple[int, ...]


def make(job: StageJob, out: Path) -> dict[str, Any]:
    """Fills `out` with gate.json and gate.safetensors."""
    stage = job.stage
    assert isinstance(stage, Gate)
    folder = resolve_model(job.models["base"].model, Path(job.base)).folder
    renderer = open_renderer(folder, stage.template, template_options=stage.template_options)
    train, held = split_prompts(stage, renderer, Path(job.base), job.seed)
    experts = tuple(stage.experts)
    labels = torch.tensor([experts.index(prompt.expert) for prompt in train])
    means = moe_gate.mean_embeddings(folder, [prompt.tokens for prompt in train])
    gate = moe_gate.fit_gate(means, labels, num_experts=len(experts), epochs=stage.epochs, lr=stage.lr, seed=job.seed)
    scores = moe_gate.token_scores(folder, gate)
    tensors = {GATE_SCORES: scores, "weight": gate.weight_KD, "centre": gate.centre_D}
    save_file(tensors, out / GATE_TABLE, metadata={"format": "pt"})
    # measured with the function that will choose
    choices = moe_gate.experts_chosen(scores, experts, [prompt.tokens for prompt in held])
    found = Counter(zip((prompt.expert for prompt in held), choices, strict=True))
    owners: dict[int, set[str]] = {}
    for prompt in (*train, *held):
        owners.setdefault(prompt.key, set()).add(prompt.expert)
    record = SequenceGate(
        experts=experts,
        template_sha256=renderer.sha256(),
        form=form_content(stage.task, Path(job.base)),
        trained=_counts(train, experts),
        held=_counts(held, experts),
        telling=_telling(scores, train, experts, renderer),
        shared_prompts=sum(len(several) > 1 for several in owners.values()),
        confusion={expert: {other: found[expert, other] for other in experts} for expert in experts},
        accuracy=wilson(sum(found[expert, expert] for expert in experts), len(held)),
    )
    write_record(out / GATE_RECORD, record)
    return asdict(record)


def split_prompts(stage: Gate, renderer: Renderer, base: Path, seed: int) -> tuple[list[_Prompt], list[_Prompt]]:
    """The prompts to train on and the held-out ones. Equal prompts stay on one side, or the held-out accuracy would
    measure memorisation."""
    prompts, experts, share = _prompts(stage, renderer, base, seed), list(stage.experts), stage.held_out
    keys = np.array([prompt.key for prompt in prompts], np.uint64)
    if len(set(keys.tolist())) < 2:
        problem = f"all {len(prompts)} prompts ask the same, so none can be held out to measure the gate on"
        raise DataError(problem, "give rows that ask other things")
    is_held = held_share(keys, share, seed)
    held = [prompt for prompt, is_out in zip(prompts, is_held, strict=True) if is_out]
    train = [prompt for prompt, is_out in zip(prompts, is_held, strict=True) if not is_out]
    for side, what in ((train, "to train on"), (held, "to measure on")):
        if without := [name for name, count in _counts(side, experts).items() if not count]:
            there = f"{len(prompts)} prompts, {share:g} of them held out"
            problem = f"no prompt of {', '.join(without)} is left {what}: {there}"
            raise DataError(problem, "give more rows, or another held_out")
    return train, held


def _prompts(stage: Gate, renderer: Renderer, base: Path, seed: int) -> list[_Prompt]:
    rows: list[tuple[str, Row]] = []
    for expert, source in stage.data.items():
        reader = replace(open_source(source, base, split="train"), build=row_builder(stage.task, base=base))
        for row in sampled_rows(reader, source, seed):
            if isinstance(row, Row):
                rows.append((expert, row))
            elif row.reason not in LEFT_OUT:
                raise DataError(f"{row.place} {row.reason}", "fix or remove this row")
    with_system = system_is_content(row for _, row in rows)
    prompts = []
    for expert, row in rows:
        if row.kind == "text":
            problem = f"{row.place} is plain text, but a gate chooses by the prompt"
            raise DataError(problem, "take rows with a prompt and an answer")
        try:
            tokens = renderer.prompt_tokens(as_item(row).prompt, tools=row.tools)
        except DataError as fault:
            raise DataError(f"{row.place} {fault.problem}", fault.remedy) from None
        prompts.append(_Prompt(expert, prompt_key(row, with_system=with_system), tuple(tokens)))
    return prompts


def _counts(prompts: Sequence[_Prompt], experts: Sequence[str]) -> dict[str, int]:
    counts = Counter(prompt.expert for prompt in prompts)
    return {expert: counts[expert] for expert in experts}


def _telling(
    scores: Tensor, train: Sequence[_Prompt], experts: Sequence[str], renderer: Renderer
) -> dict[str, tuple[str, ...]]:
    """The tokens that the gate decides by. They reveal a template, or a phrase that all rows share."""
    lead = scores - scores.mean(1, keepdim=True)
    found = {}
    for at, expert in enumerate(experts):
        counts = Counter(token for prompt in train if prompt.expert == expert for token in prompt.tokens)
        best = sorted(counts, key=lambda token: (-counts[token] * float(lead[token, at]), token))[:_NUM_TELLING]
        words = (renderer.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in best)
        found[expert] = tuple(map(str, words))
    return found


if __name__ == "__main__":
    serve(make)
