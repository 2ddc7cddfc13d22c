"""Metrics of the words that an answer shares with its references: ROUGE by rouge-score, BLEU and chrF by sacrebleu; and
the words and sentences in any script that they count, found by rules without data."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Final

import regex
from nltk.stem.porter import PorterStemmer
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from finefit.data.rows import Row
from finefit.spec.tasks import Bleu, Chrf, Rouge
from finefit.stats.metrics import Metric, mean
from finefit.tasks import NoResult, Reply, ScoredReply, Task, against_references, require_right, right_answers
from finefit.tasks.short_answer import stripped

ScoreReferences = Callable[[str, Sequence[str]], list[float]]
"""Maps (answer, references) to the nearness of the answer to each reference."""
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
SENTENCE_RULE: Final = "at line ends, at . ! ? … before a space, at 。！？"
_UNSPACED: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without spaces between words; each character, with the marks that belong to it, counts as one word."""
_WORD: Final = regex.compile(
    rf"[{_UNSPACED}--\p{{M}}]\p{{M}}*|[\p{{L}}\p{{M}}\p{{N}}--[{_UNSPACED}--\p{{M}}]]+", regex.VERSION1
)
_SENTENCE_END: Final = regex.compile(
    r"(?<=[.!?…][\"'”’»)\]]*)\s+|(?<=[。！？｡][”’」』）]*)(?![。！？｡”’」』）])|\n+", regex.VERSION1
)
_SENTENCE_BLEU: Final = BLEU(tokenize="intl")
_PORTER: Final = PorterStemmer()
_BLEU_COUNTS = ("length", "reference_length", *(f"{what}_{n}" for what in ("matched", "ngrams") for n in range(1, 5)))


def words(text: str, *, stemmer: bool = False) -> list[str]:
    """Words in lower case. For ASCII text they are those of rouge-score; only ASCII words are stemmed."""
    found = _WORD.findall(unicodedata.normalize("NFC", text).lower())
    return [_stem(word) if len(word) > 3 and word.isascii() else word for word in found] if stemmer else found


@lru_cache(1 << 16)
def _stem(word: str) -> str:
    stem: str = _PORTER.stem(word)
    return stem


def sentences(text: str) -> list[str]:
    return [sentence for part in _SENTENCE_END.split(text) if (sentence := part.strip())]


class _UnicodeTokenizer:
    """Implements the tokenizer interface of rouge-score."""

    def __init__(self, *, stemmer: bool) -> None:
        self._stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        return words(text, stemmer=self._stemmer)


def rouge(name: str, settings: Rouge) -> Task:
    """For every kind, the highest F that a reference gives."""
    return against_references(
        name,
        metrics=tuple(mean(kind) for kind in ROUGE_KINDS),
        extract=rouge_text(settings),
        compare=rouge_comparison(settings),
        best_of_each=True,
        signature=rouge_signature(settings) | {"references": "of each kind the highest F"},
    )


def rouge_comparison(settings: Rouge, kinds: Sequence[str] = ROUGE_KINDS) -> Callable[[str, str], dict[str, float]]:
    """Maps (answer, reference) to F of each kind."""
    scorer = RougeScorer(kinds, tokenizer=_tokenizer(settings))

    def in_lines(text: str) -> str:
        """One sentence per line, as rouge-score expects."""
        return "\n".join(sentences(text)) if settings.sentences == "split" else text

    def compare(answer: str, reference: str) -> dict[str, float]:
        scored = scorer.score(in_lines(reference), in_lines(answer))
        return {kind: float(found.fmeasure) for kind, found in scored.items()}

    return compare


def _tokenizer(settings: Rouge) -> _UnicodeTokenizer | DefaultTokenizer:
    is_unicode = settings.tokenizer == "unicode"
    return _UnicodeTokenizer(stemmer=settings.stemmer) if is_unicode else DefaultTokenizer(settings.stemmer)


def rouge_text(settings: Rouge) -> Callable[[str], str]:
    """Extracts an answer or reference that has at least one word."""
    tokenizer = _tokenizer(settings)

    def extract(text: str) -> str:
        if not tokenizer.tokenize(stripped(text)):
            hint = "; set tokenizer: unicode" if settings.tokenizer == "rouge" and words(text) else ""
            raise NoResult(f"no word is left of {text.strip()[:40]!r} to compare{hint}")
        return text.strip()

    return extract


def rouge_signature(settings: Rouge) -> dict[str, str]:
    of_every_script = "unicode: letters, marks and digits of every script"
    return {
        "rouge": f"rouge-score {version('rouge-score')}",
        "tokenizer": of_every_script if settings.tokenizer == "unicode" else "rouge-score's: a-z and 0-9",
        "stemmer": f"Porter, nltk {version('nltk')}" if settings.stemmer else "none",
        "sentences": SENTENCE_RULE if settings.sentences == "split" else "lines",
    }


def bleu(name: str, settings: Bleu) -> Task:
    counter = BLEU(tokenize=settings.tokenize, lowercase=settings.lowercase)
    return _corpus_task(name, Metric(name="bleu", aggregate="bleu", counts=_BLEU_COUNTS, unit="points"), counter)


def chrf(name: str, settings: Chrf) -> Task:
    counter = CHRF(word_order=settings.word_order)
    orders = [f"char_{n}" for n in range(1, counter.char_order + 1)]
    orders += [f"word_{n}" for n in range(1, counter.word_order + 1)]
    counts = tuple(f"{order}_{what}" for order in orders for what in ("answered", "wanted", "matched"))
    metric = Metric(name="chrf" + "+" * settings.word_order, aggregate="chrf", counts=counts, unit="points")
    return _corpus_task(name, metric, counter)


def _corpus_task(name: str, metric: Metric, counter: BLEU | CHRF) -> Task:
    """One score for all answers together, from statistics that sacrebleu counts for each of them. All references of an
    item count together, as in sacrebleu; a missing answer counts as an empty line."""

    def counted(text: str, row: Row) -> Mapping[str, float]:
        (found,) = counter._extract_corpus_statistics([text], [[reference] for reference in right_answers(row)])
        return dict(zip(metric.counts, map(float, found), strict=True))

    def read(reply: Reply, row: Row) -> ScoredReply:
        answer = stripped(reply.text)
        return ScoredReply(extracted=answer, counts=counted(answer, row))

    counter.num_refs = -1  # the signature leaves out the number of references, which differs between items
    signature = counter.get_signature()
    signature.update("nrefs", None)
    return Task(
        name=name,
        metrics=(metric,),
        read=read,
        nothing=lambda row: counted("", row),
        require=require_right,
        signature={"sacrebleu": str(signature)},
    )


def sentence_bleu(answer: str, references: Sequence[str]) -> list[float]:
    """The score of one answer against each reference, from 0 to 1, as TruthfulQA is scored."""
    return [_SENTENCE_BLEU.corpus_score([answer], [[reference]]).score / 100 for reference in references]
