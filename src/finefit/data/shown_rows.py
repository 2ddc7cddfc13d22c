"""Training rows as the model sees them: text, and which of it is supervised.

`python -m finefit.data.shown_rows STAGE_DIR FROM COUNT` writes those of a stage as JSON, for pages whose process must
stay small."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from finefit.artifacts.records import read_record
from finefit.artifacts.rundir import StageDir
from finefit.artifacts.stage_records import Stage
from finefit.data.encode import open_tokenizer
from finefit.data.examples import Pair, TrainRow, open_examples

_MAX_REPEATED = 8


@dataclass(frozen=True, slots=True)
class ShownRow:
    title: str
    pieces: tuple[tuple[str, bool], ...]
    """Text, and whether it is supervised."""


def shown_rows(
    rows: Sequence[TrainRow], tokenizer: PreTrainedTokenizerBase, *, first: int, count: int
) -> Iterator[ShownRow]:
    """Rows are counted from 0; a pair gives two."""
    for at in range(first, min(first + count, len(rows))):
        row = rows[at]
        sides = {", preferred": row.chosen, ", rejected": row.rejected} if isinstance(row, Pair) else {"": row}
        for side, example in sides.items():
            runs = groupby(zip(example.tokens, example.supervised, strict=True), key=lambda pair: pair[1])
            pieces = ((_text(tokenizer, [token for token, _ in run]), supervised) for supervised, run in runs)
            yield ShownRow(f"example {at + 1}{side}", tuple(pieces))


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """Shows a token that is repeated many times, as for an image, once with its count."""

    def decoded(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    runs = [(token, len(list(run))) for token, run in groupby(tokens)]
    pieces: list[str] = []
    for is_long, part in groupby(runs, key=lambda run: run[1] > _MAX_REPEATED):
        if is_long:
            pieces += [f"{decoded([token])} ({count:,} times) " for token, count in part]
        else:
            pieces.append(decoded([token for token, count in part for _ in range(count)]))
    return "".join(pieces)


def main() -> None:
    folder, first, count = sys.argv[1:]
    where = StageDir(Path(folder))
    stage = read_record(where.stage, Stage)
    rows = open_examples(where.verified("train.safetensors", stage.prepared))
    tokenizer = open_tokenizer(where.tokenizer, has_vision=False)
    shown = [
        {"title": row.title, "pieces": row.pieces}
        for row in shown_rows(rows, tokenizer, first=int(first), count=int(count))
    ]
    print(json.dumps({"total": len(rows), "rows": shown}))


if __name__ == "__main__":
    main()
