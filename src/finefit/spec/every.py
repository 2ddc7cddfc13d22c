"""`200 steps`, `epoch`, `15 minutes`: how often something happens, as users write it."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

_PATTERN = re.compile(r"^(?:([1-9][0-9]{0,8})\s*(steps?|minutes?)|(epoch))$")


class Interval(BaseModel):
    """`count` units; an epoch is always one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Literal["steps", "epoch", "minutes"]
    count: int = Field(1, ge=1)

    def __str__(self) -> str:
        return "epoch" if self.unit == "epoch" else f"{self.count} {self.unit}"


def _parse(value: Any) -> Any:
    if isinstance(value, Interval):
        return value
    match = _PATTERN.match(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no interval; write for instance `200 steps`, `epoch` or `15 minutes`")
    if match[3]:
        return {"unit": "epoch"}
    return {"unit": match[2].rstrip("s") + "s", "count": int(match[1])}


Every = Annotated[Interval, BeforeValidator(_parse), PlainSerializer(str, return_type=str)]
