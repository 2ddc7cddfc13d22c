"""Verdicts as files: all of them as JSON lines or CSV, and as preference pairs that a training can read."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import write_text
from finefit.errors import UserError
from finefit.review.exhibits import keep_beside
from finefit.review.results import decided
from finefit.review.stack import Said, Sheet, Stack
from finefit.review.verdicts import Entry, Verdict, of_stack, seen_before, standing


def verdict_rows(
    stack: Stack, entries: Sequence[Entry], images: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """One for each verdict that stands, with the texts it is about. `images`: what those are called, by digest; else by their own names."""
    kept = of_stack(entries, stack)
    sheets = {sheet.key: sheet for sheet in stack.sheets}
    informed = seen_before(kept)
    called = {} if images is None else images
    return [
        _row(stack, sheets[verdict.key], verdict, called, is_blind=verdict.number not in informed)
        for verdict in standing(kept)
    ]


def _row(stack: Stack, sheet: Sheet, verdict: Verdict, images: Mapping[str, str], *, is_blind: bool) -> dict[str, Any]:
    return {
        "id": sheet.key,
        "task": stack.task,
        "place": sheet.place,
        "rater": verdict.rater,
        "at": verdict.at,
        "choice": verdict.choice,
        "preferred": _preferred(stack, verdict),
        "is_blind": is_blind,
        "stood_first": stack.models[verdict.shown[0]],
        "note": verdict.note,
        "prompt": _plain(sheet.prompt),
        **_shown(stack, sheet, images),
        "reference": sheet.reference,
        "answers": [
            {"model": model, "answer": answer, "reasons": list(reasons)}
            for model, answer, reasons in zip(stack.models, sheet.answers, verdict.reasons, strict=True)
        ],
    }


def _shown(stack: Stack, sheet: Sheet, images: Mapping[str, str]) -> dict[str, list[str]]:
    """As `data.train` reads them: where one sheet shows images, each row says which."""
    if not any(other.images for other in stack.sheets):
        return {}
    return {"images": [images.get(exhibit.sha256, exhibit.name) for exhibit in sheet.images]}


def _offered(sheet: Sheet) -> dict[str, Any]:
    return {"tools": json.loads(sheet.tools)} if sheet.tools else {}


def _preferred(stack: Stack, verdict: Verdict) -> str | None:
    places = {"first": 0, "second": 1}
    return stack.models[places[verdict.choice]] if verdict.choice in places else None


def _plain(prompt: Iterable[Said]) -> str | list[dict[str, str]]:
    """As `data.train` reads it."""
    said = list(prompt)
    return said[0].text if not said[0].role else [{"role": one.role, "content": one.text} for one in said]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """For a table: one column for each model's answer."""
    flat = {name: value for name, value in row.items() if name not in ("answers", "images")}
    if isinstance(flat["prompt"], list):
        flat["prompt"] = "\n\n".join(f"{said['role']}: {said['content']}" for said in flat["prompt"])
    if "images" in row:
        flat["images"] = "; ".join(row["images"])
    for mark, answer in zip("ab", row["answers"], strict=False):
        flat |= {
            f"model_{mark}": answer["model"],
            f"answer_{mark}": answer["answer"],
            f"reasons_{mark}": "; ".join(answer["reasons"]),
        }
    return flat


def export_verdicts(path: Path, stack: Stack, entries: Sequence[Entry]) -> int:
    """How many were written. The extension says how; images lie in a folder beside the file."""
    written = _FORMATS.get(path.suffix.lower())
    if written is None:
        raise UserError(
            f"{path.name} has the extension {path.suffix.lower() or 'none'}, which says no format",
            "name it .jsonl or .csv",
        )
    judged = {verdict.key for verdict in standing(of_stack(entries, stack))}
    images = keep_beside(path, (exhibit for sheet in stack.sheets if sheet.key in judged for exhibit in sheet.images))
    rows = verdict_rows(stack, entries, images)
    write_text(path, written(rows))
    return len(rows)


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text, flat = io.StringIO(), [_flat(row) for row in rows]
    if flat:
        writer = csv.DictWriter(
            text, fieldnames=list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(flat)
    return text.getvalue()


_FORMATS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {".jsonl": _lines, ".csv": _csv}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Preference pairs, and what became of the other sheets."""

    rows: tuple[dict[str, Any], ...]
    left_out: dict[str, int]
    """Sheets by the reason why they are no pair."""


def preference_pairs(stack: Stack, entries: Sequence[Entry], images: Mapping[str, str] | None = None) -> Pairs:
    """Of two models the better answer over the other; of one the reference over an answer that is bad. What raters disagree on is no pair."""
    found = decided(stack, entries)
    rows, left_out = [], dict[str, int]()
    for sheet in stack.sheets:
        pair = _pair(sheet, found.get(sheet.key))
        if isinstance(pair, str):
            left_out[pair] = left_out.get(pair, 0) + 1
        else:
            beside = _shown(stack, sheet, images or {}) | _offered(sheet)
            rows.append({"prompt": _plain(sheet.prompt), **beside, "chosen": pair[0], "rejected": pair[1]})
    return Pairs(rows=tuple(rows), left_out=left_out)


def _pair(sheet: Sheet, choice: str | None) -> tuple[str, str] | str:
    """Preferred and rejected, or why there is none."""
    match choice:
        case None:
            return "not judged"
        case "first":
            chosen, rejected = sheet.answers
        case "second":
            rejected, chosen = sheet.answers
        case "bad" if sheet.reference and sheet.is_reference_whole:
            chosen, rejected = sheet.reference, sheet.answers[0]
        case "bad" if sheet.is_reference_whole:
            return "bad, and no reference to prefer"
        case "bad":
            return "bad, and a reference with tool calls or reasoning, which a pair does not carry"
        case "split":
            return "raters disagree"
        case _:
            return {"good": "good", "tie": "tie", "skip": "skipped"}[choice]
    if sheet.is_rendered:
        return "with a prompt that is only known as its template made it"
    if not chosen.strip() or not rejected.strip():
        return "an empty answer"
    return "both answers are the same" if chosen == rejected else (chosen, rejected)


def export_pairs(path: Path, stack: Stack, entries: Sequence[Entry]) -> Pairs:
    if path.suffix.lower() != ".jsonl":
        raise UserError(
            f"{path.name} is no .jsonl file, and pairs are written as JSON lines", f"name it {path.stem}.jsonl"
        )
    found = decided(stack, entries)
    paired = [sheet for sheet in stack.sheets if isinstance(_pair(sheet, found.get(sheet.key)), tuple)]
    pairs = preference_pairs(
        stack, entries, keep_beside(path, (exhibit for sheet in paired for exhibit in sheet.images))
    )
    write_text(path, _lines(pairs.rows))
    return pairs
