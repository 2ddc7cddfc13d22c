"""Configs of other fine-tuning tools that are given as specs, and keys of theirs in a spec: finefit's place for the
same setting, from the tables of keys that `finefit init --from` translates by."""

from collections.abc import Mapping, Sequence
from typing import Any

from finefit.importers import TOOLS, tool_of

_FURTHER: Mapping[str, str] = {
    "lr": "optimizer.lr",
    "lora": "tuning",
    "epochs": "schedule.epochs",
    "max_steps_per_epoch": "schedule.steps",
    "max_seq_len": "data.max_tokens",
    "train_file": "data.train",
    "gradient_checkpointing": "levers.recompute",
    "enable_activation_checkpointing": "levers.recompute",
    "torch_compile": "levers.compile",
    "sample_packing": "data.packing",
    "packing": "data.packing",
    "output_dir": "name (runs are written to runs/<name>-<n>)",
}
"""Keys that no table translates: they are planned, or belong to no config."""
PLACES: Mapping[str, str] = {
    **{key: entry.place for tool in reversed(TOOLS) for key, entry in tool.keys.items() if entry.place},
    **_FURTHER,
}
"""finefit's place for the setting of a foreign key."""
_OWN = ("model", "data", "stages", "base")


def place_of(path: Sequence[str | int]) -> str | None:
    """Returns finefit's place for the setting of an unknown key: at the top of a spec or stage any setting, in a
    section only the section's own, so that `evaluate.0.epochs` is not referred to the schedule."""
    place = PLACES.get(str(path[-1]))
    section = [str(key) for key in path[:-1]]
    if section[:1] == ["stages"]:
        section = section[2:]
    return place if place is not None and (not section or place.startswith(f"{section[0]}.")) else None


def tool_named(values: Mapping[str, Any]) -> str | None:
    """Returns the tool whose config these values are; None for a spec, with any number of foreign keys."""
    is_torchtune = any(isinstance(part, dict) and part.get("_component_") for part in values.values())
    if not is_torchtune and sum(key in values for key in _OWN) > 1:
        return None
    tool = tool_of(values)
    return None if tool is None else tool.name


def remedy(where: str) -> str:
    return f"`finefit init --from {where}` writes it as a spec, and says what is not carried over"
