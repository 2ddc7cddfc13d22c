"""What a summary is worth beside its nearness to a reference: its length, its sections, what it copies, and whether its
source entails it.

Entailment is judged by an NLI model (transformers, sequence classification). Models number their labels freely, and
some name them wrongly: which label means entailment is tried on known pairs before any answer is judged."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finefit.data.rows import Row
from finefit.errors import ModelError, SpecError
from finefit.spec.models import FolderModel, HubModel
from finefit.spec.tasks import Rouge, Summary
from finefit.stats.metrics import Metric, mean
from finefit.tasks.task import NoResult, Reply, ScoredReply, Task, against_references
from finefit.tasks.text_overlap import (
    SENTENCE_RULE,
    ngrams,
    rouge_comparison,
    rouge_signature,
    rouge_text,
    sentences,
    words,
)

Nli = HubModel | FolderModel
FOLLOWS: Final = (
    ("A man in a red shirt is playing the guitar on a stage.", "A man is playing an instrument."),
    ("The court dismissed the appeal and ordered the company to pay the costs.", "The appeal was dismissed."),
)
CONTRADICTS: Final = (
    ("A man in a red shirt is playing the guitar on a stage.", "There is no man on the stage."),
    ("The court dismissed the appeal and ordered the company to pay the costs.", "The court allowed the appeal."),
)
_ROUGE = Rouge(kind="rouge")
_GRAM = 4
_BEFORE_HEADING = re.compile(r"^[\W\d_]+")
_AFTER_HEADING = re.compile(r"[\W_]*$|[\s*_]*[:：]")
_NOTHING = dict.fromkeys(
    ("rougeLsum", "words", "reference_words", "sections", "grams", "copied_grams", "density", "faithful"), 0.0
)
_MAX_TOKENS: Final = 512
_STRIDE: Final = 128
"""Tokens that windows of the source share, so that the evidence for a sentence is not cut in two."""
_BATCH: Final = 32
_TRUE: Final = 0.5


def summary(name: str, settings: Summary, base: Path | None) -> Task:
    nli = settings.nli
    if isinstance(nli, FolderModel) and not (_place(nli, base) / "config.json").is_file():
        problem = f"summary: nli names the folder {nli.path}, which holds no model"
        raise SpecError(problem, "give a folder with config.json, relative to the spec file")
    rouge, wanted = rouge_comparison(_ROUGE, ("rougeLsum",)), tuple(map(_heading, settings.sections))

    def compare(answer: str, reference: str) -> dict[str, float]:
        lengths = {"words": float(len(words(answer))), "reference_words": float(len(words(reference)))}
        return {**_NOTHING, **rouge(answer, reference), **lengths, "sections": _sections(answer, wanted)}

    task = against_references(
        name,
        metrics=_metrics(settings),
        extract=rouge_text(_ROUGE),
        compare=compare,
        nothing=lambda reference: _NOTHING | {"reference_words": float(len(words(reference)))},
        signature=_signature(settings),
    )

    def read(reply: Reply, row: Row) -> ScoredReply:
        found = task.read(reply, row)
        return replace(found, counts={**found.counts, **_copied(words(reply.text), words(_source_of(row)))})

    def require(row: Row) -> None:
        task.require(row)
        if not words(_source_of(row)):
            raise NoResult("its prompt holds no text that could be summarised")

    def finish(answered: Sequence[tuple[Row, Reply]]) -> list[Mapping[str, float]]:
        assert nli is not None
        faithful = faithfulness(nli, base)
        return [{"faithful": faithful(_source_of(row), reply.text)} for row, reply in answered]

    return replace(task, read=read, require=require, finish=None if nli is None else finish)


def _metrics(settings: Summary) -> tuple[Metric, ...]:
    lengths, grams = ("words", "reference_words"), ("copied_grams", "grams")
    return (
        mean("rougeLsum"),
        *((mean("faithful"),) if settings.nli is not None else ()),
        *((mean("sections"),) if settings.sections else ()),
        Metric(name="length_ratio", aggregate="ratio", counts=lengths, unit="number", better="neither"),
        Metric(name="copied", aggregate="ratio", counts=grams, better="neither"),
        mean("density", unit="number", better="neither"),
    )


def _signature(settings: Summary) -> dict[str, str]:
    found = rouge_signature(_ROUGE)
    found |= {"copied": f"{_GRAM}-grams of words that stand in the prompt", "density": "Grusky et al. 2018, in words"}
    if settings.sections:
        found["sections"] = ", ".join(settings.sections)
    if (nli := settings.nli) is not None:
        found["nli"] = nli.path if isinstance(nli, FolderModel) else f"{nli.id}@{nli.revision}"
        found["faithful"] = (
            f"share of sentences ({SENTENCE_RULE}) that some window of the source entails with a probability over "
            f"{_TRUE}; windows of at most {_MAX_TOKENS} tokens, {_STRIDE} shared"
        )
    return found


def _source_of(row: Row) -> str:
    """The user's messages, instructions included."""
    return "\n".join(message.content for message in row.prompt if message.role != "system")


# Sections and copied passages


def _heading(text: str) -> str:
    return _BEFORE_HEADING.sub("", text).strip().casefold() or text.strip().casefold()


def _sections(answer: str, wanted: Sequence[str]) -> float:
    """The share found at the start of a line, as `## Facts`, `1. Facts`, `**Facts:**` or `Facts: ...`."""
    lines = [_BEFORE_HEADING.sub("", line).casefold() for line in answer.splitlines()]

    def is_there(heading: str) -> bool:
        return any(line.startswith(heading) and _AFTER_HEADING.match(line[len(heading) :]) for line in lines)

    return sum(map(is_there, wanted)) / len(wanted) if wanted else 0.0


def _copied(answer: Sequence[str], source: Sequence[str]) -> dict[str, float]:
    """4-grams of the answer that the source has, and the mean length of the copied passage that a word belongs to
    (Grusky et al., 2018)."""
    grams, known = ngrams(answer, _GRAM), set(ngrams(source, _GRAM))
    squares = sum(length**2 for length in _passages(answer, source))
    density = squares / len(answer) if answer else 0.0
    return {"grams": float(len(grams)), "copied_grams": float(sum(gram in known for gram in grams)), "density": density}


def _passages(answer: Sequence[str], source: Sequence[str]) -> list[int]:
    """Lengths of the longest common passages, from left to right."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, pair in enumerate(ngrams(source, 2)):
        places[pair].append(at)
    known, at, lengths = set(source), 0, []
    while at < len(answer):
        starts = places.get(tuple(answer[at : at + 2]), ())
        length = max((_shared(answer, source, at, start) for start in starts), default=int(answer[at] in known))
        lengths += [length] if length else []
        at += max(1, length)
    return lengths


def _shared(answer: Sequence[str], source: Sequence[str], at: int, start: int) -> int:
    length = 0
    while at + length < len(answer) and start + length < len(source) and answer[at + length] == source[start + length]:
        length += 1
    return length


# Entailment


def _place(nli: FolderModel, base: Path | None) -> Path:
    return (base or Path()) / nli.path


def faithfulness(nli: Nli, base: Path | None) -> Callable[[str, str], float]:
    """(source, answer) -> the share of the answer's sentences that the source entails; 0 for an answer without any."""
    judge = _load(nli, base)
    entails = entailing_label(judge)

    def faithful(source: str, answer: str) -> float:
        judged = [
            any(bool((p[:, entails] > _TRUE).any()) for p in judge.probabilities(source, piece))
            for piece in judge.pieces(answer)
        ]
        return sum(judged) / len(judged) if judged else 0.0

    return faithful


@dataclass(frozen=True, slots=True, kw_only=True)
class _NliModel:
    name: str
    tokenizer: Any
    model: Any
    device: str
    max_tokens: int

    def label(self, source: str, sentence: str) -> int:
        (probabilities,) = self.probabilities(source, sentence)
        return int(probabilities[0].argmax())

    def pieces(self, answer: str) -> Iterator[str]:
        """Sentences; one that is too long in parts that leave half of the window to the source."""
        size = self.max_tokens // 2
        for sentence in sentences(answer):
            encoded = self.tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            spans = encoded["offset_mapping"]
            for at in range(0, len(spans), size):
                yield sentence[spans[at][0] : spans[min(at + size, len(spans)) - 1][1]]

    def probabilities(self, source: str, sentence: str) -> Iterator[torch.Tensor]:
        """Windows x labels, some windows at a time."""
        windows = self.tokenizer(
            source,
            sentence,
            truncation="only_first",
            max_length=self.max_tokens,
            stride=min(_STRIDE, self.max_tokens // 4),
            return_overflowing_tokens=True,
            padding=True,
            return_tensors="pt",
        )
        windows.pop("overflow_to_sample_mapping", None)
        for at in range(0, len(windows["input_ids"]), _BATCH):
            batch = {name: found[at : at + _BATCH].to(self.device) for name, found in windows.items()}
            with torch.inference_mode():
                logits = self.model(**batch).logits
            yield logits.float().softmax(dim=-1).cpu()


def _load(nli: Nli, base: Path | None) -> _NliModel:
    place = str(_place(nli, base)) if isinstance(nli, FolderModel) else nli.id
    more: Mapping[str, str] = {} if isinstance(nli, FolderModel) else {"revision": nli.revision}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **more)
        model = AutoModelForSequenceClassification.from_pretrained(place, **more).eval().to(device)
    except (OSError, ValueError) as error:
        problem = f"the NLI model {place} cannot be loaded: {str(error).splitlines()[0]}"
        raise ModelError(problem, "give a model for sequence classification") from None
    if not tokenizer.is_fast:
        problem = f"the NLI model {place} has no fast tokenizer, which cuts the source into windows"
        raise ModelError(problem, "give a model with tokenizer.json")
    limit = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    max_tokens = min(_MAX_TOKENS, limit - 2)
    return _NliModel(name=place, tokenizer=tokenizer, model=model, device=device, max_tokens=max_tokens)


def entailing_label(judge: _NliModel) -> int:
    """Found by the model's labels for known pairs; its names for the labels must not contradict them."""
    names = {int(at): str(name) for at, name in judge.model.config.id2label.items()}
    follows, contradicts = (_one_label(judge, pairs, names) for pairs in (FOLLOWS, CONTRADICTS))
    if follows == contradicts:
        problem = f"the NLI model {judge.name} gives entailment and contradiction the same label {names[follows]}"
        raise ModelError(problem, "name a model that can tell them apart")
    for label, meaning, pair in ((follows, "entailment", FOLLOWS[0]), (contradicts, "contradiction", CONTRADICTS[0])):
        if _meaning(names[label]) not in (None, meaning):
            problem = f"the NLI model {judge.name} gives {pair[1]!r} after {pair[0]!r} the label {names[label]}"
            remedy = "correct id2label in the model's config.json, or name another model"
            raise ModelError(f"{problem}, and it is {meaning}", remedy)
    return follows


def _meaning(name: str) -> str | None:
    """What a label's name says; None for LABEL_0 and the like."""
    plain = name.lower()
    if plain.startswith(("not", "non")) or "contra" in plain:
        return "contradiction"
    return "entailment" if "entail" in plain else "neutral" if "neutral" in plain else None


def _one_label(judge: _NliModel, pairs: Sequence[tuple[str, str]], names: Mapping[int, str]) -> int:
    found = [judge.label(source, sentence) for source, sentence in pairs]
    if len(set(found)) > 1:
        problem = f"the NLI model {judge.name} gives known pairs of one kind {' and '.join(names[at] for at in found)}"
        raise ModelError(problem, "name a model that was trained for natural language inference")
    return found[0]
