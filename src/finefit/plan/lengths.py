"""How long the rows are: counted with the model's own tokenizer where rows and tokenizer are there, else assumed."""

from collections.abc import Sequence
from pathlib import Path

from finefit.artifacts.records import Lengths
from finefit.data.prepared import prepare
from finefit.data.render import Example, open_renderer
from finefit.data.rows import read_rows
from finefit.spec.schema import Data


def count_lengths(data: Data, base: Path, tokenizer: Path) -> Lengths:
    """Of the training rows that are used."""
    rows = [row for source in data.train for row in read_rows(base / source.path, source.path)]
    prepared = prepare(rows, open_renderer(tokenizer, data.template), split="train", max_tokens=data.max_tokens, too_long=data.too_long)
    return measured_lengths(prepared.examples)


def measured_lengths(examples: Sequence[Example]) -> Lengths:
    supervised = [sum(e.supervised[1:]) for e in examples]
    return Lengths(
        num_rows=len(examples),
        longest=max(len(e.tokens) for e in examples),
        mean=sum(len(e.tokens) for e in examples) / len(examples),
        supervised=max(supervised),
        mean_supervised=sum(supervised) / len(examples),
        source="counted",
    )


def assume_lengths(data: Data, reason: str) -> Lengths:
    """The worst that the spec allows: every row of full length, every token supervised."""
    tokens = data.max_tokens
    return Lengths(
        num_rows=None,
        longest=tokens,
        mean=float(tokens),
        supervised=tokens - 1,
        mean_supervised=float(tokens - 1),
        source=f"assumed from data.max_tokens, since {reason}",
    )
