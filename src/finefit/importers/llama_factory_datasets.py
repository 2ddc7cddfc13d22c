"""The datasets of a LLaMA-Factory config: its names are looked up in dataset_info.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finefit.importers import training as shared
from finefit.importers.documents import read_document
from finefit.importers.keys import Config, NotTrainedHere, Outcome, as_list, as_number, dropped, translated

_INFO = "dataset_info.json"
_NO_INFO = "dataset_info.json is not here, so the file of {names} is a guess: name it with --dataset-info"
_COLUMNS: Mapping[str, str | None] = {
    "prompt": "prompt",
    "response": "answer",
    "system": "system",
    "messages": "messages",
    "tools": "tools",
    "images": "images",
    "query": None,
    "history": None,
    "chosen": "chosen",
    "rejected": "rejected",
}
_ENTRY_KEYS = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "columns", "formatting", "ranking", "tags")


def datasets(value: Any, config: Config) -> Outcome:
    sources, problems = sources_of(value, config)
    settings = {"data.train": sources}
    if problems:
        return dropped("; ".join(dict.fromkeys(problems)), settings=settings)
    return translated(settings, "by its entries in dataset_info.json")


def tested(value: Any, config: Config) -> Outcome:
    (first, *others), problems = sources_of(value, config)
    held = {key: first[key] for key in ("path", "fields", "limit") if key in first}
    if others:
        problems.append("finefit validates on one source: the first is taken")
    settings = {"data.validation": held}
    return dropped("; ".join(problems), settings=settings) if problems else translated(settings)


def sources_of(value: Any, config: Config) -> tuple[list[dict[str, Any]], list[str]]:
    info, place = _read_info(config)
    sources, problems = [], []
    limit = {"limit": config.whole("max_samples")} if config.whole("max_samples") > 0 else {}
    for name in map(str, as_list(value)):
        entry = info.get(name)
        if isinstance(entry, Mapping):
            source, lost = _of_entry(entry, name, place, config)
            problems += lost
        else:
            source, is_here = _of_file(name, config)
            known = f"{place} has no dataset {name}" if info else _NO_INFO.format(names=name)
            problems += [] if is_here else [known]
        sources.append(source | limit)
    if not sources:
        raise NotTrainedHere(f"{config.where} names no dataset", "add one to it")
    return sources, problems


def _of_file(name: str, config: Config) -> tuple[dict[str, Any], bool]:
    """A dataset without an entry: a file of that name, or one in the folder of datasets."""
    folder = str(config.get("dataset_dir") or "data")
    for path in (name, f"{folder}/{name}.json", f"{folder}/{name}.jsonl"):
        if (place := config.find(path)) is not None and place.is_file():
            return {"path": config.written(place)}, True
    return {"path": f"{folder}/{name}.json"}, False


def _read_info(config: Config) -> tuple[Mapping[str, Any], Path]:
    folder = str(config.get("dataset_dir") or "data")
    place = config.dataset_info or config.find(f"{folder}/{_INFO}") or config.find(_INFO)
    if place is None:
        return {}, Path(folder) / _INFO
    return read_document(place / _INFO if place.is_dir() else place), place


def _of_entry(entry: Mapping[str, Any], name: str, info: Path, config: Config) -> tuple[dict[str, Any], list[str]]:
    problems = list(_lost(entry, name))
    if url := entry.get("hf_hub_url") or entry.get("ms_hub_url"):
        path = shared.hub_source(str(url), file=f"{entry['folder']}/*" if entry.get("folder") else None)
    elif file := entry.get("file_name"):
        place = (info if info.is_dir() else info.parent) / str(file)
        path = config.written(place)
        problems += [] if place.exists() else [f"{file}, the file of {name}, is not here"]
    else:
        raise NotTrainedHere(f"{config.where}: dataset {name} has neither a file nor a hub id", "correct its entry")
    fields = _fields(entry)
    limit = {"limit": round(as_number(entry["num_samples"], name, str(info)))} if entry.get("num_samples") else {}
    return {"path": path} | ({"fields": fields} if fields else {}) | limit, problems


def _lost(entry: Mapping[str, Any], name: str) -> Iterator[str]:
    if entry.get("subset"):
        yield f"{name}: subset {entry['subset']}: name its files in the path"
    if entry.get("split") not in (None, "train"):
        yield f"{name}: split {entry['split']}: name its files in the path"
    for key in entry:
        if key not in (*_ENTRY_KEYS, "subset", "split", "folder", "num_samples"):
            yield f"{name}: {key} is not carried over"
    for column in entry.get("columns") or {}:
        if column not in _COLUMNS:
            yield f"{name}: finefit trains on text and images, not on the column {column}"


def _fields(entry: Mapping[str, Any]) -> dict[str, str]:
    """Names the columns, unless finefit recognises them by their names."""
    columns = {key: str(column) for key, column in (entry.get("columns") or {}).items() if key in _COLUMNS}
    fields = {str(_COLUMNS[key]): column for key, column in columns.items() if _COLUMNS[key]}
    if entry.get("ranking"):
        if "messages" in fields:
            fields["prompt"] = fields.pop("messages")
        return fields if {"prompt", "chosen", "rejected"} <= fields.keys() else {}
    if "query" in columns and "prompt" in fields:
        fields["prompt"] = f"{{{columns['prompt']}}}\n{{{columns['query']}}}"
    if columns.keys() == {"prompt"}:
        return {"text": columns["prompt"]}
    if "messages" in fields:
        return {key: column for key, column in fields.items() if key in ("messages", "system", "tools", "images")}
    known = {"prompt", "answer"} <= fields.keys()
    return {key: column for key, column in fields.items() if key not in ("chosen", "rejected")} if known else {}
