"""What every part of a spec is: frozen, strict, an unknown key is an error."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


LABEL = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""It becomes the name of folders and files, and what follows a dot in these is not the user's."""
Share = Annotated[float, Field(ge=0, lt=1)]
