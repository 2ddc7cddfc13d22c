"""The user's spec. This module has the base of every part (frozen, strict, no unknown keys) and shared types."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


class Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


LABEL = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""A label names folders and files, whose suffixes are finefit's own."""
Share = Annotated[float, Field(ge=0, lt=1)]
_PATTERN = re.compile(r"^(?:([1-9][0-9]{0,8})\s*(steps?|minutes?)|(epoch))$")


class Period(Part):
    """How often something happens, written `200 steps`, `epoch` or `15 minutes`."""

    unit: Literal["steps", "epoch", "minutes"]
    count: int = Field(1, ge=1)

    def __str__(self) -> str:
        return "epoch" if self.unit == "epoch" else f"{self.count} {self.unit}"


def require_labels(problem: str, labels: Sequence[str]) -> None:
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"{problem} called {', '.join(twice)}; give them a name each")


def _parse(value: Any) -> Any:
    if isinstance(value, Period):
        return value
    match = _PATTERN.match(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not an interval; write for instance `200 steps`, `epoch` or `15 minutes`")
    if match[3]:
        return {"unit": "epoch"}
    return {"unit": match[2].rstrip("s") + "s", "count": int(match[1])}


Every = Annotated[Period, BeforeValidator(_parse), PlainSerializer(str, return_type=str)]
