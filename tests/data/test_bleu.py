import random
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from finefit.data.rows import Row
from finefit.data.tasks import NoResult, Reply, Task, make_task
from finefit.spec.schema import Evaluation
from finefit.stats import interval_of
from finefit.stats.metrics import combined, table
from tests.data.task_rows import counts_of, make_row, metrics_of

WORDS = [
    "the",
    "a",
    "court",
    "dismissed",
    "ordered",
    "appeal",
    "costs,",
    "company",
    "paid.",
    "was",
    "Été",
    "今天",
    "never,",
    "who",
    "(it)",
    "x",
    "y",
    "z",
]


def _task(kind: str, **settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": kind, **settings}}))


def _corpus(seed: int, *, num_references: int, longest: int = 12) -> tuple[list[Row], list[str]]:
    chance = random.Random(seed)

    def text(shortest: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(shortest, longest)))

    rows = [make_row(*dict.fromkeys(text(1) for _ in range(num_references))) for _ in range(20)]
    return rows, [row.answer if chance.random() < 0.2 else text(0) for row in rows]


def _streams(rows: list[Row]) -> list[list[str | None]]:
    """Sacrebleu takes references by columns, with None where an item has fewer."""
    references = [list(row.references or (row.answer,)) for row in rows]
    return [[one[at] if at < len(one) else None for one in references] for at in range(max(map(len, references)))]


@pytest.mark.parametrize("num_references", [1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("kind", "settings", "reference"),
    [
        ("bleu", {}, BLEU()),
        ("bleu", {"tokenize": "char", "lowercase": True}, BLEU(tokenize="char", lowercase=True)),
        ("bleu", {"tokenize": "intl"}, BLEU(tokenize="intl")),
        ("bleu", {"tokenize": "zh"}, BLEU(tokenize="zh")),
        ("bleu", {"tokenize": "none"}, BLEU(tokenize="none")),
        ("chrf", {}, CHRF()),
        ("chrf", {"word_order": 2}, CHRF(word_order=2)),
    ],
)
def test_the_corpus_value_is_sacrebleus(
    kind: str, settings: dict[str, Any], reference: BLEU | CHRF, seed: int, num_references: int
) -> None:
    rows, answers = _corpus(seed, num_references=num_references)
    (found,) = metrics_of(_task(kind, **settings), rows, answers).values()
    assert found == pytest.approx(reference.corpus_score(answers, _streams(rows)).score, abs=1e-9)  # type: ignore[arg-type]
    assert 0 < found < 100


@pytest.mark.parametrize(("kind", "reference"), [("bleu", BLEU()), ("chrf", CHRF())])
@pytest.mark.parametrize(
    "answers",
    [
        ["", ""],
        ["the", "court"],
        ["x", "the court dismissed the appeal"],
        ["y", "zz"],
        ["the y court zz appeal", "x y"],
    ],
)
def test_short_and_empty_corpora_are_sacrebleus_too(kind: str, reference: BLEU | CHRF, answers: list[str]) -> None:
    rows = [make_row("the court dismissed the appeal"), make_row("the court dismissed the appeal")]
    (found,) = metrics_of(_task(kind), rows, answers).values()
    assert found == pytest.approx(reference.corpus_score(answers, [[row.answer for row in rows]]).score, abs=1e-9)


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_rows_of_sums_are_combined_as_each_alone(kind: str) -> None:
    task = _task(kind)
    rows, answers = _corpus(5, num_references=1, longest=5)
    counts = table(
        task.metrics[0], [counts_of(task, row, Reply(text=answer)) for row, answer in zip(rows, answers, strict=True)]
    )
    together = combined(task.metrics[0], counts, 1)
    alone = [float(combined(task.metrics[0], one, 1)) for one in counts]
    assert together.tolist() == alone
    assert np.isfinite(together).all()
    assert len(set(alone)) > 3


@pytest.mark.parametrize("longest", [2, 12])
@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_the_interval_of_a_corpus_value_is_finite_and_around_it(kind: str, longest: int) -> None:
    task = _task(kind)
    rows, answers = _corpus(6, num_references=1, longest=longest)
    counts = table(
        task.metrics[0], [counts_of(task, row, Reply(text=answer)) for row, answer in zip(rows, answers, strict=True)]
    )
    found = interval_of(task.metrics[0], counts)
    assert 0 <= found.low <= found.value <= found.high <= 100
    assert found.low < found.high


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_an_item_without_an_answer_still_counts_with_all_its_reference(kind: str) -> None:
    """Left out, two perfect answers of three would be a perfect corpus."""
    text = "the court dismissed the appeal and ordered costs"
    rows = [make_row(text)] * 3
    assert metrics_of(_task(kind), rows, [text, text, text]) == pytest.approx({kind: 100})
    assert 40 < metrics_of(_task(kind), rows, [text, text, " "])[kind] < 80
    with pytest.raises(NoResult):
        _task(kind).read(Reply(text=" "), rows[0])


def test_the_signature_is_sacrebleus() -> None:
    assert _task("bleu").signature["sacrebleu"].startswith("case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert (
        _task("bleu", tokenize="zh", lowercase=True)
        .signature["sacrebleu"]
        .startswith("case:lc|eff:no|tok:zh|smooth:exp|version:2.")
    )
    assert (
        _task("chrf", word_order=2)
        .signature["sacrebleu"]
        .startswith("case:mixed|eff:yes|nc:6|nw:2|space:no|version:2.")
    )
    assert [metric.name for metric in _task("chrf", word_order=2).metrics] == ["chrf++"]


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(NoResult, match="empty"):
        _task("bleu").require(make_row(" "))
