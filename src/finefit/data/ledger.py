"""The books of a preparation: what became of every row, by source, with the place of each that was dropped, cut or repaired."""

from collections import Counter
from dataclasses import asdict, dataclass, field

from finefit.artifacts.journal import Journal
from finefit.artifacts.trainings import Fault, LedgerRow, SourceLedger
from finefit.data.read import Reading
from finefit.data.rows import BadRow, Row

_SHOWN = 10


@dataclass(slots=True)
class Account:
    """Of one source, while its rows pass by."""

    split: str
    source: str
    shape: str
    mapping: dict[str, str]
    records: int = 0
    read: int = 0
    used: int = 0
    cut: int = 0
    cut_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: int = 0
    repeated: int = 0
    tokens: int = 0
    supervised: int = 0
    images: int = 0
    counts_records: bool = True
    _last: tuple[str, int] | None = None

    def see(self, row: Row | BadRow) -> None:
        """Every row of the files, whether it takes part in this split or not."""
        self.records += self.counts_records and (row.source, row.number) != self._last
        self._last = (row.source, row.number)

    def closed(self) -> SourceLedger:
        return SourceLedger(
            split=self.split,
            source=self.source,
            shape=self.shape,
            mapping=self.mapping,
            records=self.records,
            read=self.read,
            used=self.used,
            cut=self.cut,
            cut_tokens=self.cut_tokens,
            dropped=dict(self.dropped),
            examples=self.examples,
            repeated=self.repeated,
            tokens=self.tokens,
            supervised_tokens=self.supervised,
            images=self.images,
        )


@dataclass(slots=True)
class Book:
    """All that is written down while rows pass by."""

    journal: Journal
    accounts: list[Account] = field(default_factory=list)
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)

    def open(self, split: str, reading: Reading) -> Account:
        self.accounts.append(Account(split, reading.source, reading.shape.name, dict(reading.shape.mapping)))
        return self.accounts[-1]

    def open_share(self, split: str, reading: Reading) -> Account:
        """For rows of a file that another split counts the records of."""
        account = self.open(split, reading)
        account.counts_records = False
        return account

    def note(self, kind: str, split: str, line: str, remedy: str = "") -> None:
        old = self.faults.get((kind, split), Fault(kind=kind, split=split, count=0, lines=()))  # type: ignore[arg-type]
        lines = (*old.lines, line) if len(old.lines) < _SHOWN else old.lines
        remedies = dict.fromkeys(filter(None, (*old.remedy.split("\n"), remedy)))
        self.faults[kind, split] = Fault(
            kind=old.kind, split=split, count=old.count + 1, lines=lines, remedy="\n".join(remedies)
        )

    def drop(self, account: Account, row: Row | BadRow, reason: str, detail: str = "") -> None:
        account.dropped[reason] += 1
        self._write(account, row, "dropped", f"{reason}: {detail}" if detail else reason)

    def cut(self, account: Account, row: Row, tokens: int) -> None:
        account.cut += 1
        account.cut_tokens += tokens
        self._write(account, row, "cut", f"{tokens} tokens of the prompt")

    def repair(self, account: Account, row: Row) -> None:
        told = "; ".join(row.repairs)
        self._write(account, row, "repaired", told)
        self.note("repaired", account.split, f"{row.place} {told}")

    def _write(self, account: Account, row: Row | BadRow, what: str, reason: str) -> None:
        line = LedgerRow(
            split=account.split, source=row.source, row=row.number, part=row.part, what=what, reason=reason
        )  # type: ignore[arg-type]
        self.journal.write(**asdict(line))
