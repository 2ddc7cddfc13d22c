"""Rehearsals and counts in the test's own process: the same code as in a process of its own, without its start. `tests.pipeline.test_rehearsing` and
the commands that tests start as processes ask the real one."""

import warnings

import pytest

from finefit.artifacts.forecasts import Answer, Question
from finefit.pipeline import forecasting, sizes


def ask_here(question: Question) -> Answer:
    from finefit.plan.worker import reply  # with all of torch, which most tests do without

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the process does
        return reply(question)


def rehearse_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forecasting, "ask", ask_here)
    patch.setattr(sizes, "_counted", sizes.count)
