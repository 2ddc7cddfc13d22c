"""Files are opened and read within limits, whatever lies in their place."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from finefit import bounded
from finefit.artifacts.records import Check, write_record
from tests.memory import peak_of

MIB = 1 << 20


def test_a_short_record_is_read_where_its_limit_would_not_fit_into_memory(tmp_path: Path) -> None:
    write_record(tmp_path / "check.json", Check(findings=()))
    setup = "from finefit.artifacts.records import Check, read_record; Check.MAX_BYTES = 1 << 30"
    code = "assert read_record(Path(sys.argv[1]), Check).findings == ()"
    assert peak_of(code, tmp_path / "check.json", setup=setup, brake=200 * MIB) < 64 * MIB


def test_a_file_that_grows_while_it_is_read_is_refused() -> None:
    with pytest.raises(OSError, match="grew while it was read"):
        bounded.read_bytes(Path("/proc/self/status"), MIB)  # it says that it has no bytes


def test_a_file_over_the_limit_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="it has 1,099,511,627,776 bytes, and at most 9 are read"):
        bounded.read_bytes(path, 9)


@pytest.mark.parametrize("place", ["a folder", "a pipe", "a device"])
def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path, place: str) -> None:
    path = tmp_path / "named"
    if place == "a folder":
        path.mkdir()
    elif place == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=place):
        bounded.open_binary(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(["[]"] * 50_000) + "]",
        "[" + ",".join(["[[]]"] * 50_000) + "]",
        "[" + ",".join(["{}"] * 50_000) + "]",
        "[" + ",".join(f'{{"{at}":{at}}}' for at in range(50_000)) + "]",
        "[" + ",".join(f'{{"{at}":[{at}.5]}}' for at in range(50_000)) + "]",
        "[" + ",".join(map(str, range(50_000))) + "]",
        "[" + ",".join(f'"{at}"' for at in range(50_000)) + "]",
    ],
    ids=lambda text: text[:12],
)
def test_the_memory_of_parsed_values_is_never_underestimated(text: str) -> None:
    """Strings, the names of values included, count by their length beside it."""
    tracemalloc.start()
    value = json.loads(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value
    assert peak < 1.25 * bounded.parsed_bytes(text) + len(text)


def test_json_whose_values_would_fill_the_memory_is_refused_before_it_is_parsed() -> None:
    text = b"[" + b"[]," * (6 * MIB) + b"[]]"
    tracemalloc.start()
    with pytest.raises(bounded.TooManyValues):
        bounded.parse_json(text)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


def test_depth_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        bounded.parse_json("[" * 100_000)


def test_the_end_of_a_file_of_any_size_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.touch()
    os.truncate(path, 1 << 40)
    with path.open("ab") as file:
        file.write(b"the last line\n")
    assert bounded.tail_of(path, 14) == b"the last line\n"
