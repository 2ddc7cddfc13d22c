"""Everything that a rehearsal needs to know."""

from dataclasses import dataclass
from typing import Any, Literal

from finefit.artifacts.records import Levers
from finefit.spec.models import Tuning
from finefit.spec.schema import AdamW, Dpo, Objective, Sft

_SFT = Sft(kind="sft")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    config: dict[str, Any]
    tuning: Tuning
    optimizer: AdamW
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    precision: Literal["bf16", "fp16", "fp32"]
    levers: Levers
    tokens: int
    """Of the longest sequence; a micro-batch is padded to it, or packed into as much."""
    supervised: int
    """Tokens of a sequence."""
    accumulates: bool
    """Whether a step has more than one micro-batch: gradients then wait while the next one is computed."""
    objective: Objective = _SFT
    rows_per_step: int | None = None
    """No pack has more rows; None where that is not known."""
    validation: tuple[int, int] | None = None
    """Tokens and supervised tokens of the longest validation row; None where there are none."""
    grids: tuple[tuple[int, ...], ...] = ()
    """The images of the row with the most image tokens; every row is assumed to have them, validation rows too."""
    is_deterministic: bool = False
    """Then images are attended to one by one, not all by one kernel."""
    is_quick: bool = False
    """One micro-batch with gradients and optimizer state already there: enough to compare candidates, a little off in
    reserved memory, and without a gradient map."""

    @property
    def sides(self) -> int:
        """Sequences of a row: a preference pair has two."""
        return 2 if isinstance(self.objective, Dpo) else 1
