"""ROUGE of an answer against its references, by rouge-score: of each kind the highest that one of them gives."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from finefit.data.tasks.match import stripped
from finefit.data.tasks.task import NoResult, Task, against_references
from finefit.data.tasks.words import SENTENCE_RULE, sentences, words
from finefit.spec.tasks import Rouge
from finefit.stats.metrics import mean

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
Compare = Callable[[str, str], Mapping[str, float]]


class _UnicodeTokenizer:
    """What rouge-score takes for a tokenizer."""

    def __init__(self, *, stemmer: bool) -> None:
        self._stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        return words(text, stemmer=self._stemmer)


def comparison(settings: Rouge, kinds: tuple[str, ...] = KINDS) -> Compare:
    """(answer, reference) -> F of each kind."""
    scorer = RougeScorer(kinds, tokenizer=_tokenizer(settings))

    def compare(answer: str, reference: str) -> dict[str, float]:
        scored = scorer.score(*(_in_lines(text, settings) for text in (reference, answer)))
        return {kind: float(found.fmeasure) for kind, found in scored.items()}

    return compare


def _tokenizer(settings: Rouge) -> _UnicodeTokenizer | DefaultTokenizer:
    return (
        _UnicodeTokenizer(stemmer=settings.stemmer)
        if settings.tokenizer == "unicode"
        else DefaultTokenizer(settings.stemmer)
    )


def _in_lines(text: str, settings: Rouge) -> str:
    """A sentence on each line, which is what rouge-score takes for one."""
    return "\n".join(sentences(text)) if settings.sentences == "split" else text


def worded(settings: Rouge) -> Callable[[str], str]:
    """An answer or a reference in which there is a word to compare."""
    tokenizer = _tokenizer(settings)

    def extract(text: str) -> str:
        if not tokenizer.tokenize(stripped(text)):
            hint = "; set tokenizer: unicode" if settings.tokenizer == "rouge" and words(text) else ""
            raise NoResult(f"no word is left of {text.strip()[:40]!r} to compare{hint}")
        return text.strip()

    return extract


def rouge_signature(settings: Rouge) -> dict[str, str]:
    return {
        "rouge": f"rouge-score {version('rouge-score')}",
        "tokenizer": "unicode: letters, marks and digits of every script"
        if settings.tokenizer == "unicode"
        else "rouge-score's: a-z and 0-9",
        "stemmer": f"Porter, nltk {version('nltk')}" if settings.stemmer else "none",
        "sentences": SENTENCE_RULE if settings.sentences == "split" else "lines",
    }


def rouge(name: str, settings: Rouge) -> Task:
    return against_references(
        name,
        metrics=tuple(mean(kind) for kind in KINDS),
        extract=worded(settings),
        compare=comparison(settings),
        best_of_each=True,
        signature=rouge_signature(settings) | {"references": "of each kind the highest F"},
    )
