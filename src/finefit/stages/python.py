"""A script of the user's own: it gets its inputs and a folder to fill, and must leave the outputs that it declares. Its
working directory is that folder."""

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from finefit.artifacts.atomic import is_full
from finefit.artifacts.records import Failure, StageJob, StageOutcome, write_record
from finefit.artifacts.rundir import StageDir
from finefit.errors import SpecError
from finefit.spec.stages import NAMED_INPUT, OUTPUT, PythonStage


def make(job: StageJob, out: Path) -> dict[str, Any]:
    stage = job.stage
    assert isinstance(stage, PythonStage)
    base = Path(job.base)
    script = (base / stage.script).resolve()
    places = {name: str((base / path).resolve()) for name, path in stage.inputs.items()}
    places |= {OUTPUT: str(out)}
    arguments = [NAMED_INPUT.sub(lambda found: places[found[1]], argument) for argument in stage.arguments]
    os.chdir(out)
    made = StageDir(out.parent).outcome
    write_record(made, StageOutcome(failure=Failure.of(_ended_within(script))))
    _run(script, arguments)
    made.unlink(missing_ok=True)
    _require(stage.outputs, out)
    return {"script": script.name, "outputs": {name: _size(out / name) for name in stage.outputs}}


def _ended_within(script: Path) -> SpecError:
    """The record while the script runs. It is only read if the process ends there, when nothing else can be written."""
    problem = f"{script.name} ended its process: by os._exit, a crash in a library, or because memory ran out"
    return SpecError(problem, "let the script return; its output is in the stage's log")


def _run(script: Path, arguments: list[str]) -> None:
    """In this process, so that it ends with it. The log stays open, whatever the script closes."""
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *sys.path]
    words = sys.stdout
    with os.fdopen(os.dup(words.fileno()), "w", encoding="utf-8", errors="backslashreplace") as log:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise SpecError(f"{script.name} ended with {end.code}", "its output is in the stage's log") from None
        except Exception as error:  # the boundary to the user's script: whatever it raises is reported
            if is_full(error):
                raise
            traceback.print_exc(file=log)
            problem = f"{script.name}{_line_of(error, script)}: {type(error).__name__}: {error}"
            raise SpecError(problem, "fix the script; its traceback is in the stage's log") from None
        finally:
            if not words.closed:
                words.flush()


def _line_of(error: Exception, script: Path) -> str:
    """The innermost of its own."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f" (line {frame.lineno})" for frame in frames if frame.filename == str(script)), "")


def _require(outputs: tuple[str, ...], out: Path) -> None:
    if not out.is_dir():
        raise SpecError(
            "the script has removed the folder that it was to fill",
            "let it write into {output} and leave the folder itself there",
        )
    if absent := [name for name in outputs if not (out / name).exists()]:
        there = ", ".join(sorted(path.name for path in out.iterdir())) or "nothing"
        raise SpecError(
            f"the script has not written {', '.join(absent)}; its folder holds {there}",
            "declare what it writes, below {output}, in `outputs`",
        )


def _size(path: Path) -> dict[str, int]:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}
