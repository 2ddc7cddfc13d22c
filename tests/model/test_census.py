"""docs/models.md says what finefit does with every causal language model type of the installed transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.census import COLUMNS, probe
from tests.slow_cases import slow_but
from tests.tiny_types import CAUSAL
from tools.make_model_table import DOCUMENT, RESULTS, document

FOUND: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
BY_TYPE: dict[str, dict[str, Any]] = {entry["type"]: entry for entry in FOUND["types"]}
QUICK = ("llama", "gemma2", "opt", "jetmoe", "xlnet")


def test_the_document_is_made_from_the_committed_results() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(FOUND)


@pytest.mark.skipif(FOUND["versions"]["transformers"] != transformers.__version__, reason="another transformers")
def test_every_type_of_transformers_is_in_the_table() -> None:
    assert set(BY_TYPE) == {*CAUSAL}


@pytest.mark.parametrize("kind", slow_but(QUICK, CAUSAL))
def test_the_table_says_what_the_code_does(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = probe(kind, tmp_path / kind)
    wanted = BY_TYPE[kind]
    assert {column: found[column].works for column in COLUMNS} == {
        column: wanted[column].get("works", False) for column in COLUMNS
    }, found
    assert {column: found[column].refused for column in COLUMNS} == {
        column: wanted[column].get("refused") for column in COLUMNS
    }
