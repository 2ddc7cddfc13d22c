"""Which records of a source are read: those that have what `where` names. The others are no rows of it, like files of another split."""

from collections.abc import Iterable, Iterator, Mapping

from finefit.data.cells import Fault, is_given, scalar
from finefit.data.records import Record
from finefit.data.rows import BadRow

Wanted = Mapping[str, tuple[str, ...]]
"""By column, the values that a record may have, as `scalar` writes them."""


def wanted_of(where: Mapping[str, object]) -> Wanted:
    return {
        name: tuple(scalar(value, name) for value in (values if isinstance(values, tuple) else (values,)))
        for name, values in where.items()
    }


def chosen(records: Iterable[Record | BadRow], wanted: Wanted) -> Iterator[Record | BadRow]:
    """A record that does not tell whether it is meant is a bad one."""
    for record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        try:
            if all(_value(record, name) in values for name, values in wanted.items()):
                yield record
        except Fault as fault:
            yield BadRow(record.source, record.number, str(fault))


def _value(record: Record, name: str) -> str:
    value = record.value.get(name)
    if not is_given(value):
        raise Fault(f"has no {name}, by which rows are chosen")
    return scalar(value, name)


def told(wanted: Wanted) -> str:
    return " and ".join(f"{name} = {' or '.join(values)}" for name, values in wanted.items())
