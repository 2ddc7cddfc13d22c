"""Tasks on the likelihood of given answers."""

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu

from finefit.data.prepare import prepare
from finefit.data.rows import Message, Row, as_item, item_line, read_items
from finefit.errors import DataError, RunError, SpecError
from finefit.evaluate.score import score_item
from finefit.spec.data import Data, Source
from finefit.spec.schema import Evaluation
from finefit.stats.metrics import value
from finefit.tasks import NoResult, Reply, Task
from finefit.tasks.make import make_task
from tests.conftest import make_tokenizer, write_jsonl
from tests.tasks.task_rows import counts_of, make_likelihood, make_row


def _task(kind: str) -> Task:
    return make_task(Evaluation.model_validate({"task": kind}))


def test_the_wrong_answer_is_preferred_by_its_likelihood_per_token_not_as_a_whole() -> None:
    row = make_row("right", wrong=("long wrong", "short wrong"))
    reply = Reply(
        right=(make_likelihood(-2.0, 2),),
        wrong=(make_likelihood(-6.0, 10, "long wrong"), make_likelihood(-1.5, 1, "short wrong")),
    )
    reading = _task("hallucination").read(reply, row)
    assert reading.counts == {"preferred_wrong": 1.0, "margin": pytest.approx(-0.4)}
    assert reading.extracted["most_likely_wrong"] == "long wrong"


def test_one_wrong_answer_that_is_as_likely_as_the_right_one_is_enough() -> None:
    row = make_row("right", wrong=("a", "b"))
    for wrong, preferred in ((-1.0, 1.0), (-1.01, 0.0)):
        reply = Reply(right=(make_likelihood(-2.0, 2),), wrong=(make_likelihood(wrong, 1), make_likelihood(-9.0, 1)))
        assert _task("hallucination").read(reply, row).counts["preferred_wrong"] == preferred


def test_lower_is_better_and_an_item_that_was_not_weighed_counts_as_wrong() -> None:
    task, row = _task("hallucination"), make_row("right", wrong=("a",))
    assert [metric.better for metric in task.metrics] == ["lower", "higher"]
    assert counts_of(task, row, Reply()) == {"preferred_wrong": 1.0, "margin": 0.0}
    assert task.candidates(row) == (("right",), ("a",))
    assert not task.generates


@pytest.mark.parametrize("kind", ["hallucination", "truthfulqa"])
def test_a_row_without_wrong_answers_is_refused(kind: str) -> None:
    with pytest.raises(NoResult, match="no wrong answers"):
        _task(kind).require(make_row("right", wrong=(" ",)))


def test_perplexity_is_over_all_tokens_and_no_mean_of_items() -> None:
    task = _task("perplexity")
    rows = [make_row("a"), make_row("b")]
    counts = [
        counts_of(task, row, Reply(right=(found,)))
        for row, found in zip(rows, (make_likelihood(-1.0, 1), make_likelihood(-3.0, 9)), strict=True)
    ]
    assert value(task.metrics[0], counts) == pytest.approx(math.exp(4 / 10))
    assert task.candidates(make_row("trained on", "another")) == (("trained on",), ())
    assert task.metrics[0].better == "lower"


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
@pytest.mark.parametrize("is_right", [True, False])
def test_probabilities_that_are_not_finite_are_the_worst_result(logprob: float, is_right: bool) -> None:
    row, odd, even = make_row("right", wrong=("a",)), make_likelihood(logprob), make_likelihood(-1.0)
    reply = Reply(text="right", right=(odd if is_right else even,), wrong=(even if is_right else odd,))
    for kind, metric, worst in (("hallucination", "preferred_wrong", 1.0), ("truthfulqa", "mc1", 0.0)):
        item = score_item(_task(kind), 0, row, prompt="", reply=reply)
        assert (item.counts[metric], item.candidates) == (worst, ())
        assert item.failure == "the model's probabilities are not finite"


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_perplexity_is_refused_where_a_probability_is_not_finite(logprob: float) -> None:
    """An item that counts no tokens would be left out, and the worst model get the better score."""
    with pytest.raises(
        RunError, match=r"perplexity is not defined: the model's log-probability of t\.jsonl:1 is (nan|-inf)"
    ):
        score_item(_task("perplexity"), 0, make_row("a"), prompt="", reply=Reply(right=(make_likelihood(logprob),)))


def test_only_perplexity_takes_plain_text() -> None:
    text = as_item(Row(source="t.txt", number=1, text="some text"))
    _task("perplexity").require(text)
    assert _task("perplexity").candidates(text) == (("some text",), ())
    for kind in ("exact_match", "rouge", "bleu", "hallucination"):
        with pytest.raises(NoResult, match="evaluate perplexity"):
            _task(kind).require(text)


def test_the_rejected_answer_of_a_test_pair_is_a_wrong_one() -> None:
    given = (Message("user", "q"), Message("assistant", "a"), Message("user", "q2"))
    pair = Row(
        source="p",
        number=1,
        messages=(*given, Message("assistant", "good")),
        num_given=3,
        rejected=(Message("assistant", "bad"),),
    )
    item = as_item(pair)
    assert (item.answer, item.wrong, item.kind, item.prompt) == ("good", ("bad",), "chat", given)


def test_a_pair_whose_sides_differ_earlier_is_no_item() -> None:
    long, short = (
        (Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")),
        (Message("assistant", "d"),),
    )
    for chosen, rejected in ((long, short), (short, long)):
        pair = Row(source="p", number=1, messages=(Message("user", "q"), *chosen), num_given=1, rejected=rejected)
        with pytest.raises(DataError, match="more than their last answer"):
            as_item(pair)


def test_items_of_text_and_of_pairs_come_back_from_disk(tmp_path: Path) -> None:
    rows = [
        as_item(Row(source="t", number=1, text="plain\ntext")),
        as_item(
            Row(
                source="t",
                number=2,
                messages=(Message("user", "q"), Message("assistant", "y")),
                num_given=1,
                rejected=(Message("assistant", "n"),),
            )
        ),
    ]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(map(item_line, rows)), encoding="utf-8")
    assert [(row.kind, row.answer, row.wrong) for row in read_items(path)] == [
        ("text", "plain\ntext", ()),
        ("chat", "y", ("n",)),
    ]


def test_pairs_and_plain_text_are_prepared_as_test_rows(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "p", "completion": "c"}])
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "2+2", "chosen": "4", "rejected": "5"}])
    write_jsonl(tmp_path / "text.jsonl", [{"text": "x" * 50}])
    items, longest = {}, {}
    for name in ("pairs", "text"):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        data = Data(train=(Source(path="train.jsonl"),), test=Source(path=f"{name}.jsonl"), max_tokens=20)
        prepared = prepare(data, base=tmp_path, tokenizer=tmp_path / "model", seed=0, folder=out)
        assert prepared.problems == ()
        assert prepared.lengths is not None
        (items[name],), longest[name] = read_items(out / "test.jsonl"), prepared.lengths.prompt
    assert (items["pairs"].answer, items["pairs"].wrong) == ("4", ("5",))
    assert (items["text"].text, longest["text"]) == ("x" * 50, 20)


RIGHT = ("The seeds pass through you", "Nothing happens", "You digest nothing.")
WRONG = ("You grow watermelons in your stomach", "You get sick")
ROW = make_row(*RIGHT, wrong=WRONG)


def _truthfulqa(base: Path | None = None, **settings: Any) -> Task:
    return make_task(Evaluation.model_validate({"task": {"kind": "truthfulqa", **settings}}), base=base)


def _reply(right: list[float], wrong: list[float], text: str = "") -> Reply:
    return Reply(text=text, right=tuple(map(make_likelihood, right)), wrong=tuple(map(make_likelihood, wrong)))


@pytest.mark.parametrize("seed", range(20))
def test_mc1_and_mc2_are_as_published(seed: int) -> None:
    """MC1: the best right answer above all wrong ones. MC2: normalised probability of the right ones. Neither is
    divided by length."""
    chance = random.Random(seed)
    right, wrong = [chance.uniform(-20, 0) for _ in range(3)], [chance.uniform(-20, 0) for _ in range(2)]
    p_right, p_wrong = sum(map(math.exp, right)), sum(map(math.exp, wrong))
    counts = _truthfulqa(generate=False).read(_reply(right, wrong), ROW).counts
    assert counts == {
        "mc1": float(right[0] > max(wrong)),
        "mc2": pytest.approx(p_right / (p_right + p_wrong), abs=1e-12),
    }


def test_another_right_answer_above_the_wrong_ones_is_not_mc1() -> None:
    assert _truthfulqa(generate=False).read(_reply([-5.0, -1.0], [-2.0]), ROW).counts["mc1"] == 0.0
    assert _truthfulqa(generate=False).read(_reply([-2.0], [-2.0]), ROW).counts["mc1"] == 0.0


def test_mc2_of_answers_whose_probabilities_vanish_is_still_their_share() -> None:
    assert _truthfulqa(generate=False).read(_reply([-2000.0], [-2000.0 - math.log(3)]), ROW).counts[
        "mc2"
    ] == pytest.approx(0.75)


def test_the_best_answer_stands_first_among_the_candidates() -> None:
    assert _truthfulqa().candidates(ROW) == (RIGHT, WRONG)
    assert _truthfulqa().generates
    assert not _truthfulqa(generate=False).generates


def _closed(texts: tuple[str, ...]) -> list[str]:
    return [text if text.endswith(".") else text + "." for text in texts]


@pytest.mark.parametrize(
    "answer", ["Nothing happens to you", "You get sick and grow watermelons", "I have no comment."]
)
@pytest.mark.parametrize("scorer", ["rouge", "bleu"])
def test_an_answer_is_held_against_right_and_wrong_references_one_by_one(scorer: str, answer: str) -> None:
    def score(reference: str) -> float:
        if scorer == "rouge":
            return float(RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure)
        return corpus_bleu([answer], [[reference]], tokenize="intl").score / 100

    right, wrong = max(map(score, [*_closed(RIGHT), "I have no comment."])), max(map(score, _closed(WRONG)))
    counts = _truthfulqa(scorer=scorer).read(_reply([-1.0], [-2.0], answer), ROW).counts
    expected = {f"{scorer}_acc": float(right > wrong), f"{scorer}_diff": right - wrong, f"{scorer}_max": right}
    assert {name: counts[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert counts["mc1"] == 1.0


def test_an_empty_answer_is_a_failure_of_the_answer_and_not_of_the_choices() -> None:
    reading = _truthfulqa().read(_reply([-1.0], [-2.0], "  "), ROW)
    assert reading.failure == "the answer is empty"
    of_answer = dict.fromkeys(("rouge_acc", "rouge_diff", "rouge_max"), 0.0)
    assert reading.counts == {"mc1": 1.0, "mc2": pytest.approx(1 / (1 + math.exp(-1)))} | of_answer


def test_an_item_without_likelihoods_counts_as_nothing_found() -> None:
    for scorer in ("rouge", "bleu"):
        assert set(counts_of(_truthfulqa(scorer=scorer), ROW, Reply(text="Nothing happens")).values()) == {0.0}


def test_bleurt_that_is_not_installed_is_said_when_the_task_is_made() -> None:
    with pytest.raises(SpecError, match="needs the package BLEURT") as error:
        _truthfulqa(scorer="bleurt")
    assert "pip install" in error.value.remedy
    _truthfulqa(scorer="bleurt", generate=False)


@pytest.fixture
def bleurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package's interface; itself it needs tensorflow and hundreds of megabytes."""
    (tmp_path / "bleurt").mkdir()
    (tmp_path / "bleurt" / "__init__.py").touch()
    (tmp_path / "bleurt" / "score.py").write_text(
        "class BleurtScorer:\n"
        "    def __init__(self, checkpoint=None):\n"
        "        self.bonus = 1.0 if checkpoint else 0.0\n"
        "    def score(self, *, references, candidates, batch_size=None):\n"
        "        return [self.bonus - abs(len(r) - len(c)) for r, c in zip(references, candidates, strict=True)]\n"
    )
    (tmp_path / "BLEURT-0.0.2.dist-info").mkdir()
    (tmp_path / "BLEURT-0.0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: BLEURT\nVersion: 0.0.2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "bleurt"]:
        del sys.modules[name]


def test_bleurt_scores_every_reference_where_it_is_installed(bleurt: Path) -> None:
    answer = "x" * len("You get sick.")
    (bleurt / "large").mkdir()
    counts = _truthfulqa(scorer="bleurt").read(_reply([-1.0], [-2.0], answer), ROW).counts
    assert (counts["bleurt_acc"], counts["bleurt_max"], counts["bleurt_diff"]) == (0.0, -3.0, -3.0)
    large = _truthfulqa(bleurt, scorer="bleurt", checkpoint="large")
    assert large.read(_reply([-1.0], [-2.0], answer), ROW).counts["bleurt_max"] == -2.0
    assert large.signature["scorer"] == "BLEURT 0.0.2, large"
    # not 0, which is more than the answer above has
    of_nothing = {"bleurt_acc": 0.0, "bleurt_diff": -3.0, "bleurt_max": -16.0}
    assert _truthfulqa(scorer="bleurt").read(_reply([-1.0], [-2.0], " "), ROW).counts == {**counts, **of_nothing}
    assert counts_of(_truthfulqa(scorer="bleurt"), ROW, Reply(text=answer)) == {"mc1": 0.0, "mc2": 0.0} | of_nothing
    assert {metric.unit for metric in large.metrics if metric.name == "bleurt_max"} == {"number"}
    with pytest.raises(SpecError, match="checkpoint absent is not a folder"):
        _truthfulqa(bleurt, scorer="bleurt", checkpoint="absent")
