"""A script in the process of its stage: whatever it does to that process is told as its own doing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finefit.artifacts.records import StageJob, StageOutcome, read_record, write_record
from finefit.artifacts.rundir import StageDir
from finefit.spec.stages import PythonStage


def _worked(folder: Path, script: str) -> tuple[int, StageOutcome]:
    """How its process ended, and what it left on record."""
    where = StageDir(folder / "1-own")
    where.path.mkdir()
    (folder / "own.py").write_text(f"import os, sys, signal\n{script}\n", encoding="utf-8")
    (folder / "raw.txt").write_text("raw", encoding="utf-8")
    asked = {
        "kind": "python",
        "script": "own.py",
        "inputs": {"raw": "raw.txt"},
        "arguments": ["{raw}", "--to={output}/a.txt"],
        "outputs": ["a.txt"],
    }
    stage = PythonStage.model_validate_json(json.dumps(asked))
    write_record(
        where.job,
        StageJob(name="own", pipeline="p", seed=1, device="cpu", precision="fp32", base=str(folder), stage=stage),
    )
    command = [sys.executable, "-m", "finefit.stages.python", str(where.job)]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as a UTF-8 locale has it
    done = subprocess.run(command, env=strict, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode, read_record(where.outcome, StageOutcome)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os._exit(0)", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("raise KeyboardInterrupt", -2)],
)
def test_a_script_that_ends_its_process_is_told_of_and_not_finefit(tmp_path: Path, ending: str, code: int) -> None:
    ended, made = _worked(tmp_path, ending)
    assert made.failure is not None
    assert (ended, made.failure.kind) == (code, "SpecError")
    assert made.failure.problem.startswith("own.py ended its process")


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ("raise ValueError('no ideas')", "ValueError: no ideas"),
        ("raise ValueError('\\udcff')", r"ValueError: \udcff"),
        ("sys.stdout.close(); raise ValueError('no words')", "ValueError: no words"),
        ("os.close(1); raise ValueError('no log')", "ValueError: no log"),
    ],
)
def test_a_script_that_fails_is_told_by_its_own_words(tmp_path: Path, failing: str, told: str) -> None:
    code, made = _worked(tmp_path, failing)
    assert made.failure is not None
    assert (code, made.failure.problem) == (2, f"own.py (line 2): {told}")


def test_a_script_that_ends_with_words_that_are_no_text_is_told_by_them(tmp_path: Path) -> None:
    _, made = _worked(tmp_path, "sys.exit('bad name: \\udcff')")
    assert made.failure is not None
    assert made.failure.problem == r"own.py ended with bad name: \udcff"


@pytest.mark.parametrize("harmless", ["sys.stdout.close()", "sys.stdout = None", "print('\\udcff')"])
def test_what_a_script_does_to_its_words_does_not_spoil_what_it_has_made(tmp_path: Path, harmless: str) -> None:
    code, made = _worked(tmp_path, f"open('a.txt', 'w').write('made')\n{harmless}")
    assert (code, made.failure) == (0, None)


@pytest.mark.parametrize(
    "removing",
    ["shutil.rmtree(os.getcwd())", "shutil.rmtree(os.getcwd()); open(sys.argv[2][5:].removesuffix('/a.txt'), 'w')"],
)
def test_a_script_that_removes_its_folder_is_told_of_and_not_finefit(tmp_path: Path, removing: str) -> None:
    code, made = _worked(tmp_path, f"import shutil; {removing}")
    assert made.failure is not None
    assert (code, made.failure.problem) == (2, "the script has removed the folder that it was to fill")


def test_a_script_that_comes_to_its_end_is_told_by_what_it_made(tmp_path: Path) -> None:
    script = "open(sys.argv[2].removeprefix('--to='), 'w').write(open(sys.argv[1]).read())"
    assert _worked(tmp_path, script)[1].failure is None
    assert (tmp_path / "1-own" / "output" / "a.txt").read_text(encoding="utf-8") == "raw"
