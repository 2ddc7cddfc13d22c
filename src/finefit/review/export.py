"""Exports of a review: all verdicts as JSON lines or CSV, and preference pairs for training."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.errors import UserError
from finefit.review.items import PromptMessage, ReviewItem, ReviewSet, copy_images
from finefit.review.verdicts import (
    JournalEntry,
    Verdict,
    entries_about,
    majority_choices,
    unblinded_verdicts,
    valid_verdicts,
)


def verdict_rows(
    review_set: ReviewSet, entries: Sequence[JournalEntry], images: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """One per valid verdict, with the texts it is about. `images`: digest -> name; by default an image's own name."""
    kept = entries_about(entries, review_set)
    items = {item.key: item for item in review_set.items}
    unblinded = unblinded_verdicts(kept)
    return [
        _verdict_row(review_set, items[verdict.key], verdict, images or {}, is_blind=verdict.number not in unblinded)
        for verdict in valid_verdicts(kept)
    ]


def _verdict_row(
    review_set: ReviewSet, item: ReviewItem, verdict: Verdict, images: Mapping[str, str], *, is_blind: bool
) -> dict[str, Any]:
    preferred = {"first": 0, "second": 1}.get(verdict.choice)
    answers = zip(review_set.models, item.answers, verdict.reasons, strict=True)
    return {
        "id": item.key,
        "task": review_set.task,
        "place": item.place,
        "rater": verdict.rater,
        "at": verdict.at,
        "choice": verdict.choice,
        "preferred": None if preferred is None else review_set.models[preferred],
        "is_blind": is_blind,
        "shown_first": review_set.models[verdict.shown[0]],
        "note": verdict.note,
        "prompt": _prompt(item.prompt),
        **_image_names(review_set, item, images),
        "reference": item.reference,
        "answers": [{"model": model, "answer": answer, "reasons": list(why)} for model, answer, why in answers],
    }


def _image_names(review_set: ReviewSet, item: ReviewItem, images: Mapping[str, str]) -> dict[str, list[str]]:
    """As `data.train` reads them: if any item shows images, every row has the key."""
    if not any(other.images for other in review_set.items):
        return {}
    return {"images": [images.get(image.sha256, image.name) for image in item.images]}


def _prompt(messages: Sequence[PromptMessage]) -> str | list[dict[str, str]]:
    """As `data.train` reads it."""
    if not messages[0].role:
        return messages[0].text
    return [{"role": message.role, "content": message.text} for message in messages]


def export_verdicts(path: Path, review_set: ReviewSet, entries: Sequence[JournalEntry]) -> int:
    """Returns how many were written. The extension decides the format; images go into a folder next to the file."""
    format_rows = _FORMATS.get(path.suffix.lower())
    if format_rows is None:
        extension = path.suffix.lower() or "none"
        raise UserError(
            f"{path.name} has the extension {extension}, which is not a known format", "name it .jsonl or .csv"
        )
    judged = {verdict.key for verdict in valid_verdicts(entries_about(entries, review_set))}
    shown = (image for item in review_set.items if item.key in judged for image in item.images)
    rows = verdict_rows(review_set, entries, copy_images(path, shown))
    write_text(path, format_rows(rows))
    return len(rows)


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text, flat = io.StringIO(), [_flat(row) for row in rows]
    if flat:
        names = dict.fromkeys(name for row in flat for name in row)
        writer = csv.DictWriter(text, fieldnames=list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """One column for each model's answer."""
    flat = {name: value for name, value in row.items() if name not in ("answers", "images")}
    if isinstance(flat["prompt"], list):
        flat["prompt"] = "\n\n".join(f"{message['role']}: {message['content']}" for message in flat["prompt"])
    if "images" in row:
        flat["images"] = "; ".join(row["images"])
    for mark, answer in zip("ab", row["answers"], strict=False):
        flat[f"model_{mark}"] = answer["model"]
        flat[f"answer_{mark}"] = answer["answer"]
        flat[f"reasons_{mark}"] = "; ".join(answer["reasons"])
    return flat


_FORMATS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {".jsonl": _json_lines, ".csv": _csv}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    rows: tuple[dict[str, Any], ...]
    left_out: dict[str, int]
    """Reason -> number of items that gave no pair."""


def preference_pairs(
    review_set: ReviewSet, entries: Sequence[JournalEntry], images: Mapping[str, str] | None = None
) -> PreferencePairs:
    """With two models the better answer is chosen over the other; with one model the reference over a bad answer. Items
    on which raters disagree give no pair."""
    found = majority_choices(review_set, entries)
    rows, left_out = [], dict[str, int]()
    for item in review_set.items:
        pair = _pair(item, found.get(item.key))
        if isinstance(pair, str):
            left_out[pair] = left_out.get(pair, 0) + 1
            continue
        tools = {"tools": json.loads(item.tools)} if item.tools else {}
        beside = _image_names(review_set, item, images or {}) | tools
        rows.append({"prompt": _prompt(item.prompt), **beside, "chosen": pair[0], "rejected": pair[1]})
    return PreferencePairs(rows=tuple(rows), left_out=left_out)


def _pair(item: ReviewItem, choice: str | None) -> tuple[str, str] | str:
    """The chosen and the rejected answer, or why there is no pair."""
    match choice:
        case None:
            return "not judged"
        case "first":
            chosen, rejected = item.answers
        case "second":
            rejected, chosen = item.answers
        case "bad" if item.reference and item.is_reference_whole:
            chosen, rejected = item.reference, item.answers[0]
        case "bad" if item.is_reference_whole:
            return "bad, but without a reference to prefer"
        case "bad":
            return "bad, but the reference has tool calls or reasoning, which a pair cannot hold"
        case "split":
            return "raters disagree"
        case _:
            return {"good": "good", "tie": "tie", "skip": "skipped"}[choice]
    if item.is_rendered:
        return "prompt only known as rendered by a chat template"
    if not chosen.strip() or not rejected.strip():
        return "empty answer"
    return "equal answers" if chosen == rejected else (chosen, rejected)


def export_pairs(path: Path, review_set: ReviewSet, entries: Sequence[JournalEntry]) -> PreferencePairs:
    if path.suffix.lower() != ".jsonl":
        raise UserError(f"{path.name} is not a .jsonl file; pairs are JSON lines", f"name it {path.stem}.jsonl")
    found = majority_choices(review_set, entries)
    paired = [item for item in review_set.items if isinstance(_pair(item, found.get(item.key)), tuple)]
    images = copy_images(path, (image for item in paired for image in item.images))
    pairs = preference_pairs(review_set, entries, images)
    write_text(path, _json_lines(pairs.rows))
    return pairs
