"""Tasks that generate nothing: how likely given answers are to the model."""

import math

from finefit.data.rows import Row
from finefit.errors import RunError
from finefit.spec.tasks import Perplexity
from finefit.stats.metrics import Metric, mean
from finefit.tasks.task import (
    Likelihood,
    NoResult,
    Reply,
    ScoredReply,
    Task,
    require_right,
    require_wrong,
    right_answers,
    wrong_answers,
)


def require_likelihoods(reply: Reply, *, wrong: bool) -> None:
    """An item without all of its likelihoods has no result."""
    if not reply.right or (wrong and not reply.wrong):
        raise NoResult("its answers could not be weighed")


def require_finite(reply: Reply) -> None:
    """Weights that have diverged prefer nothing: such numbers have no order."""
    if not all(math.isfinite(found.logprob) for found in (*reply.right, *reply.wrong)):
        raise NoResult("the model's probabilities are not finite")


def hallucination(name: str) -> Task:
    """Per token: a fabricated answer usually differs in length from the right one, and the longer of two texts is
    always less likely."""

    def per_token(found: Likelihood) -> float:
        return found.logprob / found.tokens

    def read(reply: Reply, _: Row) -> ScoredReply:
        require_likelihoods(reply, wrong=True)
        require_finite(reply)
        worst = max(reply.wrong, key=per_token)
        right, wrong = per_token(reply.right[0]), per_token(worst)
        return ScoredReply(
            extracted={"right": right, "wrong": wrong, "most_likely_wrong": worst.text},
            counts={"preferred_wrong": float(wrong >= right), "margin": right - wrong},
        )

    preferred_wrong = Metric(name="preferred_wrong", aggregate="rate", counts=("preferred_wrong",), better="lower")
    return Task(
        name=name,
        metrics=(preferred_wrong, mean("margin", unit="number")),
        read=read,
        nothing=lambda _: {"preferred_wrong": 1.0, "margin": 0.0},
        require=require_wrong,
        generates=False,
        candidates=lambda row: (right_answers(row)[:1], wrong_answers(row)),
        signature={
            "preferred_wrong": "any wrong answer is at least as likely per token, its end token included, as the right one",  # noqa: E501
            "margin": "nats per token",
        },
    )


def perplexity(name: str, settings: Perplexity) -> Task:
    """Of the answer that is trained on: exp of the validation loss on the same rows."""

    def read(reply: Reply, row: Row) -> ScoredReply:
        require_likelihoods(reply, wrong=False)
        nats, tokens = -sum(found.logprob for found in reply.right), sum(found.tokens for found in reply.right)
        if not math.isfinite(nats):  # leaving the item out would make the score that of the others
            raise RunError(
                f"perplexity is not defined: the model's log-probability of {row.place} is {-nats}",
                "its weights may have diverged: evaluate another checkpoint, or leave perplexity out of evaluate",
            )
        return ScoredReply(extracted=None, counts={"nats": nats, "tokens": float(tokens)})

    counts = ("nats", "tokens")
    return Task(
        name=name,
        metrics=(Metric(name="perplexity", aggregate="perplexity", counts=counts, unit="number", better="lower"),),
        read=read,
        nothing=lambda _: {"nats": 0.0, "tokens": 0.0},
        require=require_right,
        generates=False,
        candidates=lambda row: ((row.answer,), ()),
        window=settings.window,
        signature={
            "tokens": "of the answer and its end",
            "text": f"in windows of {settings.window} tokens behind one another, the first of each not counted",
        },
    )
