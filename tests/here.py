"""The jobs of the planning process in the test's own: the same code, without its start. `tests.plan.test_client` and
commands that tests start as processes ask the real one."""

import warnings
from typing import Any

import pytest

from finefit.plan import client


def ask_here(job: client.Job, *arguments: object) -> Any:
    from finefit.model.load import quiet  # with all of torch, which most tests do without
    from finefit.plan.worker import JOBS

    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the process does
        return JOBS[job](*arguments)


def rehearse_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client, "ask", ask_here)
