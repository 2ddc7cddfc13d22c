"""The datasets of an axolotl config: where their rows are, which columns they have, and how axolotl writes them."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finefit.importers import training as shared
from finefit.importers.keys import (
    Config,
    NotTrainedHere,
    Outcome,
    as_list,
    dropped,
    translated,
)

_PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALONE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Alpaca's published wording of a row with an input, and of one without."""
_ALPACA = (
    "prompts have Alpaca's wording, as in axolotl; rows without an input keep an empty `### Input:`, which axolotl "
    "leaves out"
)
_OWN_WORDING = (
    "axolotl writes these rows in a wording of its own; finefit writes them with the model's chat template, or with "
    "`data.template: plain` as they are"
)
_MIXED = (
    "axolotl writes alpaca rows as `### Instruction:` ... beside conversations; finefit has one template for all rows, "
    "the model's chat template"
)
_CHAT_TYPES = ("chat_template", "sharegpt", "orpo.chat_template")
_TEXT_TYPES = ("completion", "pretrain")
_KNOWN_DATASET = {
    *("path", "data_files", "ds_type", "revision", "trust_remote_code", "type", "split", "name", "chat_template"),
    *("shards_idx", "field_messages", "field", "field_chosen", "field_rejected", "text_column"),
    *("message_property_mappings", "message_field_role", "message_field_content"),
}
_MASKS = ("roles_to_train", "train_on_eos", "train_on_eot", "message_field_training", "train_on_last_step_only")
_ANSWERS_ALONE = (None, ["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"], "turn")
_SPLIT = re.compile(r"(\w+)(?:\[:?(\d+)(%?):?(\d*)%?\])?")

Entry = Mapping[str, Any]


def entries(config: Config) -> list[Entry]:
    found = config.get("datasets") or config.get("pretraining_dataset") or []
    return [entry for entry in (found if isinstance(found, list) else [found]) if isinstance(entry, Mapping)]


def template(config: Config) -> str | None:
    """Returns `plain` if axolotl writes no row of the config with a chat template."""
    found = entries(config)
    is_plain = all(_is_text(entry) or _is_alpaca(entry) or _is_custom(entry) for entry in found)
    return "plain" if found and is_plain else None


def wording(config: Config) -> Callable[[Entry], dict[str, str]] | None:
    """Returns how axolotl writes a record; None if it writes all as the spec does."""
    return _alpaca if template(config) and all(map(_is_alpaca, entries(config))) else None


def _alpaca(record: Entry) -> dict[str, str]:
    more = record.get("input")
    prompt = (_PAIRED if more else _ALONE).format(instruction=record.get("instruction"), input=more)
    return {"prompt": prompt, "answer": str(record.get("output"))}


def datasets(value: Any, config: Config) -> Outcome:
    sources, problems = [], []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            raise NotTrainedHere(f"{config.where}: a dataset is {entry!r}", "axolotl's datasets are mappings with path")
        found, entry_problems = source(entry, config)
        sources += found
        problems += entry_problems
    settings: dict[str, Any] = {"data.train": sources}
    if problems:
        return dropped("; ".join(dict.fromkeys(problems)), settings=settings)
    return translated(settings, "every row, in the shape that its columns show")


def tested(value: Any, config: Config) -> Outcome:
    found = datasets(value, config)
    first = found.settings["data.train"][0]
    held = {key: first[key] for key in ("path", "fields", "limit") if key in first}
    if len(found.settings["data.train"]) > 1:
        note = "finefit validates on one source: the first is taken"
        return dropped(note, settings={"data.validation": held})
    return translated({"data.validation": held})


def source(entry: Entry, config: Config) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the sources of an entry, and what is not carried over."""
    name = str(entry.get("path", ""))
    is_plain = template(config) is not None
    problems = list(_lost(entry, is_plain=is_plain))
    files = [str(file) for file in as_list(entry.get("data_files") or [])]
    if name in ("json", "csv", "parquet", "text", "arrow") and files:
        paths = [shared.source(config, file)[0] for file in files]
    elif (place := config.find(name)) is not None:
        paths = [config.written(place / file) for file in files] or [config.written(place)]
    elif files:
        paths = [shared.hub_source(name, file=file, revision=entry.get("revision")) for file in files]
    else:
        written = shared.source(config, name)[0]
        paths = [f"{written}@{entry['revision']}" if entry.get("revision") and "hf://" in written else written]
    extra = _fields(entry, is_plain=is_plain)
    split, problem = _split(str(entry.get("split") or "train"))
    problems += problem
    return [{"path": path} | extra | split for path in paths], problems


def _is_text(entry: Entry) -> bool:
    return str(entry.get("type", "")).startswith(_TEXT_TYPES)


def _is_chat(entry: Entry) -> bool:
    return str(entry.get("type", "")).startswith(_CHAT_TYPES)


def _is_alpaca(entry: Entry) -> bool:
    return entry.get("type") == "alpaca"


def _is_custom(entry: Entry) -> bool:
    """Whether the config itself says how rows are written."""
    return isinstance(entry.get("type"), Mapping)


def _lost(entry: Entry, *, is_plain: bool) -> Iterator[str]:
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        if kind.get("system_prompt") or kind.get("system_format"):
            yield "the system prompt of a custom type is not carried over"
        if kind.get("no_input_format") and "{input}" in _format(kind):
            yield "no_input_format: rows without an input are written like those with one"
    elif _is_alpaca(entry):
        yield _ALPACA if is_plain else _MIXED
    elif not (_is_chat(entry) or _is_text(entry)):
        yield f"type {kind}: {_OWN_WORDING}" if kind else "the dataset has no type"
        if kind and "." in str(kind):
            yield f"rows are built by Python code of axolotl, {kind}: finefit reads the columns as they are"
    if entry.get("name"):
        yield f"subset {entry['name']}: name its files in the path, as in hf://datasets/owner/name/files"
    for key in entry:
        if key in _MASKS and entry[key] not in _ANSWERS_ALONE:
            yield f"{key}: finefit trains on every answer and its end, and on nothing else"
        elif key not in (*_KNOWN_DATASET, *_MASKS, "roles", "field_thinking", "template_thinking_key"):
            yield f"datasets.{key} is not carried over"


def _fields(entry: Entry, *, is_plain: bool) -> dict[str, Any]:
    """Names the columns that axolotl is told of."""
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        return {"fields": _custom_fields(kind)}
    if _is_alpaca(entry):
        return {"fields": {"prompt": _PAIRED, "answer": "output"}} if is_plain else {}
    if _is_text(entry):
        return {"fields": {"text": str(entry.get("field") or entry.get("text_column") or "text")}}
    if (messages := entry.get("field_messages")) and not entry.get("field_chosen"):
        return {"fields": {"messages": str(messages)}}
    return {}


def _custom_fields(kind: Entry) -> dict[str, str]:
    """A type written in the config: its columns, and its `format` around them."""
    columns = {name: str(kind.get(f"field_{name}") or name) for name in ("instruction", "input", "output")}
    prompt = _format(kind)
    for name in ("instruction", "input"):
        prompt = prompt.replace(f"{{{name}}}", f"{{{columns[name]}}}")
    return {"prompt": prompt, "answer": columns["output"]}


def _format(kind: Entry) -> str:
    """The defaults are axolotl's."""
    if kind.get("field_input") or "{input}" in str(kind.get("format")):
        return str(kind.get("format") or "{instruction} {input} ")
    return str(kind.get("no_input_format") or kind.get("format") or "{instruction} ")


def _split(text: str) -> tuple[dict[str, Any], list[str]]:
    found = _SPLIT.fullmatch(text)
    if found is None:
        return {}, [f"split {text}: name its files in the path"]
    name, first, percent, _ = found.groups()
    problems = [] if name == "train" else [f"split {name}: name its files in the path"]
    if first is None:
        return {}, problems
    if percent:
        share = int(first) / 100
        if 0 < share < 1 and ":" in text:
            note = f"split {text}: the first {first} % of the rows; a seeded share of the same size takes their place"
            return {"weight": share}, [*problems, note]
        return {}, [*problems, f"split {text}: write a `limit` of rows"]
    note = f"split {text}: the first {first} rows; a seeded sample of as many takes their place"
    return {"limit": max(1, int(first))}, [*problems, note]
