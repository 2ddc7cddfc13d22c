"""Rehearsals and counts in the test's own process: the same code as in a process of its own, without its start."""

import warnings

import pytest

from finefit.artifacts.forecasts import Answer, Question
from finefit.artifacts.records import Failure
from finefit.errors import FinefitError
from finefit.pipeline import forecasting, sizes
from finefit.plan import worker


def ask_here(question: Question) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the process does
        try:
            return Answer(rooms=tuple(worker.rooms(question))) if question.only_rooms else Answer(forecasts=tuple(worker.answer(question)))
        except FinefitError as error:
            return Answer(failure=Failure.of(error))


def rehearse_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forecasting, "ask", ask_here)
    patch.setattr(sizes, "_counted", sizes.count)
