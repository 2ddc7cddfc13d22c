"""Exports of a review: all verdicts as JSON lines or CSV, and preference pairs for training."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.errors import UserError
from finefit.review.items import PromptMessage, ReviewItem, ReviewSet, copy_images
from finefit.review.verdicts import JournalEntry, entries_about, majority_choices, unblinded_verdicts, valid_verdicts


def _verdict_rows(
    review_set: ReviewSet, entries: Sequence[JournalEntry], images: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """One row per valid verdict, with the texts that it is about. `images` maps a digest to a name."""
    kept, models = entries_about(entries, review_set), review_set.models
    items = {item.key: item for item in review_set.items}
    unblinded = unblinded_verdicts(kept)
    for verdict in valid_verdicts(kept):
        item, preferred = items[verdict.key], {"first": 0, "second": 1}.get(verdict.choice)
        answers = zip(models, item.answers, verdict.reasons, strict=True)
        yield {
            "id": item.key,
            "task": review_set.task,
            "place": item.place,
            "rater": verdict.rater,
            "at": verdict.at,
            "choice": verdict.choice,
            "preferred": None if preferred is None else models[preferred],
            "is_blind": verdict.number not in unblinded,
            "shown_first": models[verdict.shown[0]],
            "note": verdict.note,
            "prompt": _prompt(item.prompt),
            **_image_names(review_set, item, images),
            "reference": item.reference,
            "answers": [{"model": model, "answer": answer, "reasons": list(why)} for model, answer, why in answers],
        }


def _image_names(review_set: ReviewSet, item: ReviewItem, images: Mapping[str, str]) -> dict[str, list[str]]:
    """The images under the key that `data.train` reads. If any item has images, every row has the key."""
    if not any(other.images for other in review_set.items):
        return {}
    return {"images": [images.get(image.sha256, image.name) for image in item.images]}


def _prompt(messages: Sequence[PromptMessage]) -> str | list[dict[str, str]]:
    """The prompt as `data.train` reads it."""
    if not messages[0].role:
        return messages[0].text
    return [{"role": message.role, "content": message.text} for message in messages]


def export_verdicts(path: Path, review_set: ReviewSet, entries: Sequence[JournalEntry]) -> int:
    """Returns the number of verdicts written. The extension decides the format; images go into a folder next to the
    file."""
    extension = path.suffix.lower()
    if extension not in (".jsonl", ".csv"):
        problem = f"{path.name} has the extension {extension or 'none'}, which is not a known format"
        raise UserError(problem, "name it .jsonl or .csv")
    judged = {verdict.key for verdict in valid_verdicts(entries_about(entries, review_set))}
    shown = (image for item in review_set.items if item.key in judged for image in item.images)
    rows = list(_verdict_rows(review_set, entries, copy_images(path, shown)))
    write_text(path, _json_lines(rows) if extension == ".jsonl" else _csv(rows))
    return len(rows)


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A CSV table with one column for each model's answer."""
    text, lines = io.StringIO(), []
    for row in rows:
        line = {name: value for name, value in row.items() if name not in ("answers", "images")}
        if isinstance(line["prompt"], list):
            line["prompt"] = "\n\n".join(f"{message['role']}: {message['content']}" for message in line["prompt"])
        if "images" in row:
            line["images"] = "; ".join(row["images"])
        for mark, answer in zip("ab", row["answers"], strict=False):
            line[f"model_{mark}"], line[f"answer_{mark}"] = answer["model"], answer["answer"]
            line[f"reasons_{mark}"] = "; ".join(answer["reasons"])
        lines.append(line)
    if lines:
        names = dict.fromkeys(name for line in lines for name in line)
        writer = csv.DictWriter(text, fieldnames=list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    rows: tuple[dict[str, Any], ...]
    left_out: dict[str, int]
    """Maps a reason to the number of items that gave no pair."""


def preference_pairs(
    review_set: ReviewSet, entries: Sequence[JournalEntry], images: Mapping[str, str] | None = None
) -> PreferencePairs:
    """With two models, the better answer is chosen over the other; with one model, the reference over a bad answer.
    Items on which raters disagree give no pair."""
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
        case _:
            reasons = {None: "not judged", "good": "good", "tie": "tie", "skip": "skipped", "split": "raters disagree"}
            return reasons[choice]
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
