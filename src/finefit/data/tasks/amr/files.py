"""Files of graphs, each below its sentence. Two files are put side by side by their sentences, and every graph of either has its partner."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from finefit.data.files import find_files
from finefit.data.records import read_records
from finefit.data.rows import BadRow
from finefit.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    source: str
    number: int
    sentence: str
    graph: str
    """As it is written."""

    @property
    def place(self) -> str:
        return f"{self.source}:{self.number}"


def read_graphs(path: Path) -> list[Block]:
    """Every block of the file; one that lacks its sentence or its graph is an error."""
    blocks: list[Block] = []
    for file in find_files(path.name, path.parent, split="graphs"):
        for record in read_records(file):
            if isinstance(record, BadRow):
                raise DataError(
                    f"{record.place} {record.reason}",
                    "mend the file: a graph left out would put all others beside the wrong sentence",
                )
            blocks.append(
                Block(
                    source=record.source,
                    number=record.number,
                    sentence=str(record.value.get("snt", "")),
                    graph=str(record.value.get("amr", "")),
                )
            )
    return blocks


def align(predicted: list[Block], gold: list[Block]) -> list[tuple[Block, Block]]:
    """Predicted beside gold, in the order of gold; of a sentence that stands several times, in the order of the files."""
    for blocks, others, what in ((gold, predicted, "predicted"), (predicted, gold, "gold")):
        if alone := _without_partner(blocks, others):
            more = f", and {len(alone) - 1:,} more" if len(alone) > 1 else ""
            raise DataError(
                f"{len(predicted):,} predicted and {len(gold):,} gold graphs do not belong together: "
                f"{alone[0].place} has no {what} graph for `{alone[0].sentence}`{more}",
                "give one graph for each sentence of the gold file; where none was predicted, the sentence with `()` below it",
            )
    waiting: defaultdict[str, list[Block]] = defaultdict(list)
    for block in reversed(predicted):
        waiting[block.sentence].append(block)
    return [(waiting[block.sentence].pop(), block) for block in gold]


def _without_partner(blocks: list[Block], others: list[Block]) -> list[Block]:
    left = Counter(other.sentence for other in others)
    alone = []
    for block in blocks:
        left[block.sentence] -= 1
        if left[block.sentence] < 0:
            alone.append(block)
    return alone
