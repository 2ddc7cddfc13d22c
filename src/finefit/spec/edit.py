"""Changes written into the text of a spec; comments, order and quotes stay as the user wrote them."""

import io
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML


def changed_text(text: str, changes: Sequence[str]) -> str:
    """`changes` as `--set` takes them: key.path=value."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    document = yaml.load(text)
    for change in changes:
        key, value = change.split("=", 1)
        _set(document, key.split("."), YAML(typ="rt").load(value))
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


def _set(values: Any, path: Sequence[str], new: Any) -> None:
    """What is no mapping gives way: `levers: auto` under `levers.micro_batch=4`."""
    *above, last = path
    for key in above:
        if isinstance(values, list):
            values = values[int(key)]
            continue
        if not isinstance(values.get(key), dict | list):
            values[key] = {}
        values = values[key]
    values[int(last) if isinstance(values, list) else last] = new
