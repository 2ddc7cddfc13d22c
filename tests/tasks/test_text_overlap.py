import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from finefit.data.rows import Row
from finefit.spec.schema import Evaluation
from finefit.stats.metrics import combined, interval_of, table
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task
from finefit.tasks.text_overlap import sentences, words
from tests.tasks.task_rows import counts_of, make_row, metrics_of

KINDS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
PAIRS = [
    (
        "The court dismissed the appeal. Costs were ordered.",
        "The appeal was dismissed by the court.\nCosts follow the event.",
    ),
    ("Running runners ran quickly; 3.5 miles!", "A runner runs 3.5 miles"),
    ("nothing in common", "whole other words"),
    ("the the the the", "the cat"),
    ("A b c.\nD e f.", "D e f.\nA b c."),
]
ASCII = st.text(st.characters(max_codepoint=127))


def _task(kind: str, **settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": kind, **settings}}))


_rouge = partial(_task, "rouge")


@pytest.mark.parametrize("stemmer", [True, False])
@pytest.mark.parametrize("tokenizer", ["unicode", "rouge"])
def test_rouge_of_english_is_the_mean_that_rouge_score_gives(tokenizer: str, stemmer: bool) -> None:
    task = _rouge(tokenizer=tokenizer, stemmer=stemmer, sentences="lines")
    scorer = RougeScorer(KINDS, use_stemmer=stemmer)
    scored = [scorer.score(reference, answer) for answer, reference in PAIRS]
    expected = {kind: sum(one[kind].fmeasure for one in scored) / len(PAIRS) for kind in KINDS}
    assert metrics_of(
        task, [make_row(reference) for _, reference in PAIRS], [answer for answer, _ in PAIRS]
    ) == pytest.approx(expected, abs=1e-12)


def test_split_sentences_are_what_rouge_score_gives_for_one_sentence_on_each_line() -> None:
    answer, reference = "One two three. Four five six.", "Four five six. One two three."
    expected = RougeScorer(["rougeLsum"], use_stemmer=True).score(
        "Four five six.\nOne two three.", "One two three.\nFour five six."
    )["rougeLsum"]
    assert metrics_of(_rouge(), [make_row(reference)], [answer])["rougeLsum"] == pytest.approx(expected.fmeasure) == 1.0
    assert metrics_of(_rouge(sentences="lines"), [make_row(reference)], [answer])["rougeLsum"] == pytest.approx(0.5)


@given(ASCII, st.booleans())
@example("His gas was the ties' 3rd, running_on", True)
def test_words_of_ascii_text_are_those_of_rouge_score(text: str, stemmer: bool) -> None:
    assert words(text, stemmer=stemmer) == RougeScorer(["rouge1"], use_stemmer=stemmer)._tokenizer.tokenize(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tôi đang ăn cơm.", ["tôi", "đang", "ăn", "cơm"]),
        ("To\u0302i", ["tôi"]),
        ("今天，天气好", ["今", "天", "天", "气", "好"]),
        ("GPT写代码 2x", ["gpt", "写", "代", "码", "2x"]),
        ("นี่ดี", ["นี่", "ดี"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("Ünïcode_naïve", ["ünïcode", "naïve"]),
    ],
)
def test_words_keep_the_letters_of_every_script(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize("text", ["Tôi đang ăn cơm", "今天天气好"])
def test_an_equal_answer_in_any_script_scores_one_and_rouge_scores_tokenizer_would_not_see_it(text: str) -> None:
    assert metrics_of(_rouge(), [make_row(text)], [text]) == dict.fromkeys(KINDS, 1.0)
    half = text[: len(text) // 2]
    assert 0 < metrics_of(_rouge(), [make_row(text)], [half])["rouge1"] < 1


def test_a_reference_that_the_tokenizer_sees_nothing_of_is_refused_with_the_way_out() -> None:
    with pytest.raises(NoResult, match="tokenizer: unicode"):
        _rouge(tokenizer="rouge").require(make_row("今天天气好"))
    with pytest.raises(NoResult, match="no word is left"):
        _rouge().require(make_row("!?"))
    _rouge().require(make_row("今天天气好"))


def test_the_nearest_of_several_references_counts() -> None:
    row = make_row("first words here", "quite another text")
    reading = _rouge().read(Reply(text="quite another text"), row)
    assert reading.reference == "quite another text"
    assert reading.counts["rouge1"] == 1.0


def test_of_several_references_each_kind_takes_the_best_as_rouge_score_does() -> None:
    """One reference has the words, the other their order."""
    references, answer = ["d c b a e", "a b c x y z w v"], "a b c d e"
    reading = _rouge(sentences="lines").read(Reply(text=answer), make_row(*references))
    expected = {
        kind: found.fmeasure
        for kind, found in RougeScorer(KINDS, use_stemmer=True).score_multi(references, answer).items()
    }
    assert reading.counts == pytest.approx(expected, abs=1e-12)
    assert reading.reference == references[0]
    assert all(
        reading.counts[kind] > _rouge().read(Reply(text=answer), make_row(references[0])).counts[kind]
        for kind in ("rouge2", "rougeL")
    )


@pytest.mark.parametrize("answer", ["", "  \n", "...", "!!!"])
def test_an_answer_without_a_word_halves_the_mean_of_two(answer: str) -> None:
    rows = [make_row("one two three"), make_row("one two three")]
    assert metrics_of(_rouge(), rows, ["one two three", answer]) == dict.fromkeys(KINDS, 0.5)
    with pytest.raises(NoResult):
        _rouge().read(Reply(text=answer), rows[0])


def test_the_signature_names_what_the_numbers_depend_on() -> None:
    ours, theirs = _rouge().signature, _rouge(tokenizer="rouge", stemmer=False, sentences="lines").signature
    assert {key for key in ours if ours[key] != theirs[key]} == {"tokenizer", "stemmer", "sentences"}
    assert ours["rouge"].startswith("rouge-score 0.")


def test_qmsum_is_rouge() -> None:
    task = make_task(Evaluation.model_validate({"task": "qmsum"}))
    assert task.name == "qmsum"
    rows, answers = [make_row(reference) for _, reference in PAIRS], [answer for answer, _ in PAIRS]
    assert metrics_of(task, rows, answers) == metrics_of(_rouge(), rows, answers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('He said "No." Then he left!\n\nWhy? …', ['He said "No."', "Then he left!", "Why?", "…"]),
        ("Version 3.5 is out", ["Version 3.5 is out"]),
        ("好。走吧！「是。」对", ["好。", "走吧！", "「是。」", "对"]),
        (" \n ", []),
    ],
)
def test_sentences_end_at_lines_and_full_stops(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text())
def test_no_character_but_space_is_lost_between_sentences(text: str) -> None:
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


TEXT = "the a court dismissed ordered appeal costs, company paid. was Été 今天 never, who (it) x y z"
WORDS = TEXT.split()


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


@pytest.mark.parametrize(
    ("kind", "settings", "signature"),
    [
        ("bleu", {}, "case:mixed|eff:no|tok:13a|smooth:exp|version:2."),
        ("bleu", {"tokenize": "zh", "lowercase": True}, "case:lc|eff:no|tok:zh|smooth:exp|version:2."),
        ("chrf", {"word_order": 2}, "case:mixed|eff:yes|nc:6|nw:2|space:no|version:2."),
    ],
)
def test_the_signature_is_sacrebleus(kind: str, settings: dict[str, Any], signature: str) -> None:
    task = _task(kind, **settings)
    assert task.signature["sacrebleu"].startswith(signature)
    assert [metric.name for metric in task.metrics] == [kind + "+" * settings.get("word_order", 0)]


def test_an_empty_reference_is_refused() -> None:
    with pytest.raises(NoResult, match="empty"):
        _task("bleu").require(make_row(" "))
