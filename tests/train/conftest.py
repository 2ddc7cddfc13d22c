"""One job for each kind of tuning, run once without a fault; and a line for each count of faults at the end of the test
run."""

import multiprocessing
from collections.abc import Callable, Iterator

import pytest

from tests.faults import FULL, Reference, make_job, make_reference


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


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Shown in the summary of the test run, whichever process it ran in."""
    return lambda line: record_property("faults", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    if lines := [str(value) for report in reports for name, value in report.user_properties if name == "faults"]:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.line(line)
