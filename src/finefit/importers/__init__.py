"""Configs of other fine-tuning tools as specs: a table of keys for each tool, whose every key is translated, declared
equal, or listed as not carried over."""

from collections.abc import Mapping
from typing import Any, Final

from finefit.importers.axolotl import AXOLOTL
from finefit.importers.keys import Tool
from finefit.importers.llama_factory import LLAMA_FACTORY
from finefit.importers.llama_factory_v1 import LLAMA_FACTORY_V1
from finefit.importers.torchtune import TORCHTUNE
from finefit.importers.trl import TRL
from finefit.importers.unsloth import UNSLOTH

TOOLS: Final[tuple[Tool, ...]] = (AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, TRL, UNSLOTH, TORCHTUNE)
_OTHERS: Final[Mapping[str, str]] = {
    "compute_environment": "a config of accelerate's launcher; give --devices N with the config of the training",
    "zero_optimization": "a config of DeepSpeed; import the config of the training that names it",
    "provider": "a config of axolotl's cloud launcher; import the config of the training",
    "test_value": "no training",
}
"""What a document with this key is."""
_ENOUGH = 2
"""Number of a tool's marks that identify its config: one alone may be a slip."""


def tool_of(values: Mapping[str, Any]) -> Tool | None:
    """Returns the tool whose config these values are; None if they are too few to tell."""
    if any(isinstance(part, dict) and part.get("_component_") for part in values.values()):
        return TORCHTUNE
    found = {tool.slug: len(tool.marks & values.keys()) for tool in TOOLS}
    tool = max(TOOLS, key=lambda one: found[one.slug])
    return tool if found[tool.slug] >= _ENOUGH else None


def what_is(values: Mapping[str, Any]) -> str | None:
    """Names a document that belongs to a training without being its config."""
    return next((what for key, what in _OTHERS.items() if key in values), None)
