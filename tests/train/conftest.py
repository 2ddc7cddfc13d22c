"""One job for each kind of tuning, run once without a fault; and a line for each count of faults at the end of the test run."""

import multiprocessing
from collections.abc import Callable, Iterator

import pytest

from tests.faults import FULL, Reference, make_job, make_reference

COUNTS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(make_job(tmp_path_factory.mktemp("lora")))


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(make_job(tmp_path_factory.mktemp("full"), spec=FULL))


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """Not even by a test that fails between start and finish."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def count(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shown in the summary of the test run."""
    return request.config.stash.setdefault(COUNTS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(COUNTS, None):
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.line(line)
