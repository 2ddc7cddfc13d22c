"""Families that differ from a plain transformer, from the spec to answers of the trained model, with the default
adapters and the plan's own levers."""

import re
from pathlib import Path

import pytest
import torch

from finefit.artifacts.atomic import read_lines
from finefit.artifacts.records import read_record
from finefit.artifacts.stage_records import StageResult
from finefit.evaluate.decoding import decode, likeliest
from finefit.model.attention import attention_here
from finefit.model.load import load_for_answers
from tests.families import FAMILIES, make_family_project
from tests.faults import TRAINING, make_job, outcome, run_to_end
from tests.slow_cases import slow_but

SPEC = re.sub(r"levers: .*\n", "", re.sub(r"tuning: .*\n", "tuning: {kind: lora}\n", TRAINING)).replace(
    "epochs: 3", "epochs: 1"
)
PROMPTS = ([5, 9, 17, 40, 31, 8, 77], [6, 12], [90, 4, 3, 60, 33])


@pytest.mark.parametrize("kind", slow_but(("mamba2",), FAMILIES.keys()))
def test_the_default_adapters_are_trained_and_the_trained_model_answers(kind: str, tmp_path: Path) -> None:
    _train_and_answer(kind, SPEC, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_are_trained_and_the_trained_model_answers(kind: str, tmp_path: Path) -> None:
    _train_and_answer(kind, SPEC.replace("{kind: lora}", "{kind: lora, rank: 8, experts: true}"), tmp_path)


def _train_and_answer(kind: str, spec_text: str, tmp_path: Path) -> None:
    def project(folder: Path, *, spec: str) -> Path:
        return make_family_project(folder, kind, spec=spec)

    where = run_to_end(make_job(tmp_path, spec=spec_text, project=project))
    assert read_record(where.result, StageResult).frozen_unchanged is True
    losses = [loss for _, loss, *_ in outcome(where).steps]
    assert losses[-1] < losses[0]
    first = next(line for line in read_lines(where.metrics) if line.get("event") == "audited")
    assert first["tensors"] == first["reached"]
    base = tmp_path / "model"
    model = load_for_answers(
        base,
        where.checkpoints / "final",
        device="cpu",
        dtype=torch.float32,
        attention=attention_here("cpu", "fp32", base),
    )

    def answers(*prompts: list[int]) -> list[list[int]]:
        return decode(model, prompts, max_new_tokens=6, stops=(0,), pad=1, device="cpu", choose=likeliest)

    assert answers(*PROMPTS) == [answers(prompt)[0] for prompt in PROMPTS]
