"""Sources -> examples on disk and a ledger: every row is used, or dropped with a reason. Nothing is judged here; what was found is recorded.

Held-out rows come first, so that every training row can be compared with them as it streams by.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finefit.artifacts.forecasts import Lengths
from finefit.artifacts.journal import Journal
from finefit.artifacts.trainings import Fault, Preparation
from finefit.data.budget import Budget
from finefit.data.built import builder
from finefit.data.eyes import FAMILIES
from finefit.data.fingerprint import fingerprint, system_is_content
from finefit.data.items import as_item, item_line
from finefit.data.ledger import Account, Book
from finefit.data.looking import OwnEye, PictureKeeper, See, eye_of
from finefit.data.overlap import SAMPLE_ROWS, OverlapIndex, TrainDuplicates, common_windows
from finefit.data.pictures import Picture, shown_by
from finefit.data.pieces import MEND_IMAGES, Looked, Piece, Pieces, chunked, num_processes
from finefit.data.read import Reading, open_source
from finefit.data.render import Renderer, open_renderer
from finefit.data.rows import BadRow, Kind, Row
from finefit.data.selection import Choice, choices, sampled, weighted
from finefit.data.sightings import Sightings
from finefit.data.store import ExampleWriter
from finefit.errors import DataError
from finefit.facts.files import read_file
from finefit.spec.rows import Data

Grids = tuple[tuple[int, ...], ...]
"""Of the images of one row."""

_SAMPLE_CHARACTERS = 32 << 20
SPLITS = ("test", "validation", "train")
_TRAINS_ON: dict[Kind, tuple[str, str]] = {
    "pair": ("preference pairs", "fields: {prompt: prompt, answer: chosen}"),
    "judged": ("answers with a verdict", "fields: {prompt: prompt, answer: completion}"),
}
"""What a source of such rows holds, and how to name what is to be learnt of it."""
_NO_PAIRS: dict[Kind, str] = {"chat": "single answers", "judged": "answers with a verdict", "text": "plain text"}
"""What a source holds that nothing can be preferred in."""


def prepare(
    data: Data,
    *,
    base: Path,
    tokenizer: Path,
    seed: int,
    folder: Path,
    max_prompt_tokens: int | None = None,
    pairs: bool = False,
    see: See | None = None,
) -> Preparation:
    """Fills `folder` with train.safetensors, validation.safetensors, test.jsonl and ledger.jsonl, as far as the data goes; of rows with images also
    with those that came as bytes, and with where the others lie.

    `max_prompt_tokens`: longer prompts of test rows are cut. `pairs`: what is trained on are preference pairs. `see`: opens the model's eye, by
    default from what lies beside the tokenizer."""
    see = see or OwnEye(tokenizer, tokenizer / "config.json", data.images)
    renderer = open_renderer(tokenizer, data.template, template_options=data.template_options, eye=eye_of(see))
    sees = renderer.eye is not None
    readings, sides = _open_all(data, base, pairs=pairs, sees=sees), 2 if pairs else 1
    with ExitStack() as stack:
        book = Book(stack.enter_context(Journal(folder / "ledger.jsonl")))
        writers = {
            split: stack.enter_context(ExampleWriter(folder / f"{split}.safetensors", sides=sides))
            for split in ("train", "validation")
        }
        keeper, sightings = stack.enter_context(PictureKeeper(folder)), Sightings()
        sample = _sample(readings["train"])
        with_system = system_is_content(sample)
        common = common_windows(fingerprint(row, with_system=with_system) for row in sample)
        processes = num_processes(readings["train"], readings["test"] if sees else (), sees=sees)
        pieces = stack.enter_context(
            Pieces(renderer, data, tokenizer, processes=processes, see=see, with_system=with_system, pairs=pairs)
        )
        held_out, duplicates = OverlapIndex(common), TrainDuplicates(common)
        passing = _Passing(
            data=data,
            book=book,
            pieces=pieces,
            writers=writers,
            held_out=held_out,
            duplicates=duplicates,
            pairs=pairs,
            keeper=keeper,
            sightings=sightings,
        )
        prompt, most_asked = _test_items(readings["test"], renderer, passing, folder, seed, max_prompt_tokens)
        for reading in readings["validation"]:
            passing.examples(
                book.open("validation", reading),
                reading,
                sampled(reading, 1.0, data.validation.limit if data.validation else None, seed),
            )
        chosen = choices(data, readings["train"], seed, with_system=with_system)
        for reading, (held, _) in zip(readings["train"], chosen, strict=True):
            if held is not None:
                passing.examples(book.open_share("validation", reading), reading, held)
        table = [np.zeros(0, np.int64)]
        for source, reading, (_, choice) in zip(data.train, readings["train"], chosen, strict=True):
            account, begin = book.open("train", reading), writers["train"].num_examples
            passing.examples(account, reading, choice)
            table.append(weighted(begin, writers["train"].num_examples, source.weight, seed))
            account.repeated = len(table[-1]) - account.examples
        passing.note_duplicates()
        lengths = _closed(writers, np.concatenate(table), prompt, most_asked, sides=sides)
        keeper.close()
        sightings.write(folder)
        book.accounts.sort(key=lambda account: -SPLITS.index(account.split))
        for account in book.accounts:
            book.journal.write(**asdict(account.closed()))
    return Preparation(
        sources=tuple(account.closed() for account in book.accounts),
        faults=tuple(book.faults.values()),
        notes=renderer.notes,
        lengths=lengths,
        template_sha256=renderer.sha256(),
        largest_token=pieces.largest_token,
        pad_is_end=renderer.pad in renderer.stop_tokens,
        prompt_tokens=prompt,
        prompt_grids=most_asked,
        pictures_sha256=sightings.sha256,
        files={path.name: read_file(path, folder).sha256 for path in sorted(folder.iterdir())},
    )


def _open_all(data: Data, base: Path, *, pairs: bool, sees: bool) -> dict[str, list[Reading]]:
    """All sources, so that all that is wrong with them is told at once."""
    readings: dict[str, list[Reading]] = {}
    faults: list[DataError] = []
    build = builder(data.task, base=base)
    for split in SPLITS:
        readings[split] = []
        for source in data.sources()[split]:
            try:
                reading = replace(open_source(source, base, split=split), build=build)
                _require_kind(reading, split, pairs=pairs, sees=sees)
                readings[split].append(reading)
            except DataError as fault:
                faults.append(fault)
    if faults:
        raise DataError(
            "\n".join(f.problem for f in faults), "\n".join(dict.fromkeys(f.remedy for f in faults if f.remedy))
        )
    return readings


def _require_kind(reading: Reading, split: str, *, pairs: bool, sees: bool) -> None:
    row = next((row for row in reading.rows() if isinstance(row, Row)), None)
    if row is None:
        return
    if row.kind == "judged" and split == "test":
        raise DataError(
            f"{reading.source} holds answers with a verdict, of which some are wrong: they are no references",
            "take rows with right answers",
        )
    if pairs and split != "test" and row.kind != "pair":
        raise DataError(
            f"{reading.source} holds {_NO_PAIRS[row.kind]}, and objective dpo learns from pairs: an answer that is preferred and one that is not",
            "name the columns of both, for instance fields: {prompt: prompt, chosen: chosen, rejected: rejected}; or set objective: {kind: sft}",
        )
    if row.kind in _TRAINS_ON and split != "test" and not pairs:
        what, fields = _TRAINS_ON[row.kind]
        raise DataError(
            f"{reading.source} holds {what}, and supervised fine-tuning learns from answers",
            f"name what is to be learnt, for instance {fields}"
            + ("; objective: {kind: dpo} learns from both sides" if row.kind == "pair" else ""),
        )
    if row.images and not sees:
        raise DataError(
            f"{reading.source} holds images, which this model cannot see: its questions would be asked about nothing",
            f"take a model that sees ({', '.join(FAMILIES)}), or name the columns of text alone: fields: {{prompt: ..., answer: ...}}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passing:
    """Where rows go as they pass by."""

    data: Data
    book: Book
    pieces: Pieces
    writers: dict[str, ExampleWriter]
    held_out: OverlapIndex
    duplicates: TrainDuplicates
    pairs: bool
    keeper: PictureKeeper
    sightings: Sightings

    def rows(self, account: Account, reading: Reading, choice: Choice) -> Iterator[Row]:
        """Those that take part."""
        ordinal = -1
        for row in reading.rows():
            account.see(row)
            ordinal += isinstance(row, Row)
            choice.require(ordinal, reading.source)
            if isinstance(row, BadRow):
                if account.counts_records:
                    account.read += 1
                    self.unusable(account, row, row.reason, "mend or remove these rows")
            elif choice.elsewhere is None or not choice.elsewhere[ordinal]:
                account.read += 1
                if choice.taken is None or choice.taken[ordinal]:
                    yield row
                else:
                    account.dropped[choice.reason] += 1

    def examples(self, account: Account, reading: Reading, choice: Choice) -> None:
        for rows, piece in self.pieces(self.rows(account, reading, choice)):
            kept = np.array([self._keeps(account, row, piece, at) for at, row in enumerate(rows)], bool)
            of_sequences = np.repeat(kept, np.array(piece.examples, np.int64) * piece.sides)
            of_tokens = np.repeat(of_sequences, piece.lengths)
            tokens, supervised, lengths = (
                piece.tokens[of_tokens],
                piece.supervised[of_tokens],
                piece.lengths[of_sequences],
            )
            account.used += int(kept.sum())
            account.examples += len(lengths) // piece.sides
            account.tokens += len(tokens)
            shown = [
                shown_by(rows[at].place, piece.pictures[at][:count])
                for at in np.flatnonzero(kept)
                for count in piece.shown[at]
            ]
            account.supervised += self.writers[account.split].add(tokens, supervised, lengths, shown)

    def _keeps(self, account: Account, row: Row, piece: Piece, at: int) -> bool:
        """Whether the row is used; if not, the reason is written down."""
        self._sighted(row, piece.pictures[at])
        if at in piece.problems:
            self.unusable(account, row, *piece.problems[at])
            return False
        if at in piece.too_long:
            self.book.drop(account, row, "too long", piece.too_long[at].removeprefix("too long: "))
            self.book.note("too long", account.split, f"{row.place} {piece.too_long[at]}")
            return False
        found = piece.fingerprints[at]
        overlap = self.held_out.find(row, found, account.split)
        if overlap is not None:
            if self.data.overlap == "drop" and (
                account.split == "train" or not account.counts_records
            ):  # of train, or held out of it
                self.book.drop(account, row, f"stands in {overlap.other_split}", f"{overlap.other}, {overlap.how}")
                return False
            self.book.note(
                "overlap",
                overlap.other_split,
                f"{row.place} ({account.split}) is {overlap.other} ({overlap.other_split}): {overlap.how}",
            )
        if account.split == "train":
            self.duplicates.add(row, found)
        else:
            self.held_out.add_held(account.split, row, found)
        if row.repairs:
            self.book.repair(account, row)
        if at in piece.special:
            self.book.note("special token", account.split, f"{row.place} holds {', '.join(piece.special[at])}")
        if piece.cut[at]:
            self.book.cut(account, row, piece.cut[at])
        self.use(account, row, piece.pictures[at])
        return True

    def _sighted(self, row: Row, pictures: tuple[Picture, ...]) -> None:
        if pictures:
            self.sightings.add(row.images, pictures)
        else:
            self.sightings.add_faulty(row.images)

    def seen(self, account: Account, row: Row, looked: Looked) -> Row | None:
        """With what its images are; None where they cannot be used, and that is written down."""
        if isinstance(looked, str):
            self._sighted(row, ())
            self.unusable(account, row, looked, MEND_IMAGES)
            return None
        self._sighted(row, looked)
        return replace(row, pictures=shown_by(row.place, looked))

    def use(self, account: Account, row: Row, pictures: tuple[Picture, ...]) -> None:
        """The images of a row that is used."""
        self.keeper.keep(row.images, pictures)
        self.sightings.show(account.split, pictures)
        account.images += len(pictures)

    def note_duplicates(self) -> None:
        """Several pairs may well compare answers to one prompt."""
        report = self.duplicates.summary()
        count = report.exact if self.pairs else report.exact + report.prompt + report.normalised + report.near
        told = [found for found in report.examples if found.kind == "row" or not self.pairs]
        lines = tuple(f"{found.row} is {found.other}: {found.how}" for found in told)
        if count:
            self.book.faults["duplicate", "train"] = Fault(kind="duplicate", split="train", count=count, lines=lines)

    def unusable(self, account: Account, row: Row | BadRow, problem: str, remedy: str) -> None:
        self.book.drop(account, row, "unusable", problem)
        self.book.note("unusable", account.split, f"{row.place} {problem}", remedy)


def _test_items(
    readings: Sequence[Reading],
    renderer: Renderer,
    passing: _Passing,
    folder: Path,
    seed: int,
    max_prompt_tokens: int | None,
) -> tuple[int | None, Grids]:
    """Test rows keep their text: a task builds its prompt and reads its reference from them. Returns the tokens of the longest prompt, and what the
    row shows that shows most."""
    if not readings:
        return None, ()
    longest, most, sources = 0, tuple[Picture, ...](), passing.data.test_sources()
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        for source, reading in zip(sources, readings, strict=True):
            account = passing.book.open("test", reading)
            for row, looked in passing.pieces.looked(
                passing.rows(account, reading, sampled(reading, 1.0, source.limit, seed))
            ):
                item, num_tokens = _test_item(row, looked, renderer, passing, account, max_prompt_tokens)
                longest = max(longest, num_tokens)
                if item is not None:
                    file.write(item_line(replace(item, dataset=source.label) if len(sources) > 1 else item))
                    most = max(most, item.pictures, key=_num_values)
    return longest or None, _grids(most)


def _grids(pictures: Sequence[Picture]) -> Grids:
    return tuple(picture.grid for picture in pictures)


def _num_values(pictures: Sequence[Picture]) -> int:
    return sum(picture.num_values for picture in pictures)


def _test_item(
    row: Row, looked: Looked, renderer: Renderer, passing: _Passing, account: Account, max_prompt_tokens: int | None
) -> tuple[Row | None, int]:
    """None where it cannot be asked, and the tokens of its prompt."""
    book, seen = passing.book, passing.seen(account, row, looked)
    if seen is None:
        return None, 0
    try:
        item = as_item(seen)
        tokens, whole = _asked(renderer, item, passing.data, max_prompt_tokens)
    except DataError as fault:
        passing.unusable(account, row, fault.problem, fault.remedy)
        return None, 0
    if whole > len(tokens):
        book.cut(account, row, whole - len(tokens))
    if row.repairs:
        book.repair(account, row)
    account.used += 1
    account.tokens += len(tokens)
    passing.use(account, row, seen.pictures)
    passing.pieces.largest_token = max(passing.pieces.largest_token, *tokens)
    passing.held_out.add_held("test", row, fingerprint(seen, with_system=passing.pieces.with_system))
    return item, len(tokens)


def _asked(renderer: Renderer, row: Row, data: Data, max_tokens: int | None) -> tuple[Sequence[int], int]:
    """What the model is given at once, and how many tokens it had before it was cut; of plain text the longest window."""
    if row.kind != "text":
        return _prompt(renderer, row, max_tokens)
    (rendered,) = renderer.render([row], Budget(max_tokens=data.max_tokens, too_long="error", turns="last"))
    if rendered.problem:
        raise DataError(rendered.problem, rendered.remedy)
    longest = max((example.tokens for example in rendered.examples), key=len)
    return longest, len(longest)


def _prompt(renderer: Renderer, row: Row, max_tokens: int | None) -> tuple[list[int], int]:
    """Its tokens, and how many there were before it was cut."""
    if row.images and not row.pictures:
        raise DataError("holds images, which this model cannot see", "leave these rows out of data.test")
    whole = renderer.prompt_tokens(row.prompt, tools=row.tools, pictures=row.pictures)
    if max_tokens is None or len(whole) <= max_tokens:
        return whole, len(whole)
    return renderer.prompt_tokens(row.prompt, tools=row.tools, pictures=row.pictures, max_tokens=max_tokens), len(whole)


def _sample(readings: Sequence[Reading]) -> list[Row]:
    """Enough of every source to know what is a template, by which rows are not alike."""
    each = -(-SAMPLE_ROWS // max(1, len(readings)))
    firsts = [
        chunked(
            (row for row in reading.rows() if isinstance(row, Row)), max_rows=each, max_characters=_SAMPLE_CHARACTERS
        )
        for reading in readings
    ]
    return [row for first in firsts for row in next(first, [])]


def _closed(
    writers: dict[str, ExampleWriter], table: NDArray[np.int64], prompt: int | None, prompt_grids: Grids, *, sides: int
) -> Lengths | None:
    """The files are written as far as there are rows for them."""
    train, validation = writers["train"], writers["validation"]
    _, most = max(
        train.most_shown(table), validation.most_shown(np.arange(validation.num_examples)), key=lambda found: found[0]
    )
    held = (int(validation.lengths.max()), int(validation.supervised_counts.max())) if validation.num_examples else None
    if held:
        validation.close(np.arange(validation.num_examples))
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
        grids=_grids(most),
        prompt_grids=prompt_grids,
    )
