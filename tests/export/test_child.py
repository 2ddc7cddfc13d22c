"""How another program ended decides which error it is."""

from pathlib import Path

import pytest

from finefit.errors import DiskFull, ModelError, WorkerDied
from finefit.export.child import Ended, failure, run_child


def _run(folder: Path, code: str, *arguments: str) -> Ended:
    (folder / "gguf.py").write_text(code)  # a name that is installed too
    return run_child("gguf", arguments, paths=[folder])


def test_the_given_folder_comes_before_what_is_installed(tmp_path: Path) -> None:
    ended = _run(tmp_path, "import sys; print(__file__, *sys.argv[1:])", "a b", "c")
    assert (ended.code, ended.tail) == (0, (f"{tmp_path / 'gguf.py'} a b c",))


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("for line in range(99): print(line)\nraise ValueError('no such layer')", ModelError, "no such layer"),
        ("raise OSError(28, 'No space left on device')", DiskFull, "full"),
        ("import os; os.kill(os.getpid(), 9)", WorkerDied, "SIGKILL"),
        (
            "import os; print('GGML_ASSERT(rows)', flush=True); os.abort()",
            ModelError,
            "GGML_ASSERT(rows)",
        ),
        ("import os; os.kill(os.getpid(), 4)", ModelError, "processor"),
        ("import sys; sys.exit(5)", ModelError, "5"),
    ],
)
def test_a_failed_program_is_the_error_that_it_means(
    code: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    found = failure(_run(tmp_path, code), "the model could not be converted", "take another", path=tmp_path)
    assert type(found) is error
    assert words in found.problem
    assert len(found.problem) < 2000
