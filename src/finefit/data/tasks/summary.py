"""What a summary is worth beside its nearness to a reference: its length, its sections, what it copies, and whether its source bears it out."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from finefit.data.rows import Row
from finefit.data.tasks.entailment import entailment_signature, faithfulness, require_model
from finefit.data.tasks.rouge import comparison, rouge_signature, worded
from finefit.data.tasks.task import NoResult, Reading, Reply, Task, against_references
from finefit.data.tasks.words import ngrams, words
from finefit.spec.tasks import Rouge, Summary
from finefit.stats.metrics import Metric, mean

_ROUGE = Rouge(kind="rouge")
_GRAM = 4
_BEFORE_HEADING = re.compile(r"^[\W\d_]+")
_AFTER_HEADING = re.compile(r"[\W_]*$|[\s*_]*[:：]")


def summary(name: str, settings: Summary, base: Path | None) -> Task:
    if settings.nli is not None:
        require_model(settings.nli, base)
    rouge, wanted = comparison(_ROUGE, ("rougeLsum",)), tuple(map(_heading, settings.sections))

    def compare(answer: str, reference: str) -> dict[str, float]:
        lengths = {"words": float(len(words(answer))), "reference_words": float(len(words(reference)))}
        return {**_NOTHING, **rouge(answer, reference), **lengths, "sections": _sections(answer, wanted)}

    task = against_references(
        name,
        metrics=_metrics(settings),
        extract=worded(_ROUGE),
        compare=compare,
        nothing=lambda reference: _NOTHING | {"reference_words": float(len(words(reference)))},
        signature=_signature(settings),
    )
    return _with_source(task, settings, base)


_NOTHING = dict.fromkeys(
    ("rougeLsum", "words", "reference_words", "sections", "grams", "copied_grams", "density", "faithful"), 0.0
)


def _metrics(settings: Summary) -> tuple[Metric, ...]:
    return (
        mean("rougeLsum"),
        *((mean("faithful"),) if settings.nli is not None else ()),
        *((mean("sections"),) if settings.sections else ()),
        Metric(
            name="length_ratio", aggregate="ratio", counts=("words", "reference_words"), unit="number", better="neither"
        ),
        Metric(name="copied", aggregate="ratio", counts=("copied_grams", "grams"), better="neither"),
        mean("density", unit="number", better="neither"),
    )


def _with_source(task: Task, settings: Summary, base: Path | None) -> Task:
    """What is compared with the prompt, which references know nothing of."""

    def read(reply: Reply, row: Row) -> Reading:
        reading = task.read(reply, row)
        return replace(reading, counts={**reading.counts, **_copied(words(reply.text), words(source_of(row)))})

    def require(row: Row) -> None:
        task.require(row)
        if not words(source_of(row)):
            raise NoResult("its prompt holds no text that could be summarised")

    def finish(answered: Sequence[tuple[Row, Reply]]) -> list[Mapping[str, float]]:
        assert settings.nli is not None
        faithful = faithfulness(settings.nli, base)
        return [{"faithful": faithful(source_of(row), reply.text)} for row, reply in answered]

    return replace(task, read=read, require=require, finish=None if settings.nli is None else finish)


def source_of(row: Row) -> str:
    """What the user gave, instructions included."""
    return "\n".join(message.content for message in row.prompt if message.role != "system")


def _heading(text: str) -> str:
    return _BEFORE_HEADING.sub("", text).strip().casefold() or text.strip().casefold()


def _sections(answer: str, wanted: Sequence[str]) -> float:
    """The share that stands at the start of a line, as `## Facts`, `1. Facts`, `**Facts:**` or `Facts: ...`."""
    lines = [_BEFORE_HEADING.sub("", line).casefold() for line in answer.splitlines()]
    there = sum(
        any(line.startswith(heading) and _AFTER_HEADING.match(line[len(heading) :]) for line in lines)
        for heading in wanted
    )
    return there / len(wanted) if wanted else 0.0


def _copied(answer: Sequence[str], source: Sequence[str]) -> dict[str, float]:
    """4-grams of the answer that the source has, and the mean length of the copied passage that a word belongs to (Grusky et al., 2018)."""
    grams, there = ngrams(answer, _GRAM), set(ngrams(source, _GRAM))
    squares = sum(length**2 for length in _passages(answer, source))
    density = squares / len(answer) if answer else 0.0
    return {"grams": float(len(grams)), "copied_grams": float(sum(gram in there for gram in grams)), "density": density}


def _passages(answer: Sequence[str], source: Sequence[str]) -> list[int]:
    """Lengths of the longest passages that both have, from left to right."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, pair in enumerate(ngrams(source, 2)):
        places[pair].append(at)
    known, at, lengths = set(source), 0, []
    while at < len(answer):
        length = max(
            (_shared(answer, source, at, start) for start in places.get(tuple(answer[at : at + 2]), ())),
            default=int(answer[at] in known),
        )
        lengths += [length] if length else []
        at += max(1, length)
    return lengths


def _shared(answer: Sequence[str], source: Sequence[str], at: int, start: int) -> int:
    length = 0
    while at + length < len(answer) and start + length < len(source) and answer[at + length] == source[start + length]:
        length += 1
    return length


def _signature(settings: Summary) -> dict[str, str]:
    own = {"copied": f"{_GRAM}-grams of words that stand in the prompt", "density": "Grusky et al. 2018, in words"}
    sections = {"sections": ", ".join(settings.sections)} if settings.sections else {}
    return (
        rouge_signature(_ROUGE)
        | own
        | sections
        | (entailment_signature(settings.nli) if settings.nli is not None else {})
    )
