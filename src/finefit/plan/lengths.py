"""How long the rows are: counted with the model's own tokenizer where rows and tokenizer are there, else assumed."""

from collections.abc import Sequence
from pathlib import Path

from finefit.artifacts.records import Lengths
from finefit.data.prepared import prepare
from finefit.data.render import Example, open_renderer
from finefit.data.rows import read_rows
from finefit.spec.schema import Data, Source


def count_lengths(data: Data, base: Path, tokenizer: Path) -> Lengths:
    """Of the rows that are used; validation and test rows where their files are there."""
    renderer = open_renderer(tokenizer, data.template)

    def used(split: str, sources: Sequence[Source]) -> list[Example]:
        rows = [row for source in sources for row in read_rows(base / source.path, source.path)]
        return list(prepare(rows, renderer, split=split, max_tokens=data.max_tokens, too_long=data.too_long).examples)

    validation = used("validation", (data.validation,)) if data.validation and (base / data.validation.path).is_file() else []
    test = read_rows(base / data.test.path, data.test.path) if data.test and (base / data.test.path).is_file() else []
    return measured_lengths(used("train", data.train), validation, [renderer.prompt_tokens(row.prompt) for row in test])


def measured_lengths(examples: Sequence[Example], validation: Sequence[Example] = (), prompts: Sequence[Sequence[int]] = ()) -> Lengths:
    supervised = [sum(e.supervised[1:]) for e in examples]
    return Lengths(
        num_rows=len(examples),
        longest=max(len(e.tokens) for e in examples),
        mean=sum(len(e.tokens) for e in examples) / len(examples),
        supervised=max(supervised),
        mean_supervised=sum(supervised) / len(examples),
        source="counted",
        validation=(max(len(e.tokens) for e in validation), max(sum(e.supervised[1:]) for e in validation)) if validation else None,
        prompt=max(map(len, prompts)) if prompts else None,
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
