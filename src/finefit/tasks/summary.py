"""Metrics of a summary beyond its nearness to a reference: its length, its sections, what it copies, and whether its
source entails it.

Entailment is judged by an NLI model (transformers, sequence classification). Models number their labels freely, and
some name them wrongly, so the label that means entailment is found on known pairs before any answer is judged.
"""

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
from finefit.facts.files import read_model_folder, reading_model
from finefit.spec.models import FolderModel, HubModel
from finefit.spec.tasks import Rouge, Summary
from finefit.stats.metrics import Metric, mean
from finefit.tasks import NoResult, Reply, ScoredReply, Task, against_references
from finefit.tasks.text_overlap import SENTENCE_RULE, rouge_comparison, rouge_signature, rouge_text, sentences, words

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
"""The number of tokens that windows of the source share, so that the evidence for a sentence is not cut in two."""
_BATCH: Final = 32
_TRUE: Final = 0.5


def summary(name: str, settings: Summary, base: Path | None) -> Task:
    nli, lengths = settings.nli, ("words", "reference_words")
    if isinstance(nli, FolderModel) and not ((base or Path()) / nli.path / "config.json").is_file():
        problem = f"summary: nli names the folder {nli.path}, which holds no model"
        raise SpecError(problem, "give a folder with config.json, relative to the spec file")
    metrics = [
        mean("rougeLsum"),
        Metric(name="length_ratio", aggregate="ratio", counts=lengths, unit="number", better="neither"),
        Metric(name="copied", aggregate="ratio", counts=("copied_grams", "grams"), better="neither"),
        mean("density", unit="number", better="neither"),
    ]
    signature = rouge_signature(_ROUGE) | {
        "copied": f"{_GRAM}-grams of words that stand in the prompt",
        "density": "Grusky et al. 2018, in words",
    }
    if settings.sections:
        metrics.insert(1, mean("sections"))
        signature["sections"] = ", ".join(settings.sections)
    if nli is not None:
        metrics.insert(1, mean("faithful"))
        signature["nli"] = nli.path if isinstance(nli, FolderModel) else f"{nli.id}@{nli.revision}"
        signature["faithful"] = (
            f"share of sentences ({SENTENCE_RULE}) that some window of the source entails with a probability over "
            f"{_TRUE}; windows of at most {_MAX_TOKENS} tokens, {_STRIDE} shared"
        )
    rouge = rouge_comparison(_ROUGE, ("rougeLsum",))

    def compare(answer: str, reference: str) -> dict[str, float]:
        found = {"words": float(len(words(answer))), "reference_words": float(len(words(reference)))}
        return {**_NOTHING, **rouge(answer, reference), **found, "sections": _sections(answer, settings.sections)}

    task = against_references(
        name,
        metrics=tuple(metrics),
        extract=rouge_text(_ROUGE),
        compare=compare,
        nothing=lambda reference: _NOTHING | {"reference_words": float(len(words(reference)))},
        signature=signature,
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


def _source_of(row: Row) -> str:
    """The user's messages, instructions included."""
    return "\n".join(message.content for message in row.prompt if message.role != "system")


def _sections(answer: str, headings: Sequence[str]) -> float:
    """The share of sections found at the start of a line, as `## Facts`, `1. Facts`, `**Facts:**` or `Facts: ...`."""
    lines = [_BEFORE_HEADING.sub("", line).casefold() for line in answer.splitlines()]
    found = 0
    for text in headings:
        heading = _BEFORE_HEADING.sub("", text).strip().casefold() or text.strip().casefold()
        found += any(line.startswith(heading) and _AFTER_HEADING.match(line[len(heading) :]) for line in lines)
    return found / len(headings) if headings else 0.0


def _copied(answer: Sequence[str], source: Sequence[str]) -> dict[str, float]:
    """The answer's 4-grams that also occur in the source, and the mean length of a word's copied passage (Grusky
    2018)."""
    grams, known = _ngrams(answer, _GRAM), set(_ngrams(source, _GRAM))
    squares = sum(length**2 for length in _passages(answer, source))
    density = squares / len(answer) if answer else 0.0
    return {"grams": float(len(grams)), "copied_grams": float(sum(gram in known for gram in grams)), "density": density}


def _ngrams(found: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(found[at : at + size]) for at in range(len(found) - size + 1)]


def _passages(answer: Sequence[str], source: Sequence[str]) -> list[int]:
    """Lengths of the longest common passages, from left to right."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, pair in enumerate(_ngrams(source, 2)):
        places[pair].append(at)
    known, at, lengths = set(source), 0, []
    while at < len(answer):
        longest = int(answer[at] in known)
        for start in places.get(tuple(answer[at : at + 2]), ()):
            end = min(len(answer) - at, len(source) - start)
            longest = max(longest, next((n for n in range(end) if answer[at + n] != source[start + n]), end))
        lengths += [longest] if longest else []
        at += max(1, longest)
    return lengths


def faithfulness(nli: Nli, base: Path | None) -> Callable[[str, str], float]:
    """(source, answer) -> the share of the answer's sentences that the source entails; 0 for an answer without any."""
    judge = _load(nli, base)
    entails = _entailing_label(judge)

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
        """Sentences; one that is too long is split into parts that leave half of the window to the source."""
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
    place = str((base or Path()) / nli.path) if isinstance(nli, FolderModel) else nli.id
    more: Mapping[str, str] = {} if isinstance(nli, FolderModel) else {"revision": nli.revision}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(nli, FolderModel):
        read_model_folder(Path(place))  # its files are whole, and no larger than a model's
    with reading_model(f"the NLI model {place}", "give a model for sequence classification"):
        tokenizer = AutoTokenizer.from_pretrained(place, **more)
        model = AutoModelForSequenceClassification.from_pretrained(place, **more).eval()
    model = model.to(device)
    if not tokenizer.is_fast:
        problem = f"the NLI model {place} has no fast tokenizer, which cuts the source into windows"
        raise ModelError(problem, "give a model with tokenizer.json")
    limit = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    max_tokens = min(_MAX_TOKENS, limit - 2)
    return _NliModel(name=place, tokenizer=tokenizer, model=model, device=device, max_tokens=max_tokens)


def _entailing_label(judge: _NliModel) -> int:
    """The index found from the model's labels for known pairs; its names for the labels must not contradict them."""
    names = {int(at): str(name) for at, name in judge.model.config.id2label.items()}
    labels: dict[str, int] = {}
    for meaning, pairs in (("entailment", FOLLOWS), ("contradiction", CONTRADICTS)):
        found = [judge.label(source, sentence) for source, sentence in pairs]
        if len(set(found)) > 1:
            kinds = " and ".join(names[at] for at in found)
            problem = f"the NLI model {judge.name} gives known pairs of one kind {kinds}"
            raise ModelError(problem, "name a model that was trained for natural language inference")
        labels[meaning] = found[0]
    if len(set(labels.values())) == 1:
        name = names[labels["entailment"]]
        problem = f"the NLI model {judge.name} gives entailment and contradiction the same label {name}"
        raise ModelError(problem, "name a model that can tell them apart")
    for (meaning, label), pair in zip(labels.items(), (FOLLOWS[0], CONTRADICTS[0]), strict=True):
        if _meaning(names[label]) not in (None, meaning):
            problem = f"the NLI model {judge.name} gives {pair[1]!r} after {pair[0]!r} the label {names[label]}"
            remedy = "correct id2label in the model's config.json, or name another model"
            raise ModelError(f"{problem}, and it is {meaning}", remedy)
    return labels["entailment"]


def _meaning(name: str) -> str | None:
    """The meaning of a label's name; None for LABEL_0 and the like."""
    plain = name.lower()
    if plain.startswith(("not", "non")) or "contra" in plain:
        return "contradiction"
    return "entailment" if "entail" in plain else "neutral" if "neutral" in plain else None
