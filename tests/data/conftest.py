from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from finefit.artifacts.stage_records import Preparation
from finefit.data.encode import Budget
from finefit.data.examples import Example, RenderedRow
from finefit.data.prepare import prepare
from finefit.data.render import Renderer
from finefit.data.rows import Message, Row
from finefit.spec.data import Data
from tests.conftest import make_tokenizer

WIDE = Budget(max_tokens=100_000, too_long="error", turns="all")


def supervised_runs(example: Example) -> list[list[int]]:
    runs = groupby(zip(example.tokens, example.supervised, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for flag, run in runs if flag]


def supervised_texts(renderer: Renderer, example: Example) -> list[str]:
    """One for each run of supervised tokens."""
    return [renderer.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in supervised_runs(example)]


def prompts_before_answers(example: Example) -> list[list[int]]:
    """What stands before each run of supervised tokens."""
    starts = [at for at in range(1, len(example.tokens)) if example.supervised[at] and not example.supervised[at - 1]]
    return [list(example.tokens[:start]) for start in starts]


def render_one(renderer: Renderer, messages: Sequence[Message] = (), budget: Budget = WIDE, **row: Any) -> RenderedRow:
    (rendered,) = renderer.render([Row(source="rows.jsonl", number=1, messages=tuple(messages), **row)], budget)
    return rendered


def only_example(renderer: Renderer, messages: Sequence[Message]) -> Example:
    (example,) = render_one(renderer, messages).examples
    return example


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def prepared(folder: Path, tokenizer: Path, data: dict[str, Any], **settings: Any) -> tuple[Preparation, Path]:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    found = Data.model_validate(data, strict=False)
    return prepare(found, base=folder, tokenizer=tokenizer, folder=out, **{"seed": 0} | settings), out
