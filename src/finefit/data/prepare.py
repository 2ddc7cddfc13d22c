"""Turns sources into examples on disk and a ledger: every row is used, or dropped with a reason. This module records
what it finds and judges nothing. Held-out rows come first, so that every training row can be compared with them as it
streams by."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finefit.artifacts.atomic import Journal
from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.stage_records import LedgerRow, Preparation, RowProblem, SourceLedger
from finefit.data.encode import Budget
from finefit.data.examples import ExampleWriter
from finefit.data.fingerprint import Windows, fingerprint, system_is_content
from finefit.data.image_check import ImageArchive, ModelProcessor, ProcessorFactory, image_processor_of
from finefit.data.images import ImageManifest
from finefit.data.overlap import SAMPLE_ROWS, OverlapIndex, TrainDuplicates, common_windows
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, ImageRef, Kind, Row, as_item, item_line
from finefit.data.shapes import fields_line
from finefit.data.sources import RowSelection, SourceReader, open_source, sampled, select_rows, weighted
from finefit.data.tokenizer_pool import FIX_IMAGES, CheckedImages, RenderedChunk, TokenizerPool, chunked, num_processes
from finefit.errors import DataError
from finefit.facts.files import sha256_of
from finefit.spec.data import Data
from finefit.vision import FAMILIES

Grids = tuple[tuple[int, ...], ...]
"""The grids of one row's images."""
BuildRow = Callable[[Row], Row | BadRow]

SPLITS = ("test", "validation", "train")
_MAX_SHOWN = 10
_NUM_SAMPLED = 100
"""Rows sampled to detect the kind of a source."""
_MEDIA_MARKS = ("<audio>", "<video>")
"""Placeholders for recordings in prompts; a few rows may also mention them as HTML."""
_PLACEHOLDER = re.compile(r"\{\{\s*[^\W\d]\w*\s*\}\}")
"""A variable that should have been replaced before training, as in LLaMA-Factory's identity rows: {{name}}."""
_NOT_PAIRS: dict[Kind, str] = {"chat": "single answers", "text": "plain text"}


def prepare(
    data: Data,
    *,
    base: Path,
    tokenizer: Path,
    seed: int,
    folder: Path,
    max_prompt_tokens: int | None = None,
    pairs: bool = False,
    processor_factory: ProcessorFactory | None = None,
    build: BuildRow | None = None,
) -> Preparation:
    """Writes train.safetensors, validation.safetensors, test.jsonl and ledger.jsonl to `folder`, as far as there is
    data; for rows with images also an archive of those that came as bytes and a manifest of the others.

    `max_prompt_tokens`: longer prompts of test rows are cut. `pairs`: train on preference pairs. `processor_factory`:
    by default opens the processor beside the tokenizer. `build`: makes a row into what `data.task` trains on."""
    assert (build is None) == (data.task is None), "data.task needs its builder"
    processor_factory = processor_factory or ModelProcessor(tokenizer, tokenizer / "config.json", data.images)
    processor, options = image_processor_of(processor_factory), data.template_options
    renderer = open_renderer(tokenizer, data.template, template_options=options, image_processor=processor)
    has_vision = renderer.image_processor is not None
    readers = _open_all(data, base, build, pairs=pairs, has_vision=has_vision)
    with ExitStack() as stack:
        sample = _sample(readers["train"])
        with_system = system_is_content(sample)
        common = common_windows(fingerprint(row, with_system=with_system) for row in sample)
        processes = num_processes(readers["train"], readers["test"] if has_vision else (), has_vision=has_vision)
        pool = TokenizerPool(
            renderer, data, tokenizer, processor_factory, processes=processes, with_system=with_system, pairs=pairs
        )
        preparer = _Preparer(data, folder, stack.enter_context(pool), stack, common, pairs=pairs)
        ledger, writers = preparer.ledger, preparer.writers
        prompt, prompt_grids = preparer.test_items(readers["test"], renderer, seed, max_prompt_tokens)
        for reader in readers["validation"]:
            limit = data.validation.limit if data.validation else None
            preparer.examples(ledger.open("validation", reader), reader, sampled(reader, 1.0, limit, seed))
        selected = select_rows(data, readers["train"], seed, with_system=with_system)
        for reader, (held, _) in zip(readers["train"], selected, strict=True):
            if held is not None:  # the training split counts the records of this file
                preparer.examples(ledger.open("validation", reader, counts_records=False), reader, held)
        table = [np.zeros(0, np.int64)]
        for source, reader, (_, selection) in zip(data.train, readers["train"], selected, strict=True):
            tally, begin = ledger.open("train", reader), writers["train"].num_examples
            preparer.examples(tally, reader, selection)
            table.append(weighted(begin, writers["train"].num_examples, source.weight, seed))
            tally.repeated = len(table[-1]) - tally.examples
        preparer.note_duplicates()
        lengths = _close(writers, np.concatenate(table), prompt, prompt_grids, sides=2 if pairs else 1)
        preparer.manifest.write(folder)
        sources = ledger.close()
    return Preparation(
        sources=sources,
        problems=tuple(ledger.faults.values()),
        notes=renderer.notes,
        lengths=lengths,
        template_sha256=renderer.sha256(),
        largest_token=pool.largest_token,
        pad_is_end=renderer.pad in renderer.stop_tokens,
        prompt_tokens=prompt,
        prompt_grids=prompt_grids,
        images_sha256=preparer.manifest.sha256,
        files={path.name: sha256_of(path) for path in sorted(folder.iterdir())},
    )


def _open_all(
    data: Data, base: Path, build: BuildRow | None, *, pairs: bool, has_vision: bool
) -> dict[str, list[SourceReader]]:
    """Opens all sources, so that all their errors are reported at once."""
    readers: dict[str, list[SourceReader]] = {split: [] for split in SPLITS}
    errors: list[DataError] = []
    for split in SPLITS:
        for source in data.sources()[split]:
            try:
                reader = replace(open_source(source, base, split=split), build=build)
                _require_kind(reader, split, pairs=pairs, has_vision=has_vision)
                readers[split].append(reader)
            except DataError as error:
                errors.append(error)
    if errors:
        remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
        raise DataError("\n".join(error.problem for error in errors), "\n".join(remedies))
    return readers


def _require_kind(reader: SourceReader, split: str, *, pairs: bool, has_vision: bool) -> None:
    rows = list(islice((row for row in reader.rows() if isinstance(row, Row)), _NUM_SAMPLED))
    if not rows:
        return
    row = rows[0]
    for mark in _MEDIA_MARKS:
        num_marked = sum(any(mark in message.content for message in row.prompt) for row in rows)
        if 2 * num_marked > len(rows):
            problem = f"{reader.source} has {mark} in the prompts of {num_marked} of its first {len(rows)} rows"
            problem += ", but finefit trains on text and images only: the model would answer without the recording"
            raise DataError(problem, "leave these rows out, or remove the marks from their text")
    if row.kind == "judged":
        raise _judged(reader, split)
    if pairs and split != "test" and row.kind != "pair":
        learns = "objective dpo learns from pairs: an answer that is preferred and one that is not"
        fields = "fields: {prompt: ..., chosen: ..., rejected: ...}; or set objective: {kind: sft}"
        problem = f"{reader.source} holds {_NOT_PAIRS[row.kind]}, and {learns}"
        raise DataError(problem, f"name the columns of both, {fields}")
    if row.kind == "pair" and split != "test" and not pairs:
        parts = dict(reader.shapes[0].parts)
        answer = parts.pop("chosen")
        del parts["rejected"]
        answered = parts | ({"answer": answer} if parts.keys() & {"prompt", "context"} else {"messages": answer})
        problem = f"{reader.source} holds preference pairs, and supervised fine-tuning learns from answers"
        dpo = "objective: {kind: dpo} learns from both sides"
        raise DataError(problem, f"name the answer to train on, {fields_line(answered)}; {dpo}")
    if row.images and not has_vision:
        problem = f"{reader.source} holds images, which this text-only model cannot see"
        fields = "name the columns of text alone: fields: {prompt: ..., answer: ...}"
        remedy = f"take a vision-language model ({', '.join(FAMILIES)}), or {fields}"
        raise DataError(problem, remedy)


def _judged(reader: SourceReader, split: str) -> DataError:
    parts = dict(reader.shapes[0].parts)
    label = parts.pop("label").name
    problem = f"{reader.source} holds answers with a verdict ({label}), some of which are wrong"
    good = f"select the good ones with where: {{{label}: {reader.shapes[0].good}}} and {fields_line(parts)}"
    if split == "test":
        return DataError(f"{problem}: they are not references", good)
    pair = (
        "put a good and a bad answer to the same prompt into one row as chosen and rejected, for objective: {kind: dpo}"
    )
    return DataError(f"{problem}; KTO, which learns from such rows, is not offered", f"{good}; or {pair}")


@dataclass(slots=True)
class SourceTally:
    """Counts what became of the rows of one source while they stream by."""

    split: str
    source: str
    shape: str
    mapping: dict[str, str]
    counts_records: bool = True
    records: int = 0
    read: int = 0
    used: int = 0
    cut: int = 0
    cut_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: int = 0
    repeated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    images: int = 0
    last: tuple[str, int] | None = None

    def close(self) -> SourceLedger:
        values = {name: value for name, value in asdict(self).items() if name not in ("counts_records", "last")}
        return SourceLedger(**values | {"dropped": dict(self.dropped)})


@dataclass(slots=True)
class Ledger:
    """Records what became of every row, by source, with the place of each row that was dropped, cut or repaired."""

    journal: Journal
    tallies: list[SourceTally] = field(default_factory=list)
    faults: dict[tuple[str, str], RowProblem] = field(default_factory=dict)

    def open(self, split: str, reader: SourceReader, *, counts_records: bool = True) -> SourceTally:
        shape = reader.shapes[0]
        self.tallies.append(SourceTally(split, reader.source, shape.name, dict(shape.mapping), counts_records))
        return self.tallies[-1]

    def close(self) -> tuple[SourceLedger, ...]:
        closed = tuple(t.close() for t in sorted(self.tallies, key=lambda tally: -SPLITS.index(tally.split)))
        for source in closed:
            self.journal.write(**asdict(source))
        return closed

    def note(self, kind: str, split: str, line: str, remedy: str = "") -> None:
        old = self.faults.get((kind, split), RowProblem(kind=kind, split=split, count=0, lines=()))  # type: ignore[arg-type]
        lines = (*old.lines, line) if len(old.lines) < _MAX_SHOWN else old.lines
        remedies = "\n".join(dict.fromkeys(filter(None, (*old.remedy.split("\n"), remedy))))
        self.faults[kind, split] = replace(old, count=old.count + 1, lines=lines, remedy=remedies)

    def drop(self, tally: SourceTally, row: Row | BadRow, reason: str, detail: str = "") -> None:
        tally.dropped[reason] += 1
        self._write(tally, row, "dropped", f"{reason}: {detail}" if detail else reason)

    def unusable(self, tally: SourceTally, row: Row | BadRow, problem: str, remedy: str) -> None:
        self.drop(tally, row, "unusable", problem)
        self.note("unusable", tally.split, f"{row.place} {problem}", remedy)

    def cut(self, tally: SourceTally, row: Row, tokens: int) -> None:
        tally.cut += 1
        tally.cut_tokens += tokens
        self._write(tally, row, "cut", f"{tokens} tokens of the prompt")

    def repair(self, tally: SourceTally, row: Row) -> None:
        if row.repairs:
            repairs = "; ".join(row.repairs)
            self._write(tally, row, "repaired", repairs)
            self.note("repaired", tally.split, f"{row.place} {repairs}")

    def note_marks(self, tally: SourceTally, row: Row) -> None:
        """Of what is not in the row: a recording, or what a name in braces stands for."""
        if marks := [mark for mark in _MEDIA_MARKS if any(mark in message.content for message in row.prompt)]:
            self.note("medium", tally.split, f"{row.place} holds {', '.join(marks)}")
        texts = (row.text, *(message.content for message in (*row.messages, *row.rejected)))
        if found := dict.fromkeys(name for text in texts if "{{" in text for name in _PLACEHOLDER.findall(text)):
            self.note("placeholder", tally.split, f"{row.place} holds {', '.join(found)}")

    def _write(self, tally: SourceTally, row: Row | BadRow, what: str, reason: str) -> None:
        place = {"source": row.source, "row": row.number, "part": row.part}
        line = LedgerRow(split=tally.split, what=what, reason=reason, **place)  # type: ignore[arg-type]
        self.journal.write(**asdict(line))


class _Preparer:
    """Passes each row to its destination as it streams by. `stack` closes its files."""

    def __init__(
        self, data: Data, folder: Path, pool: TokenizerPool, stack: ExitStack, common: Windows, *, pairs: bool
    ) -> None:
        """`common`: the windows of training rows that belong to a template."""
        self.data, self.folder, self.pool, self.pairs = data, folder, pool, pairs
        self.ledger = Ledger(stack.enter_context(Journal(folder / "ledger.jsonl")))
        paths = {split: folder / f"{split}.safetensors" for split in ("train", "validation")}
        self.writers = {
            split: stack.enter_context(ExampleWriter(path, sides=2 if pairs else 1)) for split, path in paths.items()
        }
        self.held_out, self.duplicates = OverlapIndex(common), TrainDuplicates(common)
        self.archive, self.manifest = stack.enter_context(ImageArchive(folder)), ImageManifest()

    def rows(self, tally: SourceTally, reader: SourceReader, selection: RowSelection) -> Iterator[Row]:
        ordinal = -1
        for row in reader.rows():
            tally.records += tally.counts_records and (row.source, row.number) != tally.last
            tally.last = (row.source, row.number)
            ordinal += isinstance(row, Row)
            selection.require(ordinal, reader.source)
            if isinstance(row, BadRow):
                if tally.counts_records:
                    tally.read += 1
                    self.ledger.unusable(tally, row, row.reason, "fix or remove these rows")
            elif selection.elsewhere is None or not selection.elsewhere[ordinal]:
                tally.read += 1
                if selection.taken is None or selection.taken[ordinal]:
                    yield row
                else:
                    tally.dropped[selection.reason] += 1

    def examples(self, tally: SourceTally, reader: SourceReader, selection: RowSelection) -> None:
        for rows, chunk in self.pool.render(self.rows(tally, reader, selection)):
            kept = np.array([self._keeps(tally, row, chunk, at) for at, row in enumerate(rows)], bool)
            of_sequences = np.repeat(kept, np.array(chunk.examples, np.int64) * chunk.sides)
            of_tokens = np.repeat(of_sequences, chunk.lengths)
            tokens, lengths = chunk.tokens[of_tokens], chunk.lengths[of_sequences]
            tally.used += int(kept.sum())
            tally.examples += len(lengths) // chunk.sides
            tally.tokens += len(tokens)
            counts = [(at, count) for at in np.flatnonzero(kept) for count in chunk.num_images[at]]
            image_refs = [_with_row(rows[at], chunk.image_refs[at][:count]) for at, count in counts]
            supervised = chunk.supervised[of_tokens]
            tally.supervised_tokens += self.writers[tally.split].add(tokens, supervised, lengths, image_refs)

    def _keeps(self, tally: SourceTally, row: Row, chunk: RenderedChunk, at: int) -> bool:
        self.manifest.add(row.images, chunk.image_refs[at])
        if at in chunk.problems:
            self.ledger.unusable(tally, row, *chunk.problems[at])
            return False
        if at in chunk.too_long:
            self.ledger.drop(tally, row, "too long", chunk.too_long[at].removeprefix("too long: "))
            self.ledger.note("too long", tally.split, f"{row.place} {chunk.too_long[at]}")
            return False
        found = chunk.fingerprints[at]
        overlap = self.held_out.find(row, found, tally.split)
        if overlap is not None:
            other, is_from_train = overlap.other_split, tally.split == "train" or not tally.counts_records
            if self.data.overlap == "drop" and is_from_train:
                self.ledger.drop(tally, row, f"is in {other}", f"{overlap.other}, {overlap.how}")
                return False
            line = f"{row.place} ({tally.split}) is {overlap.other} ({other}): {overlap.how}"
            self.ledger.note("overlap", other, line)
        if tally.split == "train":
            self.duplicates.add(row, found)
        else:
            self.held_out.add_held(tally.split, row, found)
        self.ledger.repair(tally, row)
        if at in chunk.special:
            self.ledger.note("special token", tally.split, f"{row.place} holds {', '.join(chunk.special[at])}")
        self.ledger.note_marks(tally, row)
        if chunk.cut[at]:
            self.ledger.cut(tally, row, chunk.cut[at])
        self._use_images(tally, row, chunk.image_refs[at])
        return True

    def _use_images(self, tally: SourceTally, row: Row, image_refs: tuple[ImageRef, ...]) -> None:
        self.archive.keep(row.images, image_refs)
        self.manifest.use(tally.split, image_refs)
        tally.images += len(image_refs)

    def note_duplicates(self) -> None:
        counts, examples = self.duplicates.summary()
        if self.pairs:  # several pairs may well compare answers to one prompt
            counts, examples = {"row": counts.get("row", 0)}, [found for found in examples if found.kind == "row"]
        if count := sum(counts.values()):
            lines = tuple(f"{found.row} is {found.other}: {found.how}" for found in examples)
            fault = RowProblem(kind="duplicate", split="train", count=count, lines=lines)
            self.ledger.faults["duplicate", "train"] = fault

    def test_items(
        self, readers: Sequence[SourceReader], renderer: Renderer, seed: int, max_prompt_tokens: int | None
    ) -> tuple[int | None, Grids]:
        """Test rows keep their text, because a task builds its prompt and reads its reference from them. Returns the
        tokens of the longest prompt, and the grids of the row with the most pixels."""
        if not readers:
            return None, ()
        longest, most, sources = 0, tuple[ImageRef, ...](), self.data.test_sources()
        with (self.folder / "test.jsonl").open("w", encoding="utf-8") as file:
            for source, reader in zip(sources, readers, strict=True):
                tally = self.ledger.open("test", reader)
                rows = self.rows(tally, reader, sampled(reader, 1.0, source.limit, seed))
                for row, checked in self.pool.check_images(rows):
                    item, num_tokens = self._test_item(row, checked, renderer, tally, max_prompt_tokens)
                    longest = max(longest, num_tokens)
                    if item is not None:
                        file.write(item_line(replace(item, dataset=source.label) if len(sources) > 1 else item))
                        most = max(most, item.image_refs, key=lambda refs: sum(ref.num_values for ref in refs))
        return longest or None, tuple(ref.grid for ref in most)

    def _test_item(
        self, row: Row, checked: CheckedImages, renderer: Renderer, tally: SourceTally, max_prompt_tokens: int | None
    ) -> tuple[Row | None, int]:
        """Returns the item, or None if it cannot be used, and the tokens of its prompt."""
        self.manifest.add(row.images, () if isinstance(checked, str) else checked)
        if isinstance(checked, str):
            self.ledger.unusable(tally, row, checked, FIX_IMAGES)
            return None, 0
        seen = replace(row, image_refs=_with_row(row, checked))
        try:
            item = as_item(seen)
            tokens, whole = _prompt_tokens(renderer, item, self.data, max_prompt_tokens)
        except DataError as error:
            self.ledger.unusable(tally, row, error.problem, error.remedy)
            return None, 0
        if whole > len(tokens):
            self.ledger.cut(tally, row, whole - len(tokens))
        self.ledger.repair(tally, row)
        self.ledger.note_marks(tally, row)
        tally.used += 1
        tally.tokens += len(tokens)
        self._use_images(tally, row, seen.image_refs)
        self.pool.largest_token = max(self.pool.largest_token, *tokens)
        self.held_out.add_held("test", row, fingerprint(seen, with_system=self.pool.with_system))
        return item, len(tokens)


def _with_row(row: Row, image_refs: Sequence[ImageRef]) -> tuple[ImageRef, ...]:
    return tuple(replace(ref, row=row.place) for ref in image_refs)


def _prompt_tokens(renderer: Renderer, row: Row, data: Data, max_tokens: int | None) -> tuple[Sequence[int], int]:
    """Returns the model's input tokens (for plain text the longest window), and their number before the prompt was
    cut."""
    if row.kind == "text":
        (rendered,) = renderer.render([row], Budget(max_tokens=data.max_tokens, too_long="error", turns="last"))
        if rendered.problem:
            raise DataError(rendered.problem, rendered.remedy)
        longest = max((example.tokens for example in rendered.examples), key=len)
        return longest, len(longest)
    if row.images and not row.image_refs:
        raise DataError("holds images, which this model cannot see", "leave these rows out of data.test")
    tokens = whole = renderer.prompt_tokens(row.prompt, tools=row.tools, image_refs=row.image_refs)
    if max_tokens is not None and len(whole) > max_tokens:
        tokens = renderer.prompt_tokens(row.prompt, tools=row.tools, image_refs=row.image_refs, max_tokens=max_tokens)
    return tokens, len(whole)


def _sample(readers: Sequence[SourceReader]) -> list[Row]:
    """Samples enough of every source to detect templates, so that they do not count as similarity."""
    limits = {"max_rows": -(-SAMPLE_ROWS // max(1, len(readers))), "max_characters": 32 << 20}
    sources = ((row for row in reader.rows() if isinstance(row, Row)) for reader in readers)
    return [row for rows in sources for row in next(chunked(rows, **limits), [])]


def _close(
    writers: dict[str, ExampleWriter], table: NDArray[np.int64], prompt: int | None, prompt_grids: Grids, *, sides: int
) -> Lengths | None:
    """Writes each file for which there are rows."""
    train, validation = writers["train"], writers["validation"]
    all_held = np.arange(validation.num_examples)
    _, most = max(train.images.most_pixels(table), validation.images.most_pixels(all_held), key=lambda found: found[0])
    held = (int(validation.lengths.max()), int(validation.supervised_counts.max())) if validation.num_examples else None
    if held:
        validation.close(all_held)
    if not len(table):
        return None
    lengths, supervised = train.lengths[table], train.supervised_counts[table]
    train.close(table)
    return Lengths(
        num_rows=len(table),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        supervised=int(supervised.max()),
        mean_supervised=float(supervised.mean()),
        source="counted",
        validation=held,
        prompt=prompt,
        sides=sides,
        grids=tuple(ref.grid for ref in most),
        prompt_grids=prompt_grids,
    )
