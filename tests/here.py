"""Rehearsals and counts in the test's own process: the same code as in a process of its own, without its start.
`tests.plan.test_client` and the commands that tests start as processes ask the real one."""

import warnings

import pytest

from finefit.artifacts.forecasts import RehearsalRequest, RehearsalResult
from finefit.plan import client, model_stubs


def ask_here(question: RehearsalRequest) -> RehearsalResult:
    from finefit.plan.worker import reply  # with all of torch, which most tests do without

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the process does
        return reply(question)


def rehearse_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client, "rehearse", ask_here)
    patch.setattr(model_stubs, "_count_in_process", model_stubs.count_parameters)
