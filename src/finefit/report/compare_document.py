"""A comparison as `--json` prints it: the record itself. An end that an interval does not have is null."""

from pydantic import TypeAdapter

from finefit.compare.records import Comparison


def document(comparison: Comparison) -> str:
    return TypeAdapter(Comparison).dump_json(comparison, indent=2).decode()
