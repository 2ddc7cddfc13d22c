"""The text of a spec: changes written into it, comments, order and quotes staying as the user wrote them; and values written out."""

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml import YAML

from finefit.errors import SpecError
from finefit.spec.reader import scalar

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_ODD = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def changed_text(text: str, changes: Sequence[str]) -> str:
    """`changes` as `--set` takes them: key.path=value. One of an item in a list that only the base has is refused: a list is replaced as a whole."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    document = yaml.load(text)
    for change in changes:
        key, value = change.split("=", 1)
        path = key.split(".")
        if (elsewhere := _list_elsewhere(document, path)) is not None:
            raise SpecError(
                f"{elsewhere} stands in {document.get('base', 'another file')}, so {change} cannot be written here",
                "change it there",
            )
        _set(document, path, YAML(typ="rt").load(value))
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


def dumped(values: dict[str, Any]) -> str:
    """As YAML that the reader gives back unchanged, odd characters included, as ruamel's writer does not: mappings in lines, lists within one."""
    return "".join(_lines(values, ""))


def _lines(values: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_inline(key)}:\n"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_inline(key)}: {_inline(value)}\n"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_inline(key)}: {_inline(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and scalar(value) == value else _quoted(value)
    return json.dumps(value)


def _quoted(text: str) -> str:
    """YAML ends lines where JSON does not."""
    return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _list_elsewhere(values: Any, path: Sequence[str]) -> str | None:
    """The key of a list that `path` reaches into and `values` do not hold."""
    for depth, key in enumerate(path):
        if key.isdigit() and not isinstance(values, list):
            return ".".join(path[:depth])
        values = values[int(key)] if isinstance(values, list) else values.get(key) if isinstance(values, dict) else None
    return None


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
