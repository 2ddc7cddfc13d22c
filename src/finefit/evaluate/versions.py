"""What an answer is made with, whatever the task: answers of different versions are not mixed in one record."""

from finefit import __version__
from finefit.facts.machine import read_version

_DECIDING = ("torch", "transformers", "peft")


def made_with() -> dict[str, str]:
    return {"finefit": __version__} | {name: str(read_version(name)) for name in _DECIDING}
