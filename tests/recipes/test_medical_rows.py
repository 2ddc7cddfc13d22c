"""The rows of medical-sft-dpo-twin are grounded, disjoint, reproducible byte for byte, and every one of them can be
falsified evenly."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from finefit.data.sources import open_source
from finefit.negatives.pairs import EVEN, make_pairs
from finefit.spec.data import Source
from finefit.spec.load import load_any
from finefit.spec.pipeline import Pipeline
from finefit.spec.stages import MakePairs, Rules, TrainStage

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "finefit" / "recipes"
ROWS = RECIPES / "medical-sft-dpo-twin"
NUM_ROWS = {"train": 90, "test": 40}
DRUGS = re.compile(
    r"\b\w+(?:pril|statin|olol|lol|cillin|cycline|xaban|prazole|mide|pram|line|oxen|formin|farin|profen|pentin|roxine|dogrel|sone)\b",
    re.IGNORECASE,
)


@cache
def rows(split: str) -> tuple[dict[str, str], ...]:
    return tuple(json.loads(line) for line in (ROWS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())


@cache
def twin(name: str = "medical-sft-dpo-twin") -> Pipeline:
    found = load_any(RECIPES / name / "spec.yaml")
    assert isinstance(found, Pipeline)
    return found


@pytest.mark.parametrize("split", NUM_ROWS)
def test_an_answer_says_only_numbers_and_drugs_that_its_text_says(split: str) -> None:
    assert len(rows(split)) == NUM_ROWS[split]
    for row in rows(split):
        assert set(row) == {"context", "question", "answer"}
        for pattern in (re.compile(r"\d+"), DRUGS):
            said, there = ({word.lower() for word in pattern.findall(text)} for text in (row["answer"], row["context"]))
            assert said <= there, row


def test_the_splits_share_no_text_and_no_drug() -> None:
    def drugs(split: str) -> set[str]:
        return {word.lower() for row in rows(split) for word in DRUGS.findall(row["context"])}

    assert len(drugs("train")) > 10
    assert drugs("train").isdisjoint(drugs("test"))
    texts = [row["context"] for split in NUM_ROWS for row in rows(split)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("split", NUM_ROWS)
def test_every_row_can_be_made_false_and_no_side_is_known_by_its_form(split: str) -> None:
    stage = twin().stages["pairs"]
    assert isinstance(stage, MakePairs)
    assert isinstance(stage.method, Rules)
    source = Source(path=f"{split}.jsonl", fields=stage.train[0].fields)
    made = make_pairs(
        open_source(source, ROWS, split=split).rows(),
        seed=twin().seed,
        per_row=2,
        shares={**EVEN, **stage.method.shares},
    )
    assert made.unused == ()
    assert {rule: count.made > 0 for rule, count in made.rules.items()} == dict.fromkeys(
        ("entity", "number", "negation", "fabrication"), True
    )
    assert made.audit is not None
    assert made.audit.warnings == ()


def test_the_twin_has_the_stages_of_the_recipe_and_asks_its_rows_alike() -> None:
    big, small = twin("medical-sft-dpo"), twin()
    assert {name: stage.kind for name, stage in big.stages.items()} == {
        name: stage.kind for name, stage in small.stages.items()
    }
    for pipeline in (big, small):
        sft, pairs, dpo = (pipeline.stages[name] for name in ("sft", "pairs", "dpo"))
        assert isinstance(sft, TrainStage)
        assert isinstance(dpo, TrainStage)
        assert isinstance(pairs, MakePairs)
        assert (
            sft.data.train[0].fields == pairs.train[0].fields
        )  # else pairs would be asked in another way than was learnt
        assert sft.data.test == dpo.data.test == pairs.test
        assert sft.data.template == dpo.data.template
        assert dpo.tuning == sft.tuning
        assert dpo.data.too_long in ("error", "drop")  # pairs that are cut alike are the same pair
