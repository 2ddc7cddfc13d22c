"""Whether sentences follow from their source, by an NLI model (transformers, sequence classification).

Models number their labels as they like, and some name them wrongly: which one means entailment is tried on known pairs before any answer is judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from finefit.data.tasks.words import SENTENCE_RULE, sentences
from finefit.errors import ModelError, SpecError
from finefit.spec.models import FolderModel, HubModel

Nli = HubModel | FolderModel
FOLLOWS: Final = (
    ("A man in a red shirt is playing the guitar on a stage.", "A man is playing an instrument."),
    ("The court dismissed the appeal and ordered the company to pay the costs.", "The appeal was dismissed."),
)
CONTRADICTS: Final = (
    ("A man in a red shirt is playing the guitar on a stage.", "There is no man on the stage."),
    ("The court dismissed the appeal and ordered the company to pay the costs.", "The court allowed the appeal."),
)
_MAX_TOKENS: Final = 512
_STRIDE: Final = 128
"""Tokens that windows of the source share, so that what bears a sentence out is not cut in two."""
_BATCH: Final = 32
_TRUE: Final = 0.5


def require_model(nli: Nli, base: Path | None) -> None:
    if isinstance(nli, FolderModel) and not (_place(nli, base) / "config.json").is_file():
        raise SpecError(
            f"summary: nli names the folder {nli.path}, which holds no model",
            "give a folder with config.json, relative to the spec file",
        )


def _place(nli: FolderModel, base: Path | None) -> Path:
    return (base or Path()) / nli.path


def entailment_signature(nli: Nli) -> dict[str, str]:
    name = nli.path if isinstance(nli, FolderModel) else f"{nli.id}@{nli.revision}"
    return {
        "nli": name,
        "faithful": f"share of sentences ({SENTENCE_RULE}) that some window of the source entails with a probability over {_TRUE}; "
        f"windows of at most {_MAX_TOKENS} tokens, {_STRIDE} shared",
    }


def faithfulness(nli: Nli, base: Path | None) -> Callable[[str, str], float]:
    """(source, answer) -> the share of the answer's sentences that the source entails; of an answer without any, 0."""
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
class _Judge:
    name: str
    tokenizer: Any
    model: Any
    device: str
    max_tokens: int

    def label(self, source: str, sentence: str) -> int:
        (probabilities,) = self.probabilities(source, sentence)
        return int(probabilities[0].argmax())

    def pieces(self, answer: str) -> Iterator[str]:
        """Sentences; an endless one in parts that leave half of the room to the source."""
        size = self.max_tokens // 2
        for sentence in sentences(answer):
            spans = self.tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
                "offset_mapping"
            ]
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
            with torch.inference_mode():
                logits = self.model(
                    **{name: found[at : at + _BATCH].to(self.device) for name, found in windows.items()}
                ).logits
            yield logits.float().softmax(dim=-1).cpu()


def _load(nli: Nli, base: Path | None) -> _Judge:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = str(_place(nli, base)) if isinstance(nli, FolderModel) else nli.id
    more: Mapping[str, str] = {} if isinstance(nli, FolderModel) else {"revision": nli.revision}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **more)
        model = AutoModelForSequenceClassification.from_pretrained(place, **more).eval().to(device)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the NLI model {place} cannot be loaded: {str(error).splitlines()[0]}",
            "give a model for sequence classification",
        ) from None
    if not tokenizer.is_fast:
        raise ModelError(
            f"the NLI model {place} has no fast tokenizer, which cuts the source into windows",
            "give a model with tokenizer.json",
        )
    limit = getattr(model.config, "max_position_embeddings", None) or _MAX_TOKENS
    return _Judge(name=place, tokenizer=tokenizer, model=model, device=device, max_tokens=min(_MAX_TOKENS, limit - 2))


def entailing_label(judge: _Judge) -> int:
    """Found by what the model does with known pairs; its own names for the labels must not say otherwise."""
    names = {int(at): str(name) for at, name in judge.model.config.id2label.items()}
    follows, contradicts = (_one_label(judge, pairs, names) for pairs in (FOLLOWS, CONTRADICTS))
    if follows == contradicts:
        raise ModelError(
            f"the NLI model {judge.name} calls what follows and what contradicts alike {names[follows]}",
            "name a model that can tell them apart",
        )
    for label, meaning, pair in ((follows, "entailment", FOLLOWS[0]), (contradicts, "contradiction", CONTRADICTS[0])):
        if _meaning(names[label]) not in (None, meaning):
            raise ModelError(
                f"the NLI model {judge.name} gives {pair[1]!r} after {pair[0]!r} the label {names[label]}, and it is {meaning}",
                "put id2label in the model's config.json right, or name another model",
            )
    return follows


def _meaning(name: str) -> str | None:
    """What a label's name says; None for LABEL_0 and its like."""
    plain = name.lower()
    if plain.startswith(("not", "non")) or "contra" in plain:
        return "contradiction"
    return "entailment" if "entail" in plain else "neutral" if "neutral" in plain else None


def _one_label(judge: _Judge, pairs: Sequence[tuple[str, str]], names: Mapping[int, str]) -> int:
    found = [judge.label(source, sentence) for source, sentence in pairs]
    if len(set(found)) > 1:
        raise ModelError(
            f"the NLI model {judge.name} calls known pairs of one kind {' and '.join(names[at] for at in found)}",
            "name a model that was trained for natural language inference",
        )
    return found[0]
