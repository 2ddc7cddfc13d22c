"""All ranks go on from one checkpoint, or none does."""

from collections.abc import Sequence
from typing import Any

import pytest

from finefit.artifacts.records import read_record
from finefit.artifacts.trainings import Stage
from finefit.errors import RunError
from finefit.train.ranks import ONE_RANK
from finefit.train.saver import agreed_checkpoint
from tests.faults import Reference, finish, start


class _Beside:
    """One rank, and another that sees something else."""

    rank, size, is_first = 0, 2, True

    def __init__(self, other: str | None) -> None:
        self._other = other

    def any(self, claim: bool) -> bool:
        return claim

    def gather(self, value: Any) -> Sequence[Any]:
        return [value, self._other]

    def barrier(self) -> None:
        return


def test_ranks_that_find_different_checkpoints_are_named_before_a_weight_is_loaded(lora: Reference) -> None:
    where = lora.job.fresh()
    assert finish(start(where, lambda: None)) == 0
    stage = read_record(where.stage, Stage)
    found, _ = agreed_checkpoint(where, stage, ONE_RANK)
    assert found is not None
    assert agreed_checkpoint(where, stage, _Beside(found.name))[0] == found
    for other in ("checkpoint-3", None):
        with pytest.raises(RunError, match=f"rank 0: {found.name}; rank 1: {other or 'none'}"):
            agreed_checkpoint(where, stage, _Beside(other))
