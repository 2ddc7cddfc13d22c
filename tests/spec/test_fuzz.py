"""Whatever a file or an override holds, a Spec or a SpecError comes out."""

import os
import random

import pytest

from finefit.errors import SpecError
from finefit.spec.load import parse_spec, spec_from_json, spec_to_json
from tests.memory import peak_of

FULL = """\
name: medical
seed: 42
model: {kind: hub, id: owner/name, revision: main}
tuning: {kind: lora, rank: 16, alpha: 32, targets: [q_proj, v_proj], base_bits: 4}
data:
  train:
    - {path: a.jsonl, weight: 2, limit: 9}
    - {path: "rows/*.csv", fields: {prompt: "{context} {ask}", answer: reply.text}}
  validation: {share: 0.1}
  test: {path: b.jsonl}
  max_tokens: 2048
  too_long: cut_prompt
  drop_at_most: 0.2
  template_options: {enable_thinking: true, names: [a, 1, 0.5, null]}
optimizer: {lr: 1e-4, betas: [0.9, 0.99], clip: null}
schedule: {epochs: 1, warmup: 0.03}
levers: {micro_batch: auto, recompute: all, loss_chunk: 512, keep_attention: true}
save: {every: 200 steps, keep: 3}
validate: {every: epoch}
on_nan: {kind: skip, at_most: 2}
evaluate: [{task: exact_match, limit: 10}]
"""
SCRAPS = [
    *":-,[]{}#&*!|>'\"%@`~?\\\t\n\r\0\ufeff\u2028é💥\ud800",
    *[
        "0",
        "-1",
        "1e999",
        ".nan",
        "null",
        "true",
        "kind",
        "levers",
        "9" * 5000,
        " " * 9,
        "[" * 50,
        '"\\x',
        "\n---\n",
        "\n...\n",
    ],
    *["&a ", "*a", "!!set ", "!!binary ", "<<: ", "? ", "%YAML 1.1\n", "%TAG ! x\n"],
]
MUTATIONS = int(os.environ.get("FINEFIT_FUZZ", "2000"))
many = pytest.mark.parametrize("count", [MUTATIONS, pytest.param(10_000, marks=pytest.mark.slow)])


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 0, 1, 3, 12]))
        text = text[:start] + rng.choice([*SCRAPS, "", text[start:end] * 2, text[end : end + 30]]) + text[end:]
    return text


def is_accepted(text: str, *overrides: str) -> bool:
    try:
        spec = parse_spec(text, where="fuzz.yaml", overrides=overrides)
    except SpecError as error:
        str(error).encode()
        return False
    assert spec_from_json(spec_to_json(spec)) == spec
    return True


def read_mutated(count: int) -> None:
    rng = random.Random(0)
    accepted = sum(is_accepted(mutated(FULL, rng)) for _ in range(count))
    assert is_accepted(FULL)
    assert 0 < accepted < count


@many
def test_only_a_spec_error_leaves_a_mutated_file_and_it_takes_no_gibibyte(count: int) -> None:
    setup = "from tests.spec.test_fuzz import read_mutated"
    assert peak_of("read_mutated(int(sys.argv[1]))", count, setup=setup) < 1 << 30


@many
def test_only_a_spec_error_leaves_a_mutated_override(count: int) -> None:
    rng = random.Random(1)
    overrides = [
        "schedule.epochs=2",
        "data.train.0.path=x.jsonl",
        "tuning={kind: full}",
        "levers.micro_batch=4",
        "evaluate=[]",
    ]
    small = "name: a\nmodel: {kind: hub, id: b}\ntuning: {kind: full}\ndata: {train: [{path: c}]}\n"
    accepted = sum(
        is_accepted(small, mutated(rng.choice(overrides), rng), mutated(rng.choice(overrides), rng))
        for _ in range(count)
    )
    assert 0 < accepted < count


@many
def test_only_a_spec_error_leaves_mutated_json(count: int) -> None:
    rng = random.Random(2)
    document = spec_to_json(parse_spec(FULL, where="full.yaml"))
    for _ in range(count):
        try:
            spec_from_json(mutated(document, rng))
        except SpecError as error:
            str(error).encode()
