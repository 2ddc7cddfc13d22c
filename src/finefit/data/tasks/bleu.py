"""BLEU and chrF of all answers together, from statistics that sacrebleu counts for each of them."""

from collections.abc import Callable, Mapping, Sequence

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from finefit.data.rows import Row
from finefit.data.tasks.match import stripped
from finefit.data.tasks.references import require_right, right_answers
from finefit.data.tasks.task import Reading, Reply, Task
from finefit.spec.tasks import Bleu, Chrf
from finefit.stats.metrics import Metric

_BLEU_COUNTS = (
    "length",
    "reference_length",
    *(f"matched_{n}" for n in range(1, 5)),
    *(f"ngrams_{n}" for n in range(1, 5)),
)


def bleu(name: str, settings: Bleu) -> Task:
    metric = BLEU(tokenize=settings.tokenize, lowercase=settings.lowercase)
    return _corpus_task(name, Metric(name="bleu", aggregate="bleu", counts=_BLEU_COUNTS, unit="points"), metric)


def chrf(name: str, settings: Chrf) -> Task:
    metric = CHRF(word_order=settings.word_order)
    orders = [
        *(f"char_{n}" for n in range(1, metric.char_order + 1)),
        *(f"word_{n}" for n in range(1, metric.word_order + 1)),
    ]
    counts = tuple(f"{order}_{what}" for order in orders for what in ("answered", "wanted", "matched"))
    return _corpus_task(
        name, Metric(name="chrf" + "+" * settings.word_order, aggregate="chrf", counts=counts, unit="points"), metric
    )


def _corpus_task(name: str, metric: Metric, counter: BLEU | CHRF) -> Task:
    """All references of an item count together, as sacrebleu counts them; an item without an answer is to it an empty line."""

    def counted(text: str, row: Row) -> Mapping[str, float]:
        (found,) = counter._extract_corpus_statistics([text], [[reference] for reference in right_answers(row)])
        return dict(zip(metric.counts, map(float, found), strict=True))

    def read(reply: Reply, row: Row) -> Reading:
        answer = stripped(reply.text)
        return Reading(extracted=answer, counts=counted(answer, row))

    return Task(
        name=name,
        metrics=(metric,),
        read=read,
        nothing=lambda row: counted("", row),
        require=require_right,
        signature=_signature(counter),
    )


def _signature(counter: BLEU | CHRF) -> dict[str, str]:
    """Sacrebleu's own, less the number of references, which items may have more or less of."""
    counter.num_refs = -1
    signature = counter.get_signature()
    signature.update("nrefs", None)
    return {"sacrebleu": str(signature)}


Score = Callable[[str, Sequence[str]], list[float]]
"""(answer, references) -> how near it is to each."""


def sentence_bleu() -> Score:
    """Of one answer against one reference, from 0 to 1, as TruthfulQA is scored."""
    metric = BLEU(tokenize="intl")
    return lambda answer, references: [
        metric.corpus_score([answer], [[reference]]).score / 100 for reference in references
    ]
