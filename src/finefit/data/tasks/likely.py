"""Tasks that generate nothing: how likely given answers are to the model."""

import math

from finefit.data.rows import Row
from finefit.data.tasks.references import require_right, require_wrong, right_answers, wrong_answers
from finefit.data.tasks.task import Likelihood, NoResult, Reading, Reply, Task
from finefit.errors import RunError
from finefit.spec.tasks import Perplexity
from finefit.stats.metrics import Metric, mean


def per_token(found: Likelihood) -> float:
    return found.logprob / found.tokens


def asked_for(reply: Reply, *, wrong: bool) -> None:
    """An item's likelihoods are all there or the item has no result."""
    if not reply.right or (wrong and not reply.wrong):
        raise NoResult("its answers could not be weighed")


def require_finite(reply: Reply) -> None:
    """Weights that have diverged prefer nothing: there is no order among such numbers."""
    if not all(math.isfinite(found.logprob) for found in (*reply.right, *reply.wrong)):
        raise NoResult("the model's probabilities are not finite")


def hallucination(name: str) -> Task:
    """Per token, for a fabricated answer is as a rule longer or shorter than the right one, and the longer of two texts is always less likely."""

    def read(reply: Reply, _: Row) -> Reading:
        asked_for(reply, wrong=True)
        require_finite(reply)
        right, worst = per_token(reply.right[0]), max(reply.wrong, key=per_token)
        counts = {"preferred_wrong": float(per_token(worst) >= right), "margin": right - per_token(worst)}
        return Reading(
            extracted={"right": right, "wrong": per_token(worst), "most_likely_wrong": worst.text}, counts=counts
        )

    return Task(
        name=name,
        metrics=(
            Metric(name="preferred_wrong", aggregate="rate", counts=("preferred_wrong",), better="lower"),
            mean("margin", unit="number"),
        ),
        read=read,
        nothing=lambda _: {"preferred_wrong": 1.0, "margin": 0.0},
        require=require_wrong,
        generates=False,
        candidates=lambda row: (right_answers(row)[:1], wrong_answers(row)),
        signature={
            "preferred_wrong": "any wrong answer is at least as likely per token, its end token included, as the right one",
            "margin": "nats per token",
        },
    )


def perplexity(name: str, settings: Perplexity) -> Task:
    """Of the answer that is trained on: exp of the validation loss, were the rows the same."""

    def read(reply: Reply, row: Row) -> Reading:
        asked_for(reply, wrong=False)
        nats, tokens = -sum(found.logprob for found in reply.right), sum(found.tokens for found in reply.right)
        if not math.isfinite(nats):  # without this item the others would be all that counts
            raise RunError(
                f"perplexity is not defined: the model's log-probability of {row.place} is {-nats}",
                "its weights may have diverged: evaluate another checkpoint, or leave perplexity out of evaluate",
            )
        return Reading(extracted=None, counts={"nats": nats, "tokens": float(tokens)})

    return Task(
        name=name,
        metrics=(
            Metric(name="perplexity", aggregate="perplexity", counts=("nats", "tokens"), unit="number", better="lower"),
        ),
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
