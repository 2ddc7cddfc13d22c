"""Cases of a parametrised test of which only a few run in `make test`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow_but(quick: Collection[Any], cases: Mapping[str, Any] | Iterable[Any]) -> list[ParameterSet]:
    """All cases, by name where they have one; those that are not `quick` are slow proofs of the same claim."""
    named = cases.items() if isinstance(cases, Mapping) else ((case, case) for case in cases)
    found = []
    for name, case in named:
        values = case if isinstance(case, tuple) else (case,)
        key = str(name) if isinstance(name, str) else "-".join(map(str, values))
        found.append(pytest.param(*values, id=key, marks=() if name in quick else pytest.mark.slow))
    return found
